"""The device code of our own attention: the list of tiles, and one tile's attention.

Owns the arithmetic; triton_varlen.py says why it is shaped so and launches it. Only what Triton 3.6 and its
interpreter both have. Kernels are untyped: triton's values have no types that a checker knows.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def list_tiles_kernel(
    cu_seqlens, tiles, num_sequences, max_tiles, QUERIES: tl.constexpr, SLOTS: tl.constexpr
):
    """Program i < S writes sequence i's entries (first row, end row, index of its first entry) behind those
    of every longer sequence, and of equal ones before it; program S marks the rest as empty."""
    sequence = tl.program_id(0)
    slots = tl.arange(0, SLOTS)
    used = slots < num_sequences
    lengths = tl.load(cu_seqlens + slots + 1, mask=used, other=0) - tl.load(
        cu_seqlens + slots, mask=used, other=0
    )
    counts = (lengths + QUERIES - 1) // QUERIES
    if sequence == num_sequences:
        for entry in range(tl.sum(counts), max_tiles):
            tl.store(tiles + entry * 3, 0)
            tl.store(tiles + entry * 3 + 1, 0)
            tl.store(tiles + entry * 3 + 2, 0)
    else:
        begin = tl.load(cu_seqlens + sequence)
        end = tl.load(cu_seqlens + sequence + 1)
        before = (lengths > end - begin) | ((lengths == end - begin) & (slots < sequence))
        first = tl.sum(tl.where(before, counts, 0))
        for entry in range(first, first + (end - begin + QUERIES - 1) // QUERIES):
            tl.store(tiles + entry * 3, begin)
            tl.store(tiles + entry * 3 + 1, end)
            tl.store(tiles + entry * 3 + 2, first)


@triton.jit
def _columns(
    pointer,
    rows,
    row_mask,
    MASKED: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
):
    """Columns FIRST to FIRST + WIDTH of rows; zero beyond DIM and, if MASKED, where row_mask is false."""
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = pointer + rows[:, None] * ROW_STRIDE + columns[None, :]
    if MASKED:
        if FIRST + WIDTH > DIM:
            return tl.load(pointers, mask=row_mask[:, None] & (columns[None, :] < DIM), other=0.0)
        return tl.load(pointers, mask=row_mask[:, None], other=0.0)
    if FIRST + WIDTH > DIM:
        return tl.load(pointers, mask=columns[None, :] < DIM, other=0.0)
    return tl.load(pointers)


@triton.jit
def _absorb(
    q_main,
    q_rest,
    k,
    v,
    start,
    length,
    acc_main,
    acc_rest,
    highest,
    total,
    scale_log2,
    MASKED: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile of keys and values into the running softmax (Milakov and Gimelshein, arXiv 1805.02867)."""
    keys = start + tl.arange(0, KEYS)
    valid = keys < length
    tile = tl.trans(_columns(k, keys, valid, MASKED, ROW_STRIDE, 0, MAIN, DIM))
    scores = tl.dot(q_main, tile, input_precision="ieee")
    if REST > 0:
        tile = tl.trans(_columns(k, keys, valid, MASKED, ROW_STRIDE, MAIN, REST, DIM))
        scores = tl.dot(q_rest, tile, scores, input_precision="ieee")
    if MASKED:
        scores = tl.where(valid[None, :], scores, float("-inf"))
    raised = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - raised[:, None])
    decay = tl.exp2(highest - raised)
    total = total * decay + tl.sum(weights, 1)
    weights = weights.to(v.dtype.element_ty)
    tile = _columns(v, keys, valid, MASKED, ROW_STRIDE, 0, MAIN, DIM)
    acc_main = tl.dot(weights, tile, acc_main * decay[:, None], input_precision="ieee")
    if REST > 0:
        tile = _columns(v, keys, valid, MASKED, ROW_STRIDE, MAIN, REST, DIM)
        acc_rest = tl.dot(weights, tile, acc_rest * decay[:, None], input_precision="ieee")
    return acc_main, acc_rest, raised, total


@triton.jit
def _store(
    out,
    values,
    rows,
    row_mask,
    ROW_STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
):
    """Values as columns FIRST to FIRST + WIDTH of rows, those below DIM."""
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = out + rows[:, None] * ROW_STRIDE + columns[None, :]
    mask = row_mask[:, None] & (columns[None, :] < DIM)
    tl.store(pointers, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def attend_kernel(
    q,
    k,
    v,
    out,
    tiles,
    scale_log2,
    num_heads,
    ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    OUT_ROW_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile of queries of one head against all keys of its sequence. Strides are constants: a head stride
    of 72 as a variable would hide from the compiler that rows begin at multiples of 16 bytes."""
    program = tl.program_id(0)
    entry = tiles + (program // num_heads) * 3
    begin = tl.load(entry)
    length = tl.load(entry + 1) - begin
    if length == 0:
        return
    # All programs of a sequence are neighbours: head by head, and tile by tile within a head.
    num_tiles = (length + QUERIES - 1) // QUERIES
    local = program - tl.load(entry + 2) * num_heads
    head = local // num_tiles
    # The sequence's place takes 64 bits, rows within it take 32.
    place = begin.to(tl.int64) * ROW_STRIDE + head * HEAD_STRIDE
    q += place
    k += place
    v += place
    rows = (local % num_tiles) * QUERIES + tl.arange(0, QUERIES)
    in_sequence = rows < length

    q_main = _columns(q, rows, in_sequence, True, ROW_STRIDE, 0, MAIN, DIM)
    acc_main = tl.zeros([QUERIES, MAIN], tl.float32)
    if REST > 0:
        q_rest = _columns(q, rows, in_sequence, True, ROW_STRIDE, MAIN, REST, DIM)
        acc_rest = tl.zeros([QUERIES, REST], tl.float32)
    else:
        q_rest = 0
        acc_rest = 0
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    full = length // KEYS * KEYS
    for start in range(0, full, KEYS):
        acc_main, acc_rest, highest, total = _absorb(
            q_main, q_rest, k, v, start, length, acc_main, acc_rest, highest, total, scale_log2,
            False, ROW_STRIDE, DIM, MAIN, REST, KEYS,
        )  # fmt: skip
    if full < length:
        acc_main, acc_rest, highest, total = _absorb(
            q_main, q_rest, k, v, full, length, acc_main, acc_rest, highest, total, scale_log2,
            True, ROW_STRIDE, DIM, MAIN, REST, KEYS,
        )  # fmt: skip

    out += begin.to(tl.int64) * OUT_ROW_STRIDE + head * OUT_HEAD_STRIDE
    _store(out, acc_main / total[:, None], rows, in_sequence, OUT_ROW_STRIDE, 0, MAIN, DIM)
    if REST > 0:
        _store(out, acc_rest / total[:, None], rows, in_sequence, OUT_ROW_STRIDE, MAIN, REST, DIM)
