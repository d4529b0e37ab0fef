"""LayerNorm or RMSNorm, alone or after the addition to the residual.

Owns one pass over [P, E], in which the residual is read once and written once. ``embedding`` adds the
position table, ``frames`` averages over frames.

Shape legend: P rows, E their width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from encoder_service.towers.kernels.tiles import (
    check_norm,
    check_rows,
    load_row,
    norm_row,
    row_warps,
    split_width,
    store_row,
)


def add_norm(
    x_PE: torch.Tensor,
    delta_PE: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Adds delta to x in place, then returns LayerNorm of x, or RMSNorm without a bias: new [P, E] in x's
    dtype.

    The sum is rounded to x's dtype before it is normalised, so that the norm reads the same values as the
    next block's residual. delta: None leaves x unchanged. Row strides of x and delta may exceed E. weight,
    bias: [E].
    """
    num_rows, width = x_PE.shape
    check_rows("x", x_PE, (num_rows, width))
    if delta_PE is not None:
        check_rows("delta", delta_PE, (num_rows, width))
    check_norm(weight, bias, width)
    h_PE = torch.empty(x_PE.shape, dtype=x_PE.dtype, device=x_PE.device)
    if num_rows == 0:
        return h_PE
    main, tail = split_width(width)
    _norm_kernel[(num_rows,)](
        x_PE,
        delta_PE,
        weight,
        bias,
        h_PE,
        x_PE.stride(0),
        delta_PE.stride(0) if delta_PE is not None else 0,
        eps,
        WIDTH=width,
        MAIN=main,
        TAIL=tail,
        num_warps=row_warps(width),
    )
    return h_PE


@triton.jit
def _norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    bias_ptr,
    h_ptr,
    x_stride,
    delta_stride,
    eps,
    WIDTH: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_row_ptr = x_ptr + row * x_stride
    main_part, tail_part = load_row(x_row_ptr, WIDTH, MAIN, TAIL)
    if delta_ptr is not None:
        main_delta, tail_delta = load_row(delta_ptr + row * delta_stride, WIDTH, MAIN, TAIL)
        dtype = x_ptr.dtype.element_ty
        main_part = (main_part + main_delta).to(dtype).to(tl.float32)
        tail_part = (tail_part + tail_delta).to(dtype).to(tl.float32)
        store_row(x_row_ptr, main_part, tail_part, WIDTH, MAIN, TAIL)
    main_part, tail_part = norm_row(main_part, tail_part, weight_ptr, bias_ptr, eps, WIDTH, MAIN, TAIL)
    store_row(h_ptr + row * WIDTH, main_part, tail_part, WIDTH, MAIN, TAIL)
