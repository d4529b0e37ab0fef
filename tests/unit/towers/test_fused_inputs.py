"""The item table of a batch: its items and sequences, and its padding to a bucket."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.errors import GridMismatch
from encoder_service.scheduler.buckets import Bucket
from encoder_service.towers.fused_inputs import FusedInputBuilder, FusedInputs
from encoder_service.towers.positions import check_sides
from encoder_service.types import Grid

MERGE = 2

grids_of_a_batch = st.lists(
    st.builds(
        Grid,
        st.integers(1, 4),
        st.integers(1, 5).map(lambda n: MERGE * n),
        st.integers(1, 5).map(lambda n: MERGE * n),
    ),
    min_size=1,
    max_size=9,
)


def builder(*, merges_time: bool = False) -> FusedInputBuilder:
    return FusedInputBuilder(lambda grid: check_sides(grid, MERGE), merge_size=MERGE, merges_time=merges_time)


def lengths_of(grids: list[Grid], *, merges_time: bool) -> list[int]:
    if merges_time:
        return [grid.num_patches for grid in grids]
    return [grid.h * grid.w for grid in grids for _ in range(grid.t)]


def check_real_part(inputs: FusedInputs, grids: list[Grid], *, merges_time: bool) -> None:
    """Items and sequences of ``grids`` lead the table."""
    lengths = lengths_of(grids, merges_time=merges_time)
    frames = [grid.h * grid.w for grid in grids]
    sizes = [grid.num_patches for grid in grids]
    merged = frames if merges_time else sizes
    first_patch, first_merged = list(accumulate(sizes, initial=0)), list(accumulate(merged, initial=0))
    expected = [[*firsts, *grid] for *firsts, grid in zip(first_patch, first_merged, grids, strict=False)]
    assert inputs.items[: len(grids)].tolist() == expected
    assert inputs.cu_seqlens[: len(lengths) + 1].tolist() == list(accumulate(lengths, initial=0))
    assert inputs.seqlens == tuple(lengths)
    for view in (inputs.items, inputs.cu_seqlens):
        assert view.dtype == torch.int32
        assert view.is_contiguous()
        assert view.storage_offset() * view.itemsize % 16 == 0


@pytest.mark.parametrize("merges_time", [False, True])
@settings(deadline=None)
@given(grids=grids_of_a_batch)
def test_the_table_lists_every_item_and_sequence(merges_time: bool, grids: list[Grid]) -> None:
    inputs = builder(merges_time=merges_time).prepare(grids)
    check_real_part(inputs, grids, merges_time=merges_time)
    assert len(inputs.items) == len(grids)
    assert len(inputs.cu_seqlens) == len(inputs.seqlens) + 1
    assert inputs.max_seqlen == max(inputs.seqlens)
    assert inputs.num_patches == sum(grid.num_patches for grid in grids)
    rows = [(1 if merges_time else grid.t) * grid.h * grid.w // MERGE**2 for grid in grids]
    assert inputs.num_rows == sum(rows)
    assert inputs.num_frames == (max(grid.t for grid in grids) if merges_time else 1)


@pytest.mark.parametrize("merges_time", [False, True])
@settings(deadline=None)
@given(grids=grids_of_a_batch, extra=st.integers(0, 9), slots=st.integers(0, 5))
def test_p29_padding_repeats_the_end_and_has_no_patches(
    merges_time: bool, grids: list[Grid], extra: int, slots: int
) -> None:
    build = builder(merges_time=merges_time)
    inputs = build.prepare(grids)
    total = inputs.num_patches + extra * MERGE**2
    bucket = Bucket(total, len(inputs.seqlens) + slots, total, 4)
    padded = build.pad(inputs, bucket)
    check_real_part(padded, grids, merges_time=merges_time)
    assert len(padded.items) == bucket.num_sequences
    end = [inputs.num_patches, inputs.num_rows * MERGE**2, 0, 1, 1]
    assert padded.items[len(grids) :].tolist() == [end] * (bucket.num_sequences - len(grids))
    bounds = padded.cu_seqlens.tolist()
    assert len(bounds) == bucket.num_sequences + 1
    assert bounds[len(inputs.seqlens) :] == [inputs.num_patches] * (slots + 1)
    assert (padded.num_patches, padded.num_rows) == (total, total // MERGE**2)
    assert (padded.max_seqlen, padded.num_frames) == (bucket.max_seqlen, bucket.num_frames)
    assert inputs.table.tolist() == build.prepare(grids).table.tolist()


def test_too_long_and_too_many_are_refused_with_both_numbers() -> None:
    build = builder()
    with pytest.raises(GridMismatch, match="0 items, needs at least 1"):
        build.prepare([])
    with pytest.raises(GridMismatch, match="side of 40000 patches, the longest is 32768"):
        build.prepare([Grid(1, 2, 40_000)])
    with pytest.raises(GridMismatch, match="2147483648 patches, at most 2147483647"):
        build.prepare([Grid(2, 32_768, 32_768)])
