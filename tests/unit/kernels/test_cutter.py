"""Patches of a staged batch, cut in one launch, against the preprocessor item by item."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from encoder_service.engine.patches import KernelCutter, PlainCutter, StagedBatch
from encoder_service.engine.staging import PixelStaging
from encoder_service.engine.streams import streams_of
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.scheduler.buckets import Bucket
from encoder_service.towers.fused_inputs import FusedInputBuilder, shape_row
from encoder_service.types import FrameItem, Grid, PatchItem, TowerItem
from tests.unit.kernels.test_patches import HALVES, NORMALISATION, moonvit, qwen, random_frames

MARK = 77.0


@pytest.mark.parametrize("with_frames", [True, False])
@pytest.mark.parametrize("preprocessor", [qwen(NORMALISATION, 8), moonvit(HALVES)], ids=["qwen", "moonvit"])
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
        num_frames = 1 if grid.t == 1 else grid.t * temporal
        frames = random_frames(generator, num_frames, grid.h * side, grid.w * side)
        items.append(FrameItem(frames, grid))
    streams = streams_of(device, time.monotonic)
    staging = PixelStaging(1 << 20, 8, device, streams, None)
    pixels = [item.frames_THWC if isinstance(item, FrameItem) else item.pixel_values for item in items]
    rows = np.array(
        [
            (
                *shape_row(item.grid, merges_time=merges_time),
                one.data_ptr(),
                one.nbytes,
                len(one) if isinstance(item, FrameItem) else 0,
                0,
                0,
            )
            for item, one in zip(items, pixels, strict=True)
        ]
    )
    for _ in range(2):  # both slots
        staged = staging.upload(rows, pixels, all_pinned=False)
        assert staged is not None
        streams.compute.wait(staged.slot.copied)
        builder = FusedInputBuilder(lambda grid: None, merge_size=2, merges_time=merges_time)
        padded = builder.pad(builder.prepare(grids), Bucket(64, 8, 64, 2)).to(device)
        sources_I2 = torch.full((8, 2), 77, dtype=torch.int64)
        sources_I2[: len(items)] = torch.from_numpy(staged.sources)
        batch = StagedBatch(items, staged, padded.items, sources_I2.to(device))

        found, expected = (
            torch.full((64, preprocessor.patch_dim), MARK, dtype=torch.bfloat16, device=device)
            for _ in range(2)
        )
        KernelCutter(preprocessor).cut_staged(batch, found)
        PlainCutter(preprocessor).cut_staged(batch, expected)
        assert torch.equal(found, expected)
        given = items[1]
        assert isinstance(given, PatchItem)
        assert torch.equal(found[8:12].cpu(), given.pixel_values)
        assert not found[sum(grid.num_patches for grid in grids) :].any()
