"""The fused tower behind the graph runner: rows of padded, static inputs equal the plain tower's."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from encoder_service.engine.graphs import GraphRunner
from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.towers import load_tower
from encoder_service.towers.attention import SdpaAttention
from encoder_service.towers.fused import FusedTower
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.types import Grid

LADDER = BucketLadder([Bucket(12, 2, 8, 2), Bucket(16, 4, 16, 2)])
BATCHES = ([Grid(1, 2, 4)], [Grid(2, 2, 2), Grid(1, 2, 2)], [Grid(1, 4, 6)])


@pytest.mark.parametrize("family", ["qwen3_vl", "kimi_k25"])
def test_p29_rows_in_buckets_equal_the_plain_tower(family: str, tmp_path: Path, device: torch.device) -> None:
    make_checkpoint(tmp_path / family, family, "tiny", 3)
    plain = load_tower(tmp_path / family, device=device, dtype=torch.float32).tower
    tower = FusedTower(plain, SdpaAttention())  # type: ignore[arg-type]
    runner = GraphRunner(tower, LADDER, device, capture=False, clock=itertools.count().__next__)
    for grids in BATCHES:
        pixels = torch.randn(sum(grid.num_patches for grid in grids), tower.patch_dim).to(device)
        rows = runner.run(tower.prepare(grids), [pixels])
        with torch.inference_mode():
            expected = plain(plain.prepare(grids).to(device).with_pixels(pixels))
        assert rows.shape == (expected.shape[0], tower.width)
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
    assert runner.counters.eager_runs == 1
    assert runner.counters.padded_runs.total() == len(BATCHES) - 1
    assert runner.counters.replays.total() == 0
