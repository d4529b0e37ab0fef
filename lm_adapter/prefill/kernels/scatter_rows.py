"""Copies rows from any addresses to ``inputs_embeds`` and the deepstack levels in one launch.

Owns the copy and the launch configuration. ``splice`` builds the table of addresses that says what is copied
where, and checks the arguments. One program copies one block of columns of one level of one row.

Shape legend: T tokens, V visual tokens, D LM width, L deepstack levels.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_BLOCK = 2048
ELEMENTS_PER_WARP = 512

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def scatter_rows_(
    table_3n: torch.Tensor,
    inputs_embeds_TD: torch.Tensor,
    deepstack: torch.Tensor,
    *,
    rows_dtype: torch.dtype,
    aligned: bool,
) -> None:
    """Copies rows and converts them to the dtype of ``inputs_embeds_TD``.

    table_3n: int64 [3, n]: address of a row [D * (1 + L)] of ``rows_dtype`` (0: no row; its levels are
    zeroed), token, index in the levels. deepstack: [L, indices, D]. aligned: whether all addresses are
    multiples of 16."""
    num_entries = table_3n.shape[1]
    width = inputs_embeds_TD.shape[1]
    assert inputs_embeds_TD.stride(1) == 1
    assert deepstack.ndim == 3
    assert deepstack.shape[2] == width
    assert deepstack.dtype == inputs_embeds_TD.dtype
    num_levels = deepstack.shape[0]
    if num_levels:
        assert deepstack.stride(2) == 1
    if num_entries == 0:
        return
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    num_blocks = triton.cdiv(width, block)
    _scatter_kernel[(num_entries, num_blocks * (1 + num_levels))](
        table_3n,
        inputs_embeds_TD,
        deepstack if num_levels else inputs_embeds_TD,
        num_entries,
        inputs_embeds_TD.stride(0),
        deepstack.stride(0) if num_levels else 0,
        deepstack.stride(1) if num_levels else 0,
        ROWS_TYPE=_TYPES[rows_dtype],
        WIDTH=width,
        BLOCK=block,
        NUM_BLOCKS=num_blocks,
        ALIGNED=aligned and width * rows_dtype.itemsize % 16 == 0,
        num_warps=max(1, block // ELEMENTS_PER_WARP),
    )


# Not specialising on num_entries avoids compiling for each new number of entries.
@triton.jit(do_not_specialize=["num_entries"])
def _scatter_kernel(
    table_ptr,
    embeds_ptr,
    deepstack_ptr,
    num_entries,
    token_stride,
    level_stride,
    index_stride,
    ROWS_TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    entry = tl.program_id(0)
    level = tl.program_id(1) // NUM_BLOCKS
    column = tl.program_id(1) % NUM_BLOCKS * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(table_ptr + entry)
    row_ptr = address.to(tl.pointer_type(ROWS_TYPE))
    if ALIGNED:
        row_ptr = tl.multiple_of(row_ptr, 16)
    dtype = embeds_ptr.dtype.element_ty
    used = column < WIDTH
    if level == 0:
        if address != 0:
            token = tl.load(table_ptr + num_entries + entry)
            values = tl.load(row_ptr + column, mask=used)
            tl.store(embeds_ptr + token * token_stride + column, values.to(dtype), mask=used)
    else:
        index = tl.load(table_ptr + 2 * num_entries + entry)
        target_ptr = deepstack_ptr + (level - 1).to(tl.int64) * level_stride + index * index_stride + column
        if address != 0:
            values = tl.load(row_ptr + level * WIDTH + column, mask=used)
            tl.store(target_ptr, values.to(dtype), mask=used)
        else:
            tl.store(target_ptr, tl.zeros((BLOCK,), dtype=dtype), mask=used)
