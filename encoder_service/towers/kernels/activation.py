"""GELU in place, or to fp8.

Owns both forms, tanh and erf, in float32. Products that apply GELU in their own epilogue need none of this.

Shape legend: N rows, M their width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from encoder_service.towers.kernels.tiles import (
    FP8_DTYPE,
    check_rows,
    load_row,
    row_warps,
    scale_row,
    split_width,
    store_row,
)

BLOCK = 1024
NUM_WARPS = 4

Approximation = Literal["none", "tanh"]


def gelu_(x_NM: torch.Tensor, approximate: Approximation) -> torch.Tensor:
    """GELU of x [N, M] in place; returns x. Rows may lie apart.

    approximate: as torch.nn.functional.gelu has it, "none" by erf, "tanh" by tanh.
    """
    check_rows("x", x_NM, (x_NM.shape[0], x_NM.shape[1]))
    if x_NM.numel() == 0:
        return x_NM
    # One long row where rows are not apart: no block is cut short by the end of a row.
    width = x_NM.numel() if x_NM.is_contiguous() else x_NM.shape[1]
    blocks_per_row = triton.cdiv(width, BLOCK)
    _gelu_kernel[(x_NM.numel() // width * blocks_per_row,)](
        x_NM,
        x_NM.stride(0),
        width,
        blocks_per_row,
        TANH=approximate == "tanh",
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return x_NM


def gelu_quantize(x_NM: torch.Tensor, approximate: Approximation) -> tuple[torch.Tensor, torch.Tensor]:
    """GELU of x [N, M] to fp8: values e4m3 [N, M] and their row scales float32 [N, 1]; x stays as it is.

    The scale is the row's largest magnitude / 448, at least 1e-12; GELU(row) = values * scale. Rows of x may
    lie apart.
    """
    num_rows, width = x_NM.shape
    check_rows("x", x_NM, (num_rows, width))
    values_NM = torch.empty((num_rows, width), dtype=FP8_DTYPE, device=x_NM.device)
    scale_N1 = torch.empty((num_rows, 1), dtype=torch.float32, device=x_NM.device)
    if num_rows == 0:
        return values_NM, scale_N1
    main, tail = split_width(width)
    _gelu_quantize_kernel[(num_rows,)](
        x_NM,
        values_NM,
        scale_N1,
        x_NM.stride(0),
        TANH=approximate == "tanh",
        WIDTH=width,
        MAIN=main,
        TAIL=tail,
        num_warps=row_warps(width),
    )
    return values_NM, scale_N1


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    if TANH:
        # (1 + tanh(u)) / 2 is the logistic function of 2u: no cancellation for negative x. e^80 makes
        # the result as good as zero; further on float32 would overflow.
        twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(tl.minimum(-twice, 80.0)))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@triton.jit(do_not_specialize=["blocks_per_row"])
def _gelu_kernel(x_ptr, x_stride, width, blocks_per_row, TANH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) // blocks_per_row
    block = tl.program_id(0) % blocks_per_row
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ptr = x_ptr + row.to(tl.int64) * x_stride + place
    x = tl.load(ptr, mask=place < width, other=0.0).to(tl.float32)
    tl.store(ptr, _gelu(x, TANH).to(x_ptr.dtype.element_ty), mask=place < width)


@triton.jit
def _gelu_quantize_kernel(
    x_ptr,
    values_ptr,
    scale_ptr,
    x_stride,
    TANH: tl.constexpr,
    WIDTH: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    main_part, tail_part = load_row(x_ptr + row * x_stride, WIDTH, MAIN, TAIL)
    main_part, tail_part, scale = scale_row(_gelu(main_part, TANH), _gelu(tail_part, TANH))
    store_row(values_ptr + row * WIDTH, main_part, tail_part, WIDTH, MAIN, TAIL)
    tl.store(scale_ptr + row, scale)
