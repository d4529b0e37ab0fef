"""Positions of every patch, expanded from the batch's item table.

Owns coordinates, rows of the frame table, the merge of frames and the order of windows. They equal the host
tables of the plain towers (positions.py, moonvit.merge_tables, windows.py) element for element, and are
computed at the start of the forward pass, inside its graph. ``fused_inputs.py`` has the item table.

Shape legend: I items, P patches, R rows, G merged positions (R * merge^2), F frames averaged into one row.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from encoder_service.towers.kernels.tiles import check_rows

PATCHES_PER_PROGRAM = 128
NUM_WARPS = 4

# The columns of the item table, fused_inputs.ITEM_COLUMNS.
NUM_COLUMNS = 5
FIRST_PATCH = tl.constexpr(0)
FIRST_MERGED = tl.constexpr(1)
FRAMES = tl.constexpr(2)
HEIGHT = tl.constexpr(3)
WIDTH = tl.constexpr(4)


class PatchTables(NamedTuple):
    """Where every patch belongs.

    coords: int32 [P, 4]: row, column, height and width of each patch's frame; (0, 0, 1, 1) for padding.

    None unless rows average over frames: frame_index: int32 [P], 0 for images and padding, f + 1 in frame f
    of a clip. merge_index: int32 [G, F], the patches averaged at each merged position. merge_weight: float32
    [G, F]. Entries after an item's own frames repeat its first frame, and padding uses patch 0, both with
    weight zero: a patch of another item could be NaN, and 0 * NaN is NaN.

    None without windows, in whose order coords are: patch_order: int32 [P], the patch in merge order at each
    place. row_order: int32 [R], the place of each row among the windows' rows. Padding keeps its places.
    """

    coords: torch.Tensor
    frame_index: torch.Tensor | None = None
    merge_index: torch.Tensor | None = None
    merge_weight: torch.Tensor | None = None
    patch_order: torch.Tensor | None = None
    row_order: torch.Tensor | None = None


def expand_items(
    items_I5: torch.Tensor,
    num_patches: int,
    *,
    merge_size: int,
    merges_time: bool,
    num_merged: int = 0,
    num_frames: int = 1,
    window: int = 0,
) -> PatchTables:
    """New PatchTables of a batch of ``num_patches`` (including padding), in one launch.

    items: int32 [I, 5], fused_inputs.FusedInputs.items, at least one. num_merged: G, at most num_patches.
    num_frames: F. Both are used only if rows average over frames. Patches are in merge order, or frame by
    frame in raster order if ``merges_time``. window: merged positions of a window's side; 0 for no windows.
    """
    num_items = items_I5.shape[0]
    check_rows("items", items_I5, (num_items, NUM_COLUMNS))
    assert items_I5.dtype == torch.int32
    assert items_I5.is_contiguous()
    assert num_items > 0
    assert num_merged <= num_patches, f"{num_merged} merged positions of {num_patches} patches"
    assert not (window and merges_time)
    device = items_I5.device
    coords = torch.empty((num_patches, 4), dtype=torch.int32, device=device)
    frame_index = merge_index = merge_weight = None
    if merges_time:
        frame_index = torch.empty(num_patches, dtype=torch.int32, device=device)
        merge_index = torch.empty((num_merged, num_frames), dtype=torch.int32, device=device)
        merge_weight = torch.empty((num_merged, num_frames), dtype=torch.float32, device=device)
    patch_order = row_order = None
    if window:
        patch_order = torch.empty(num_patches, dtype=torch.int32, device=device)
        row_order = torch.empty(num_patches // merge_size**2, dtype=torch.int32, device=device)
    if num_patches:
        _expand_kernel[(triton.cdiv(num_patches, PATCHES_PER_PROGRAM),)](
            items_I5,
            coords,
            frame_index,
            merge_index,
            merge_weight,
            patch_order,
            row_order,
            num_items,
            search_steps(num_items),
            num_patches,
            num_merged,
            num_frames,
            MERGE=merge_size,
            MERGES_TIME=merges_time,
            WINDOW=window,
            COLUMNS=NUM_COLUMNS,
            BLOCK=PATCHES_PER_PROGRAM,
            num_warps=NUM_WARPS,
        )
    return PatchTables(coords, frame_index, merge_index, merge_weight, patch_order, row_order)


def search_steps(num_items: int) -> int:
    """Number of halvings after which ``find_item`` has one of ``num_items`` left."""
    return (num_items - 1).bit_length()


@triton.jit
def find_item(items_ptr, position, num_items, num_steps, COLUMN: tl.constexpr, COLUMNS: tl.constexpr):
    """The last item whose ``COLUMN`` is at most ``position``, a scalar or a block. The column must start at 0
    and not decrease from item to item."""
    low = position * 0
    high = low + num_items
    for _ in range(num_steps):
        # Once one item is left, low equals middle and no longer changes.
        middle = (low + high) // 2
        at_most = tl.load(items_ptr + middle * COLUMNS + COLUMN) <= position
        low = tl.where(at_most, middle, low)
        high = tl.where(at_most, high, middle)
    return low


@triton.jit
def merge_order_position(position, width, MERGE: tl.constexpr):
    """Row and column of a position in merge order: blocks of MERGE squared patches row by row, and patches
    within a block likewise. The width of padding may be below MERGE."""
    block = position // (MERGE * MERGE)
    inside = position % (MERGE * MERGE)
    blocks_wide = tl.maximum(width // MERGE, 1)
    row = block // blocks_wide * MERGE + inside // MERGE
    column = block % blocks_wide * MERGE + inside % MERGE
    return row, column


@triton.jit
def window_order_unit(unit, height, width, WINDOW: tl.constexpr):
    """Row and column of a merged position in window order, of a frame of ``height`` by ``width`` merged
    positions: bands of WINDOW rows, in a band its windows, in a window its rows. Zero sides are padding."""
    height = tl.maximum(height, 1)
    width = tl.maximum(width, 1)
    band = unit // (WINDOW * width)
    rows = tl.maximum(tl.minimum(height - band * WINDOW, WINDOW), 1)
    in_band = unit - band * WINDOW * width
    window = in_band // (rows * WINDOW)
    columns = tl.maximum(tl.minimum(width - window * WINDOW, WINDOW), 1)
    in_window = in_band - window * rows * WINDOW
    return band * WINDOW + in_window // columns, window * WINDOW + in_window % columns


# Not specialised, so that a new batch size does not compile a kernel while the service runs.
@triton.jit(do_not_specialize=["num_items", "num_steps", "num_patches", "num_merged", "num_frames"])
def _expand_kernel(
    items_ptr,
    coords_ptr,
    frame_index_ptr,
    merge_index_ptr,
    merge_weight_ptr,
    patch_order_ptr,
    row_order_ptr,
    num_items,
    num_steps,
    num_patches,
    num_merged,
    num_frames,
    MERGE: tl.constexpr,
    MERGES_TIME: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < num_patches
    item_ptr = items_ptr + find_item(items_ptr, index, num_items, num_steps, FIRST_PATCH, COLUMNS) * COLUMNS
    frames = tl.load(item_ptr + FRAMES)
    height = tl.load(item_ptr + HEIGHT)
    width = tl.load(item_ptr + WIDTH)
    patch = index - tl.load(item_ptr + FIRST_PATCH)
    frame = patch // (height * width)
    position = patch % (height * width)
    real = frame < frames
    if MERGES_TIME:
        row = position // width
        column = position % width
    elif WINDOW:
        unit = position // (MERGE * MERGE)
        inside = position % (MERGE * MERGE)
        unit_row, unit_column = window_order_unit(unit, height // MERGE, width // MERGE, WINDOW)
        row = unit_row * MERGE + inside // MERGE
        column = unit_column * MERGE + inside % MERGE
        # Both orders have a frame's units in the same places.
        moved = (unit_row * (width // MERGE) + unit_column - unit) * (MERGE * MERGE)
        source = index + tl.where(real, moved, 0)
        tl.store(patch_order_ptr + index, source, mask=exists)
        row_ptr = row_order_ptr + source // (MERGE * MERGE)
        tl.store(row_ptr, index // (MERGE * MERGE), mask=exists & (index % (MERGE * MERGE) == 0))
    else:
        row, column = merge_order_position(position, width, MERGE)
    coord_ptr = coords_ptr + index.to(tl.int64) * 4
    tl.store(coord_ptr, tl.where(real, row, 0), mask=exists)
    tl.store(coord_ptr + 1, tl.where(real, column, 0), mask=exists)
    tl.store(coord_ptr + 2, tl.where(real, height, 1), mask=exists)
    tl.store(coord_ptr + 3, tl.where(real, width, 1), mask=exists)

    if MERGES_TIME:
        tl.store(frame_index_ptr + index, tl.where(real & (frames > 1), frame + 1, 0), mask=exists)

        # From here on, the index numbers merged positions.
        exists = index < num_merged
        item = find_item(items_ptr, index, num_items, num_steps, FIRST_MERGED, COLUMNS)
        item_ptr = items_ptr + item * COLUMNS
        frames = tl.load(item_ptr + FRAMES)
        width = tl.load(item_ptr + WIDTH)
        frame_size = tl.load(item_ptr + HEIGHT) * width
        position = index - tl.load(item_ptr + FIRST_MERGED)
        real = (position < frame_size) & (frames > 0)
        row, column = merge_order_position(position, width, MERGE)
        first = tl.where(real, tl.load(item_ptr + FIRST_PATCH) + row * width + column, 0)
        weight = tl.where(real, tl.div_rn(1.0, tl.maximum(frames, 1).to(tl.float32)), 0.0)
        entry = index.to(tl.int64) * num_frames
        for step in range(num_frames):
            used = step < frames
            patch = first + tl.where(used & real, step * frame_size, 0)
            tl.store(merge_index_ptr + entry + step, patch, mask=exists)
            tl.store(merge_weight_ptr + entry + step, tl.where(used, weight, 0.0), mask=exists)
