"""Rows to fp8 with a scale of their own.

Owns the pass that has nothing to be fused with, such as the attention's output; norms and GELU write fp8
themselves.

Shape legend: P rows, E their width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

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


def quantize_rows(x_PE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [P, E] to fp8: values e4m3 [P, E] and their row scales float32 [P, 1]; x stays as it is.

    The scale is the row's largest magnitude / 448, at least 1e-12; row = values * scale. Rows of x may lie
    apart. Weights [out, in] take the same form once, at load.
    """
    num_rows, width = x_PE.shape
    check_rows("x", x_PE, (num_rows, width))
    values_PE = torch.empty((num_rows, width), dtype=FP8_DTYPE, device=x_PE.device)
    scale_P1 = torch.empty((num_rows, 1), dtype=torch.float32, device=x_PE.device)
    if num_rows == 0:
        return values_PE, scale_P1
    main, tail = split_width(width)
    _quantize_kernel[(num_rows,)](
        x_PE,
        values_PE,
        scale_P1,
        x_PE.stride(0),
        WIDTH=width,
        MAIN=main,
        TAIL=tail,
        num_warps=row_warps(width),
    )
    return values_PE, scale_P1


@triton.jit
def _quantize_kernel(
    x_ptr, values_ptr, scale_ptr, x_stride, WIDTH: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    main_part, tail_part = load_row(x_ptr + row * x_stride, WIDTH, MAIN, TAIL)
    main_part, tail_part, scale = scale_row(main_part, tail_part)
    store_row(values_ptr + row * WIDTH, main_part, tail_part, WIDTH, MAIN, TAIL)
    tl.store(scale_ptr + row, scale)
