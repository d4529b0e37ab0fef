"""The reference's full model, tower and pixels included, against which the remote-row engine is held.

Owns loading it, its rows, and its logits and greedy tokens for one prompt at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.harness.reference import KIMI_VISION_NAMES, import_reference
from lm_adapter.engines.hf import RemoteItem
from lm_adapter.items import Modality

VISION_START, VISION_END = 7, 8
MODEL_CLASSES = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
}


def reference_config(checkpoint: Path) -> Any:
    """The reference's config. Its Kimi class knows its own spelling only and keeps its defaults where it
    meets the published one, so that Kimi's is respelled here."""
    transformers = import_reference()
    raw = json.loads((checkpoint / "config.json").read_text())
    if raw["model_type"] != "kimi_k25":
        return transformers.AutoConfig.from_pretrained(checkpoint)
    vision = raw["vision_config"]
    return transformers.Kimi_K25Config(
        text_config=raw["text_config"],
        vision_config={own: vision[published] for published, own in KIMI_VISION_NAMES.items()},
        projection_hidden_size=vision["mm_hidden_size"],
        projection_layer_norm_eps=vision["projector_ln_eps"],
        image_token_id=raw["media_placeholder_token_id"],
        tie_word_embeddings=raw["tie_word_embeddings"],
    )


@dataclass(frozen=True, eq=False)
class Picture:
    """Random pixels of one item. pixel_values: [P, patch_dim]."""

    grid: tuple[int, int, int]
    pixel_values: torch.Tensor
    modality: Modality = Modality.IMAGE


class FullModel:
    """One family's full model in float32 on the CPU. Its checkpoint has every tensor, and no other."""

    def __init__(self, family: str, checkpoint: Path) -> None:
        transformers = import_reference()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.family = family
        model, info = getattr(transformers, MODEL_CLASSES[family]).from_pretrained(
            checkpoint, config=reference_config(checkpoint), dtype=torch.float32, output_loading_info=True
        )
        assert not any(info.values()), info
        self.model = model.eval()
        self.is_kimi = family == "kimi_k25"
        self.image_id = self.model.config.image_token_id
        # The published Kimi layout names one placeholder for both; the reference's own video id is another.
        self.video_id = self.model.config.video_token_id
        if self.is_kimi:
            # It splits rows into items by t*h*w/4 although a clip's frames are averaged, and fails for t > 1.
            self.model.model.get_image_features = self._kimi_features

    def picture(self, seed: int, grid: tuple[int, int, int], modality: Modality = Modality.IMAGE) -> Picture:
        patch_dim = 3 * 14 * 14 if self.is_kimi else 3 * 2 * 16 * 16
        generator = torch.Generator().manual_seed(seed)
        return Picture(grid, torch.randn(math.prod(grid), patch_dim, generator=generator), modality)

    def num_rows(self, grid: tuple[int, int, int]) -> int:
        t, h, w = grid
        return (1 if self.is_kimi else t) * h * w // 4

    def pixels(self, picture: Picture) -> torch.Tensor:
        values = picture.pixel_values
        return values.view(-1, 3, 14, 14) if self.is_kimi else values

    def _kimi_features(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **_: Any
    ) -> SimpleNamespace:
        inner = self.model.model
        parts = pixel_values.split(image_grid_thw.prod(-1).tolist())
        rows = [
            inner.mm_projector(inner.vision_tower(part, grid_thw=grid[None]).pooler_output).squeeze(1)
            for part, grid in zip(parts, image_grid_thw, strict=True)
        ]
        return SimpleNamespace(pooler_output=rows)

    @torch.no_grad()
    def item(self, picture: Picture) -> RemoteItem:
        """The item as a client would have it: rows [R, D * (1 + L)] of the reference's own tower."""
        grid = torch.tensor([picture.grid])
        if self.is_kimi:
            (rows,) = self._kimi_features(self.pixels(picture), grid).pooler_output
            return RemoteItem(picture.grid, rows, picture.modality, 0)
        output = self.model.model.visual(self.pixels(picture), grid_thw=grid)
        levels = list(getattr(output, "deepstack_features", None) or [])
        rows = torch.cat([output.pooler_output, *levels], dim=-1)
        return RemoteItem(picture.grid, rows, picture.modality, len(levels))

    def inputs(self, expanded_ids: Sequence[int], pictures: Sequence[Picture]) -> dict[str, Any]:
        """Arguments of the full model for one expanded prompt."""
        ids = torch.tensor([list(expanded_ids)])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        types = (ids == self.image_id).int() + 2 * (ids == self.video_id).int()
        if not self.is_kimi and pictures:
            inputs["mm_token_type_ids"] = types
        names = {
            Modality.IMAGE: ("pixel_values", "image_grid_thw"),
            Modality.VIDEO: ("pixel_values_videos", "video_grid_thw"),
        }
        for modality, (pixels, grids) in names.items():
            chosen = [picture for picture in pictures if picture.modality is modality]
            if chosen:
                inputs[pixels] = torch.cat([self.pixels(picture) for picture in chosen])
                inputs[grids] = torch.tensor([picture.grid for picture in chosen])
        return inputs

    @torch.no_grad()
    def logits(self, expanded_ids: Sequence[int], pictures: Sequence[Picture]) -> torch.Tensor:
        """[N, V] of one prompt."""
        self.model.model.rope_deltas = None
        logits: torch.Tensor = self.model(**self.inputs(expanded_ids, pictures)).logits[0]
        return logits

    def greedy(
        self, expanded_ids: Sequence[int], pictures: Sequence[Picture], max_new_tokens: int
    ) -> list[int]:
        """Tokens by one whole forward pass with pixels for each, so that all positions are recomputed."""
        ids = list(expanded_ids)
        for _ in range(max_new_tokens):
            ids.append(int(self.logits(ids, pictures)[-1].argmax()))
        return ids[len(expanded_ids) :]

    def generate(
        self, expanded_ids: Sequence[int], pictures: Sequence[Picture], max_new_tokens: int
    ) -> list[int]:
        """Tokens by the reference's own loop. Not for Qwen prompts that end in vision: it counts each axis on
        from the last token, not from the maximum, and disagrees with its own forward pass there."""
        self.model.model.rope_deltas = None
        output = self.model.generate(
            **self.inputs(expanded_ids, pictures),
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            do_sample=False,
        )
        return list(output[0, len(expanded_ids) :].tolist())
