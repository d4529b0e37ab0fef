"""The mergers' erf-GELU, in place and in float32. The products' epilogues compute the blocks' tanh-GELU.

Shape legend: N rows, M their width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from encoder_service.towers.kernels.tiles import check_rows

BLOCK = 1024
NUM_WARPS = 4


def gelu_(x_NM: torch.Tensor) -> torch.Tensor:
    """GELU of x [N, M] in place, without approximation. Returns x. The row stride may exceed M."""
    check_rows("x", x_NM, (x_NM.shape[0], x_NM.shape[1]))
    if x_NM.numel() == 0:
        return x_NM
    # Contiguous rows are treated as one long row, so that no block is cut short at the end of a row.
    width = x_NM.numel() if x_NM.is_contiguous() else x_NM.shape[1]
    blocks_per_row = triton.cdiv(width, BLOCK)
    _gelu_kernel[(x_NM.numel() // width * blocks_per_row,)](
        x_NM,
        x_NM.stride(0),
        width,
        blocks_per_row,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return x_NM


@triton.jit(do_not_specialize=["blocks_per_row"])
def _gelu_kernel(x_ptr, x_stride, width, blocks_per_row, BLOCK: tl.constexpr):
    row = tl.program_id(0) // blocks_per_row
    block = tl.program_id(0) % blocks_per_row
    column = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ptr = x_ptr + row.to(tl.int64) * x_stride + column
    x = tl.load(ptr, mask=column < width, other=0.0).to(tl.float32)
    y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(ptr, y.to(x_ptr.dtype.element_ty), mask=column < width)
