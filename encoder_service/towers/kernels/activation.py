"""The mergers' erf-GELU and the gated MLPs' SwiGLU, in float32. The products' epilogues compute tanh-GELU.

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


def swiglu(packed_N2M: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """silu(gate) * up: new [N, M] of rows [N, 2 * M] with the gates before the ups. limit: see
    ``layers.swiglu``. The row stride may exceed 2 * M."""
    num_rows, packed_width = packed_N2M.shape
    check_rows("packed", packed_N2M, (num_rows, packed_width))
    assert packed_width % 2 == 0, f"packed is {packed_width} wide, needs gates and as many ups"
    width = packed_width // 2
    out_NM = packed_N2M.new_empty(num_rows, width)
    if out_NM.numel() == 0:
        return out_NM
    blocks_per_row = triton.cdiv(width, BLOCK)
    _swiglu_kernel[(num_rows * blocks_per_row,)](
        packed_N2M,
        out_NM,
        packed_N2M.stride(0),
        width,
        blocks_per_row,
        limit,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return out_NM


@triton.jit(do_not_specialize=["blocks_per_row"])
def _swiglu_kernel(packed_ptr, out_ptr, packed_stride, width, blocks_per_row, limit, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    column = (tl.program_id(0) % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    gate_ptr = packed_ptr + row * packed_stride + column
    gate = tl.load(gate_ptr, mask=column < width, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=column < width, other=0.0).to(tl.float32)
    if limit is not None:
        # By default NaN becomes the limit on a GPU, and rows of NaN would look like real ones.
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    decay = tl.exp(-tl.abs(gate))  # never overflows
    y = tl.where(gate >= 0.0, gate, gate * decay) / (1.0 + decay) * up
    tl.store(out_ptr + row * width + column, y.to(out_ptr.dtype.element_ty), mask=column < width)
