"""Learned positions of patches: interpolated from coordinates, added and normalised in one pass.

Owns the table entries and weights of the taps. They are computed on the device with the same float32 steps as
positions.linear_taps, centred_linear_taps and cubic_taps, so that no per-patch table is built or transferred.

Shape legend: P patches, E tower width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from encoder_service.towers.kernels.tiles import (
    check_norm,
    check_rows,
    check_vector,
    load_row,
    norm_row,
    row_warps,
    split_width,
    store_row,
)


def embed_norm(
    x_PE: torch.Tensor,
    table: torch.Tensor,
    coords_P4: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    mode: Literal["linear", "centred_linear", "cubic"],
    table_height: int,
    table_width: int,
    frame_table: torch.Tensor | None = None,
    frame_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Adds positions to x in place, then returns the norm of x, see ``add_norm``: new [P, E] in x's
    dtype.

    x: the patch embedding with its bias; its row stride may exceed E. table: [table_height * table_width, E]
    in any float dtype. coords: int32 [P, 4]: row, column, height and width of each patch's frame; for padding
    (0, 0, 1, 1). mode: "linear" stretches the table over the frame with fixed ends, with four taps (Qwen);
    the others use half-pixel centres with borders repeated, "centred_linear" four taps (Kimi-K3) and "cubic"
    sixteen (Kimi-K2.5). frame_table
    [max_frames + 1, E] with frame_index int32 [P] adds each patch's temporal row. The positions are summed in
    float32 and rounded once, together with x, to x's dtype.
    """
    num_patches, width = x_PE.shape
    check_rows("x", x_PE, (num_patches, width))
    check_norm(weight, bias, width)
    assert tuple(table.shape) == (table_height * table_width, width), (
        f"table has shape {list(table.shape)}, needs {[table_height * table_width, width]}"
    )
    assert table.is_contiguous()
    assert tuple(coords_P4.shape) == (num_patches, 4), f"coords is {list(coords_P4.shape)}"
    assert coords_P4.stride(1) == 1
    assert (frame_table is None) == (frame_index is None)
    if frame_table is not None and frame_index is not None:
        assert frame_table.shape[1] == width
        assert frame_table.is_contiguous()
        check_vector("frame_index", frame_index, num_patches)
    h_PE = torch.empty(x_PE.shape, dtype=x_PE.dtype, device=x_PE.device)
    if num_patches == 0:
        return h_PE
    main, tail = split_width(width)
    _embed_norm_kernel[(num_patches,)](
        x_PE,
        table,
        coords_P4,
        frame_table,
        frame_index,
        weight,
        bias,
        h_PE,
        x_PE.stride(0),
        coords_P4.stride(0),
        eps,
        TABLE_HEIGHT=table_height,
        TABLE_WIDTH=table_width,
        CENTRED=mode != "linear",
        CUBIC=mode == "cubic",
        WIDTH=width,
        MAIN=main,
        TAIL=tail,
        num_warps=row_warps(width),
    )
    return h_PE


@triton.jit
def _source(position, size, TABLE_SIZE: tl.constexpr, CENTRED: tl.constexpr):
    """Coordinate, float32, of ``position`` of ``size`` on an axis of TABLE_SIZE entries. Divisions round to
    nearest, because a result just below a whole number would shift the taps by one entry."""
    position = position.to(tl.float32)
    if CENTRED:
        source = tl.div_rn((position + 0.5) * TABLE_SIZE, size.to(tl.float32)) - 0.5
    else:
        source = tl.div_rn(position * (TABLE_SIZE - 1), tl.maximum(size - 1, 1).to(tl.float32))
    return source


@triton.jit
def _tap(source, TAP: tl.constexpr, TABLE_SIZE: tl.constexpr, CUBIC: tl.constexpr):
    """Entry and weight of one tap of an axis: 2 from the entry below (linear), 4 from one before (cubic)."""
    floor = tl.floor(source)
    fraction = source - floor
    if CUBIC:
        distance = tl.abs(fraction - (TAP - 1))
        # Keys' kernel with a = -0.75.
        near = (1.25 * distance - 2.25) * (distance * distance) + 1.0
        far = ((distance - 5.0) * distance + 8.0) * distance * -0.75 + 3.0
        weight = tl.where(distance <= 1.0, near, far)
        entry = floor.to(tl.int32) + (TAP - 1)
    else:
        weight = fraction if TAP == 1 else 1.0 - fraction
        entry = floor.to(tl.int32) + TAP
    return tl.minimum(tl.maximum(entry, 0), TABLE_SIZE - 1), weight


@triton.jit
def _embed_norm_kernel(
    x_ptr,
    table_ptr,
    coords_ptr,
    frame_table_ptr,
    frame_index_ptr,
    weight_ptr,
    bias_ptr,
    h_ptr,
    x_stride,
    coords_stride,
    eps,
    TABLE_HEIGHT: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    CENTRED: tl.constexpr,
    CUBIC: tl.constexpr,
    WIDTH: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
):
    patch = tl.program_id(0).to(tl.int64)
    patch_coords_ptr = coords_ptr + patch * coords_stride
    height, width = tl.load(patch_coords_ptr + 2), tl.load(patch_coords_ptr + 3)
    row_source = _source(tl.load(patch_coords_ptr), height, TABLE_HEIGHT, CENTRED)
    column_source = _source(tl.load(patch_coords_ptr + 1), width, TABLE_WIDTH, CENTRED)

    main_sum = tl.zeros((MAIN,), dtype=tl.float32)
    tail_sum = tl.zeros((TAIL,), dtype=tl.float32)
    for row_tap in tl.static_range(4 if CUBIC else 2):
        row, row_weight = _tap(row_source, row_tap, TABLE_HEIGHT, CUBIC)
        for column_tap in tl.static_range(4 if CUBIC else 2):
            column, column_weight = _tap(column_source, column_tap, TABLE_WIDTH, CUBIC)
            entry_ptr = table_ptr + (row * TABLE_WIDTH + column) * WIDTH
            main_entry, tail_entry = load_row(entry_ptr, WIDTH, MAIN, TAIL)
            main_sum += main_entry * (row_weight * column_weight)
            tail_sum += tail_entry * (row_weight * column_weight)
    if frame_table_ptr is not None:
        frame = tl.load(frame_index_ptr + patch)
        main_frame, tail_frame = load_row(frame_table_ptr + frame * WIDTH, WIDTH, MAIN, TAIL)
        main_sum += main_frame
        tail_sum += tail_frame

    x_row_ptr = x_ptr + patch * x_stride
    main_part, tail_part = load_row(x_row_ptr, WIDTH, MAIN, TAIL)
    dtype = x_ptr.dtype.element_ty
    main_part = (main_part + main_sum).to(dtype).to(tl.float32)
    tail_part = (tail_part + tail_sum).to(dtype).to(tl.float32)
    store_row(x_row_ptr, main_part, tail_part, WIDTH, MAIN, TAIL)
    main_part, tail_part = norm_row(main_part, tail_part, weight_ptr, bias_ptr, eps, WIDTH, MAIN, TAIL)
    store_row(h_ptr + patch * WIDTH, main_part, tail_part, WIDTH, MAIN, TAIL)
