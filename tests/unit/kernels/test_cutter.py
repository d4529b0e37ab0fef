"""Patches of an uploaded batch, cut in one launch, against the preprocessor item by item."""

from __future__ import annotations

import time

import pytest
import torch

from encoder_service.engine.patches import KernelCutter, PlainCutter, num_frames
from encoder_service.engine.staging import PixelStaging
from encoder_service.engine.streams import streams_of
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.scheduler.buckets import Bucket
from encoder_service.towers.fused_inputs import FusedInputBuilder
from encoder_service.types import FrameItem, Grid, PatchItem, TowerItem
from tests.unit.kernels.test_patches import HALVES, NORMALISATION, moonvit, qwen, random_frames

MARK = 77.0


@pytest.mark.parametrize(
    ("preprocessor", "with_frames"),
    [(qwen(NORMALISATION, 8), True), (qwen(NORMALISATION, 8), False), (moonvit(HALVES), True)],
    ids=["qwen", "qwen-without-frames", "moonvit"],
)
def test_p29_p33_frames_beside_patches_land_in_their_own_rows_and_padding_is_zero(
    preprocessor: QwenVLPreprocessor | MoonViTPreprocessor,
    with_frames: bool,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    side = preprocessor.settings.patch_size
    merges_time = isinstance(preprocessor, MoonViTPreprocessor)
    temporal = 1 if merges_time else 2
    grids = [Grid(1, 2, 4), Grid(1, 2, 2), Grid(2, 4, 2), Grid(1, 2, 2)]
    items: list[TowerItem] = []
    for index, grid in enumerate(grids):
        if index == 1 or not with_frames:
            patches = torch.randn(grid.num_patches, preprocessor.patch_dim, generator=generator)
            items.append(PatchItem(patches.bfloat16(), grid))
            continue
        depth = 1 if grid.t == 1 else grid.t * temporal
        frames = random_frames(generator, depth, grid.h * side, grid.w * side)
        items.append(FrameItem(frames, grid))
    streams = streams_of(device, time.monotonic)
    staging = PixelStaging(1 << 20, 8, device, streams)
    pixels = [item.frames_THWC if isinstance(item, FrameItem) else item.pixel_values for item in items]
    builder = FusedInputBuilder(lambda grid: None, merge_size=2, merges_time=merges_time)
    padded = builder.pad(builder.prepare(grids), Bucket(64, 8, 64, 2)).to(device)
    num_patches = sum(grid.num_patches for grid in grids)
    for _ in range(2):  # both staging slots
        uploaded = staging.upload(pixels, [num_frames(item) for item in items])
        uploaded.sources_I2[len(items) :] = 77  # of slots that no item is in: not read
        found, expected = (
            torch.full((64, preprocessor.patch_dim), MARK, dtype=torch.bfloat16, device=device)
            for _ in range(2)
        )
        assert preprocessor.patch_layout is not None
        KernelCutter(preprocessor.patch_layout).cut(items, uploaded, padded.items, found)
        PlainCutter(preprocessor).cut(items, uploaded, padded.items, expected)
        assert torch.equal(found[:num_patches], expected[:num_patches])
        given = items[1]
        assert isinstance(given, PatchItem)
        assert torch.equal(found[8:12].cpu(), given.pixel_values)
        assert not found[num_patches:].any()
        only = torch.full((num_patches, preprocessor.patch_dim), MARK, dtype=torch.bfloat16, device=device)
        KernelCutter(preprocessor.patch_layout).cut(items, uploaded, padded.items, only)
        assert torch.equal(only, found[:num_patches])
        staging.release(uploaded)
