"""GraphRunner on a CPU: padding, choice of buckets, counters; padded inputs run eager."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.engine.graphs import GraphRunner, filling_grids
from encoder_service.errors import ConfigurationError
from encoder_service.scheduler.buckets import Bucket, BucketLadder, default_ladder
from encoder_service.scheduler.cost import Launch
from encoder_service.types import Grid
from tests.unit.engine.bucketed_tower import PATCH_DIM, SmallTower

CPU = torch.device("cpu")
FRAMES = 3
LADDER = BucketLadder(
    [
        Bucket(16, 2, 16, FRAMES),
        Bucket(40, 6, 16, FRAMES),
        Bucket(40, 4, 40, FRAMES),
        Bucket(96, 9, 96, FRAMES),
    ]
)

grids_of_a_batch = st.lists(
    st.builds(
        Grid,
        st.integers(1, 4),
        st.integers(1, 4).map(lambda n: 2 * n),
        st.integers(1, 4).map(lambda n: 2 * n),
    ),
    min_size=1,
    max_size=8,
)


def runner_for(tower: SmallTower, ladder: BucketLadder = LADDER) -> GraphRunner:
    return GraphRunner(tower, ladder, CPU, capture=False, clock=itertools.count().__next__)


def alone(tower: SmallTower, grids: list[Grid], pixels: torch.Tensor) -> torch.Tensor:
    """Rows in the batch's own shapes."""
    return tower(tower.prepare(grids).with_pixels(pixels))


def pixels_of(grids: list[Grid], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(grid.num_patches for grid in grids), PATCH_DIM, generator=generator)


@pytest.mark.parametrize("merges_time", [False, True])
@settings(deadline=None, max_examples=30)
@given(batches=st.lists(grids_of_a_batch, min_size=1, max_size=5))
def test_p29_p30_rows_equal_the_unpadded_forward_in_any_order_of_buckets(
    merges_time: bool, batches: list[list[Grid]]
) -> None:
    tower = SmallTower(merges_time=merges_time)
    runner = runner_for(tower)
    padded = eager = 0
    for seed, grids in enumerate(batches):
        inputs = tower.prepare(grids)
        pixels = pixels_of(grids, seed)
        bucket = runner.can_use(inputs)
        rows = runner.run(inputs, [pixels])
        expected = alone(tower, grids, pixels)
        assert rows.shape == expected.shape
        assert torch.isfinite(rows).all()
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
        if bucket is None:
            eager += 1
        else:
            padded += bucket.num_patches - len(pixels)
    counters = runner.counters
    assert (counters.padded_patches, counters.eager_runs) == (padded, eager)
    assert counters.padded_runs.total() == len(batches) - eager
    assert counters.replays.total() == 0


def test_p29_padding_pixels_are_zero_after_any_earlier_batch() -> None:
    tower = SmallTower()
    runner = runner_for(tower)
    first, second = [Grid(1, 8, 4)], [Grid(1, 4, 6)]
    runner.run(tower.prepare(first), [torch.full((32, PATCH_DIM), float("nan"))])
    rows = runner.run(tower.prepare(second), [pixels_of(second)])
    pixel_values = tower.forwards[-1].pixel_values
    assert pixel_values is not None
    assert pixel_values.shape == (40, PATCH_DIM)
    assert torch.equal(pixel_values[24:], torch.zeros(16, PATCH_DIM))
    assert torch.isfinite(rows).all()


def test_every_batch_of_a_bucket_runs_in_the_same_memory_and_shapes() -> None:
    tower = SmallTower(merges_time=True)
    runner = runner_for(tower)
    tower.forwards.clear()
    for seed, grids in enumerate([[Grid(1, 6, 4)], [Grid(2, 2, 6), Grid(1, 2, 4)], [Grid(3, 2, 4)]]):
        runner.run(tower.prepare(grids), [pixels_of(grids, seed)])
    static = [
        {name: (value.data_ptr(), value.shape) for name, value in inputs.tensors().items()}
        for inputs in tower.forwards
    ]
    assert static[0] == static[1] == static[2]
    assert {(inputs.num_patches, inputs.num_frames) for inputs in tower.forwards} == {(40, FRAMES)}
    assert {inputs.max_seqlen for inputs in tower.forwards} == {40}


@pytest.mark.parametrize("grids", [[Grid(1, 4, 4)], [Grid(1, 10, 10)]], ids=["bucket", "eager"])
@pytest.mark.parametrize(("extra", "patch_dim"), [(-1, PATCH_DIM), (1, PATCH_DIM), (0, PATCH_DIM + 1)])
def test_wrong_pixels_are_refused_and_the_next_batch_is_right(
    grids: list[Grid], extra: int, patch_dim: int
) -> None:
    tower = SmallTower()
    runner = runner_for(tower)
    patches = grids[0].num_patches
    with pytest.raises(RuntimeError):
        runner.run(tower.prepare(grids), [torch.zeros(patches + extra, patch_dim)])
    assert runner.counters.padded_runs.total() == runner.counters.eager_runs == 0
    pixels = pixels_of(grids)
    rows = runner.run(tower.prepare(grids), [pixels])
    torch.testing.assert_close(rows, alone(tower, grids, pixels), rtol=1e-5, atol=1e-5)


def test_p27_capture_needs_a_gpu() -> None:
    with pytest.raises(ConfigurationError, match="cuda devices only, not on cpu"):
        GraphRunner(SmallTower(), LADDER, CPU, capture=True, clock=itertools.count().__next__)
    runner = runner_for(SmallTower())
    assert runner.ready
    runner.capture_all()
    assert runner.captured_bytes == 0


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 600), st.integers(1, 40), st.integers(1, 3000))
def test_the_filling_batch_fits_its_bucket(merge: int, merges: int, slots: int, bound: int) -> None:
    unit = merge * merge
    bucket = Bucket(merges * unit, slots, max(unit, min(bound, merges * unit)))
    grids = filling_grids(bucket, merge)
    patches = [grid.num_patches for grid in grids]
    assert BucketLadder([bucket]).choose(Launch.of(patches)) is bucket
    assert all(grid.h % merge == grid.w % merge == 0 for grid in grids)


def test_filling_batches_of_the_default_ladder_are_nearly_full() -> None:
    for bucket in default_ladder(32_768).buckets:
        filled = sum(grid.num_patches for grid in filling_grids(bucket, 2))
        assert filled >= 0.9 * bucket.num_patches, bucket


@pytest.mark.parametrize("bucket", [Bucket(18, 1, 18), Bucket(16, 4, 3)])
def test_buckets_without_whole_merges_are_refused(bucket: Bucket) -> None:
    message = f"{bucket.num_patches} patches with sequences of at most {bucket.max_seqlen}"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        runner_for(SmallTower(), BucketLadder([bucket]))
