"""Patches of a staged batch, cut in one launch, against the preprocessor item by item."""

from __future__ import annotations

import time

import pytest
import torch

from encoder_service.engine.patches import KernelCutter, PlainCutter, StagedBatch
from encoder_service.engine.staging import PixelStaging
from encoder_service.engine.streams import streams_of
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.scheduler.buckets import Bucket
from encoder_service.towers.fused_inputs import FusedInputBuilder
from encoder_service.types import FrameItem, Grid, PatchItem, TowerItem
from tests.unit.kernels.test_patches import HALVES, NORMALISATION, moonvit, qwen, random_frames

MARK = 77.0


@pytest.mark.parametrize("with_frames", [True, False])
@pytest.mark.parametrize("preprocessor", [qwen(NORMALISATION, 8), moonvit(HALVES)], ids=["qwen", "moonvit"])
def test_p33_frames_beside_patches_land_in_their_own_rows(
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
            items.append(PatchItem(torch.zeros(grid.num_patches, preprocessor.patch_dim), grid))
            continue
        num_frames = 1 if grid.t == 1 else grid.t * temporal
        frames = random_frames(generator, num_frames, grid.h * side, grid.w * side)
        items.append(FrameItem(frames, grid))
    num_patches = sum(grid.num_patches for grid in grids)

    streams = streams_of(device, time.monotonic)
    staging = PixelStaging(1 << 20, 8, device, streams)
    sources = [item.frames_THWC if isinstance(item, FrameItem) else item.pixel_values for item in items]
    staged = staging.upload(sources)
    assert staged is not None
    streams.compute.wait(staged[0].copied)
    builder = FusedInputBuilder(lambda grid: None, merge_size=2, merges_time=merges_time)
    padded = builder.pad(builder.prepare(grids), Bucket(64, 8, 64, 2)).to(device)
    batch = StagedBatch(items, *staged, padded.items)

    found, expected = (
        torch.full((num_patches, preprocessor.patch_dim), MARK, dtype=torch.bfloat16, device=device)
        for _ in range(2)
    )
    KernelCutter(preprocessor).cut_staged(batch, found)
    PlainCutter(preprocessor).cut_staged(batch, expected)
    assert torch.equal(found, expected)
    kept = expected[8:12] if with_frames else expected
    assert (kept == MARK).all()
    assert bool((expected == MARK).all()) is not with_frames
