"""What transformers says: rows of its tower, and greedy tokens."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import VideoMetadata

from bench.harness.sglang import NUM_TOKENS

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CLIP = "<|vision_start|><|video_pad|><|vision_end|>"


def prompt(*parts: str) -> str:
    """One user turn."""
    return f"<|im_start|>user\n{''.join(parts)}<|im_end|>\n<|im_start|>assistant\n"


def decoded(clip: bytes) -> tuple[torch.Tensor, VideoMetadata]:
    """All frames of a file, uint8 [T, 3, H, W], from which the processor samples."""
    with av.open(io.BytesIO(clip), "r") as file:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
        rate = file.streams.video[0].average_rate
    assert rate is not None
    return torch.from_numpy(frames).permute(0, 3, 1, 2), VideoMetadata(len(frames), fps=float(rate))


class Reference:
    """The whole model of a checkpoint in float32."""

    def __init__(self, checkpoint: Path) -> None:
        self._processor = AutoProcessor.from_pretrained(checkpoint)
        self._model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def _inputs(self, text: str, images: Sequence[bytes], clips: Sequence[bytes] = ()) -> Any:
        media: dict[str, Any] = {}
        if images:
            media["images"] = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
        if clips:
            frames, metadata = zip(*map(decoded, clips), strict=True)
            media |= {"videos": list(frames), "video_metadata": list(metadata)}
        return self._processor(text=[text], return_tensors="pt", **media)

    def ids(self, text: str, images: Sequence[bytes]) -> list[int]:
        """The prompt's ids, placeholders expanded."""
        ids: list[int] = self._inputs(text, images)["input_ids"][0].tolist()
        return ids

    @torch.no_grad()
    def tokens(self, text: str, images: Sequence[bytes], clips: Sequence[bytes] = ()) -> list[int]:
        """NUM_TOKENS greedy ones."""
        inputs = self._inputs(text, images, clips)
        out = self._model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
        tokens: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens

    def needs_rows(self, text: str, images: Sequence[bytes]) -> bool:
        """Whether the tokens are others with zeros in place of each single image's rows."""
        tower = self._model.model.visual

        def without(index: int) -> list[int]:
            def zero(_module: Any, arguments: Any, keywords: dict[str, Any], out: Any) -> None:
                grids = keywords["grid_thw"] if "grid_thw" in keywords else arguments[1]
                sizes = (grids.prod(-1) // tower.spatial_merge_size**2).tolist()
                for rows in (out.pooler_output, *(getattr(out, "deepstack_features", None) or ())):
                    rows.split(sizes)[index].zero_()

            hook = tower.register_forward_hook(zero, with_kwargs=True)
            try:
                return self.tokens(text, images)
            finally:
                hook.remove()

        right = self.tokens(text, images)
        return all(without(index) != right for index in range(len(images)))

    @torch.no_grad()
    def rows(self, image: bytes) -> tuple[torch.Tensor, list[list[int]]]:
        """[n, hidden * (1 + deepstack)], main first, and grid_thw."""
        inputs = self._inputs(IMAGE, [image])
        out = self._model.model.visual(
            inputs["pixel_values"], grid_thw=inputs["image_grid_thw"], return_dict=True
        )
        levels = getattr(out, "deepstack_features", None) or []
        return torch.cat([out.pooler_output, *levels], -1), inputs["image_grid_thw"].tolist()
