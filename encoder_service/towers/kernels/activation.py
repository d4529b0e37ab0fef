"""GELU in place.

Owns both forms, tanh and erf, computed in float32. The blocks do not use it: their products apply GELU in the
epilogue.

Shape legend: N rows, M their width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from encoder_service.towers.kernels.tiles import check_rows

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


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    if TANH:
        # (1 + tanh(u)) / 2 is the logistic function of 2u: no cancellation for negative x. At e^80 the result
        # is zero within float32's precision; above it float32 would overflow.
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
