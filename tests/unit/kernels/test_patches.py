"""Patches from uint8 frames, bit for bit those of the preprocessors."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.settings import (
    MoonViTSettings,
    Normalisation,
    QwenVLSettings,
    SteppedNormalisation,
)
from encoder_service.scheduler.buckets import Bucket
from encoder_service.towers.fused_inputs import FusedInputBuilder
from encoder_service.towers.kernels import patchify_items
from encoder_service.types import Grid

# Means and deviations that float32 does not hold exactly, different in every channel.
NORMALISATION = Normalisation(
    (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), 1 / 255
)
HALVES = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)
LIMITS = DecodeLimits(max_encoded_bytes=1 << 20, max_image_pixels=1 << 20)


def random_frames(generator: torch.Generator, num_frames: int, height: int, width: int) -> torch.Tensor:
    return torch.randint(256, (num_frames, height, width, 3), generator=generator, dtype=torch.uint8)


def qwen(normalisation: Normalisation, patch_size: int = 16) -> QwenVLPreprocessor:
    settings = QwenVLSettings(patch_size, 2, 2, 1, 1 << 20, normalisation)
    return QwenVLPreprocessor(settings, LIMITS)


def moonvit(normalisation: Normalisation) -> MoonViTPreprocessor:
    return MoonViTPreprocessor(MoonViTSettings(14, 2, 4096, 512, normalisation), LIMITS)


class Item(NamedTuple):
    """Frames of one item; without them its patches were given ready-made."""

    num_frames: int
    h: int
    w: int
    has_frames: bool = True


def launch_items(
    preprocessor: QwenVLPreprocessor | MoonViTPreprocessor,
    patch_size: int,
    items: list[Item],
    extra: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    frames: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that the launch writes over a buffer full of sevens, and those that it should. frames: of the only
    item; random ones without them."""
    merges_time = isinstance(preprocessor, MoonViTPreprocessor)
    temporal, given = (1 if merges_time else 2), preprocessor.settings.normalisation
    grids = [Grid(-(-item.num_frames // temporal), item.h, item.w) for item in items]
    build = FusedInputBuilder(lambda grid: None, merge_size=2, merges_time=merges_time)
    inputs = build.prepare(grids)
    if extra:
        total = inputs.num_patches + extra
        inputs = build.pad(inputs, Bucket(total, len(inputs.seqlens) + 3, total, 8))
    # Items lie anywhere in the memory, at even bytes and in any order.
    sources = torch.full((len(inputs.items), 2), 2**40)
    memory, end, expected = [], 0, []
    for index in reversed(range(len(items))):
        item, grid = items[index], grids[index]
        if frames is None or len(items) > 1:
            frames = random_frames(generator, item.num_frames, item.h * patch_size, item.w * patch_size)
        patches = preprocessor.patchify(frames).to(dtype)
        expected.insert(0, patches if item.has_frames else torch.full_like(patches, 7))
        assert len(patches) == grid.num_patches
        sources[index] = torch.tensor([end + 6 if item.has_frames else -1, item.num_frames])
        if item.has_frames:
            memory += [torch.zeros(6, dtype=torch.uint8), frames.flatten()]
            end += 6 + frames.numel()
    padding = torch.zeros(extra, preprocessor.patch_dim, dtype=dtype)
    out = torch.full((inputs.num_patches, preprocessor.patch_dim), 7, dtype=dtype, device=device)
    patchify_items(
        torch.cat([*memory, torch.zeros(0, dtype=torch.uint8)]).to(device),
        inputs.items.to(device),
        sources.to(device),
        out,
        given.image_mean,
        given.image_std,
        given.rescale_factor,
        patch_size=patch_size,
        merge_size=2,
        temporal_patch_size=temporal,
        merges_time=merges_time,
        in_steps=given.in_steps,
    )
    return out.cpu(), torch.cat([*expected, padding])


MIXES = {
    "still": [Item(1, 2, 2)],
    "stills": [Item(1, 4, 2), Item(1, 2, 6), Item(1, 2, 2)],
    "clips": [Item(3, 2, 4), Item(1, 4, 2), Item(4, 2, 2), Item(2, 2, 2)],
    "some-ready-made": [Item(2, 2, 2, False), Item(1, 2, 4), Item(5, 2, 2, False), Item(3, 2, 2)],
    "all-ready-made": [Item(1, 2, 2, False), Item(2, 2, 4, False)],
}


@pytest.mark.parametrize(("mix", "extra"), [*((mix, 12) for mix in MIXES), ("clips", 0)])
@pytest.mark.parametrize("family", ["qwen", "moonvit"])
def test_a_batch_in_one_launch(
    family: str, mix: str, extra: int, device: torch.device, generator: torch.Generator
) -> None:
    """The preprocessor's patches, zeros in the padding, and ready-made patches as they were."""
    patch_size = {"qwen": 16, "moonvit": 14}[family]
    preprocessor = moonvit(NORMALISATION) if family == "moonvit" else qwen(NORMALISATION, patch_size)
    found, expected = launch_items(
        preprocessor, patch_size, MIXES[mix], extra, torch.bfloat16, device, generator
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "normalisation",
    [
        NORMALISATION,
        SteppedNormalisation(NORMALISATION.image_mean, NORMALISATION.image_std, 1 / 255),
        SteppedNormalisation(HALVES.image_mean, HALVES.image_std, 1 / 255),
    ],
    ids=["fused", "steps", "steps of halves"],
)
def test_every_pixel_value_in_every_channel(
    normalisation: Normalisation, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """All 256 values, so that no rounding of a division hides."""
    frames = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).repeat(1, 2, 2, 3)
    found, expected = launch_items(
        qwen(normalisation), 16, [Item(1, 2, 2)], 0, dtype, device, generator, frames
    )
    assert torch.equal(found, expected)
