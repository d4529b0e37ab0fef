"""The expansion of items equals the plain towers' host tables bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from encoder_service.scheduler.buckets import Bucket
from encoder_service.towers.fused_inputs import FusedInputBuilder, FusedInputs
from encoder_service.towers.kernels import expand_items
from encoder_service.towers.kernels.expand import PATCHES_PER_PROGRAM, PatchTables
from encoder_service.towers.windows import batch_order, patches_of, window_lengths
from encoder_service.types import Grid
from tests.unit.towers.host_tables import host_coords, host_frame_index, host_merge

MAX_FRAMES = 5


def batches(merge_size: int) -> st.SearchStrategy[list[Grid]]:
    side = st.integers(1, 10 // merge_size).map(lambda n: merge_size * n)
    still = st.builds(Grid, st.just(1), side, side)
    clip = st.builds(Grid, st.integers(2, MAX_FRAMES), side, side)
    return st.lists(still | clip, min_size=1, max_size=6)


def expanded(inputs: FusedInputs, device: torch.device, *, merge_size: int, merges_time: bool) -> PatchTables:
    tables = expand_items(
        inputs.items.to(device),
        inputs.num_patches,
        merge_size=merge_size,
        merges_time=merges_time,
        num_merged=inputs.num_rows * merge_size**2,
        num_frames=inputs.num_frames,
    )
    copies: Any = (None if table is None else table.cpu() for table in tables)
    return PatchTables(*copies)


def assert_equal_tables(
    tables: PatchTables, inputs: FusedInputs, grids: list[Grid], *, merge_size: int, merges_time: bool
) -> None:
    """Entries of weight zero are read too, and 0 * NaN of another item is NaN."""
    coords = host_coords(grids, inputs.num_patches, merge_size, merges_time)
    assert tables.coords.dtype == coords.dtype
    assert torch.equal(tables.coords, coords)
    if not merges_time:
        assert tables[1:] == (None,) * 5
        return
    num_merged = inputs.num_rows * merge_size**2
    index, weight = host_merge(grids, num_merged, inputs.num_frames, merge_size)
    expected = (host_frame_index(grids, inputs.num_patches), index, weight)
    for found, table in zip(tables[1:4], expected, strict=True):
        assert found is not None
        assert found.dtype == table.dtype
        assert torch.equal(found, table)


@pytest.mark.extended
@pytest.mark.parametrize(("merge_size", "merges_time"), [(2, False), (2, True), (1, False), (4, True)])
@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(data=st.data())
def test_p29_tables_of_random_mixes_are_the_hosts(
    merge_size: int, merges_time: bool, device: torch.device, data: st.DataObject
) -> None:
    grids = data.draw(batches(merge_size), label="grids")
    builder = FusedInputBuilder(lambda grid: None, merge_size=merge_size, merges_time=merges_time)
    inputs = builder.prepare(grids)
    sizes: dict[str, Any] = {"merge_size": merge_size, "merges_time": merges_time}
    assert_equal_tables(expanded(inputs, device, **sizes), inputs, grids, **sizes)
    # The same in a bucket: full, or with room for patches, sequences and frames.
    extra = data.draw(st.sampled_from([0, 1, 40]), label="extra") * merge_size**2
    slots = data.draw(st.sampled_from([0, 1, 23]), label="slots")
    total = inputs.num_patches + extra
    padded = builder.pad(inputs, Bucket(total, len(inputs.seqlens) + slots, total, MAX_FRAMES))
    assert_equal_tables(expanded(padded, device, **sizes), padded, grids, **sizes)


@pytest.mark.parametrize("merges_time", [False, True])
@pytest.mark.parametrize(
    "grids",
    [
        [Grid(1, 2, 2)],
        [Grid(1, 2, 2)] * 33,
        [Grid(1, 2, 2 * PATCHES_PER_PROGRAM)],
        [Grid(3, 22, 18), Grid(1, 2, 2), Grid(1, 22, 18), Grid(5, 2, 2)],
        [Grid(1, 8, 8)] * 8,
    ],
    ids=["smallest", "many-items", "one-row-of-merges", "clips-and-stills", "whole-programs"],
)
def test_tables_beyond_one_program(grids: list[Grid], merges_time: bool, device: torch.device) -> None:
    builder = FusedInputBuilder(lambda grid: None, merge_size=2, merges_time=merges_time)
    inputs = builder.prepare(grids)
    padded = builder.pad(inputs, Bucket(inputs.num_patches + 300, 64, inputs.num_patches, MAX_FRAMES))
    for given_inputs in (inputs, padded):
        tables = expanded(given_inputs, device, merge_size=2, merges_time=merges_time)
        assert_equal_tables(tables, given_inputs, grids, merge_size=2, merges_time=merges_time)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_window_order_is_the_hosts(window: int, device: torch.device) -> None:
    """Frames of whole windows, of cut ones and narrower than one, alone and in a bucket, whose padding keeps
    its places."""
    grids = [
        Grid(1, 2, 2),
        Grid(3, 22, 18),
        Grid(1, 16, 8),
        Grid(1, 2, 2 * PATCHES_PER_PROGRAM),
        Grid(2, 12, 2),
    ]
    builder = FusedInputBuilder(lambda grid: None, merge_size=2, merges_time=False, window=window)
    inputs = builder.prepare(grids)
    padded = builder.pad(inputs, Bucket(inputs.num_patches + 300, 64, inputs.num_patches, 1))
    for given_inputs in (inputs, padded):
        tables = expand_items(
            given_inputs.items.to(device),
            given_inputs.num_patches,
            merge_size=2,
            merges_time=False,
            window=window,
        )
        assert tables.patch_order is not None
        assert tables.row_order is not None
        order = torch.cat(
            [batch_order(grids, 2, window), torch.arange(inputs.num_rows, given_inputs.num_rows)]
        )
        patches = patches_of(order, 2)
        assert torch.equal(tables.patch_order.cpu(), patches.int())
        assert torch.equal(tables.row_order.cpu(), order.argsort().int())
        coords = host_coords(grids, given_inputs.num_patches, 2, merges_time=False)
        assert torch.equal(tables.coords.cpu(), coords[patches])
        lengths = given_inputs.windows.cu_seqlens.diff()
        assert lengths[lengths > 0].tolist() == window_lengths(grids, 2, window).tolist()
