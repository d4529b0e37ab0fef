"""Stands in for the processor's code in Kimi-VL's published checkpoints, which vLLM loads from there.

``engine_checkpoints`` copies it into a checkpoint. Imports nothing of this project.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin


class KimiVLImageProcessor(BaseImageProcessor):  # type: ignore[misc]
    model_input_names = ("pixel_values", "image_grid_hws")

    def __init__(
        self,
        patch_size: int = 14,
        in_token_limit: int = 4096,
        merge_kernel_size: tuple[int, int] = (2, 2),
        image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5),
        image_std: tuple[float, float, float] = (0.5, 0.5, 0.5),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.patch_size, self.in_token_limit = patch_size, in_token_limit
        self.merge_kernel_size = tuple(merge_kernel_size)
        self.image_mean, self.image_std = image_mean, image_std

    def preprocess(self, images: Any, return_tensors: str | None = None, **_options: Any) -> BatchFeature:
        images = images if isinstance(images, list | tuple) else [images]
        parts = [self._patches(image) for image in images]
        data = {
            "pixel_values": torch.cat([patches for patches, _ in parts]),
            "image_grid_hws": torch.tensor([grid for _, grid in parts]),
        }
        return BatchFeature(data, tensor_type=return_tensors)

    def _patches(self, image: Image.Image) -> tuple[torch.Tensor, list[int]]:
        side, (width, height) = self.patch_size, image.size
        count = (width // side) * (height // side)
        if count > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / count)
            image = image.resize((int(width * scale), int(height * scale)), Image.Resampling.BICUBIC)
        pixels = np.asarray(image.convert("RGB"))
        block = side * self.merge_kernel_size[0]
        pixels = np.pad(pixels, ((0, -pixels.shape[0] % block), (0, -pixels.shape[1] % block), (0, 0)))
        mean, std = (torch.tensor(values) for values in (self.image_mean, self.image_std))
        values = (torch.from_numpy(pixels).float() / 255 - mean) / std
        rows, columns = values.shape[0] // side, values.shape[1] // side
        blocks = values.view(rows, side, columns, side, 3).permute(0, 2, 4, 1, 3)
        return blocks.reshape(-1, 3, side, side), [rows, columns]


class KimiVLProcessor(ProcessorMixin):  # type: ignore[misc]
    attributes = ("image_processor", "tokenizer")
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"
    image_token = "<|media_pad|>"

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **kwargs: Any) -> None:
        super().__init__(image_processor, tokenizer, **kwargs)

    def __call__(
        self, images: Any = None, text: Any = None, return_tensors: str | None = None, **_options: Any
    ) -> BatchFeature:
        pictures = {} if images is None else dict(self.image_processor.preprocess(images))
        texts = [text] if isinstance(text, str) else list(text or [])
        merge_h, merge_w = self.image_processor.merge_kernel_size
        counts = iter(int(h) // merge_h * (int(w) // merge_w) for h, w in pictures.get("image_grid_hws", ()))
        expanded = [
            "".join(
                part if index % 2 == 0 else self.image_token * next(counts)
                for index, part in enumerate(_split(one, self.image_token))
            )
            for one in texts
        ]
        tokens = dict(self.tokenizer(expanded)) if expanded else {}
        return BatchFeature(tokens | pictures, tensor_type=return_tensors)


def _split(text: str, mark: str) -> list[str]:
    """The parts of a text, with the mark between them."""
    parts: list[str] = []
    for part in text.split(mark):
        parts += [part, mark]
    return parts[:-1]
