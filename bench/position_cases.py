"""What the bench of positions runs: M-RoPE over q and k, and the splice of a prefill step.

Owns shapes, inputs and the variants of each case. Timing is ``positions.py``'s. Every case has ``kernel``,
``torch`` (this project's torch version, the same arithmetic), ``engine`` (how engines do it with torch's own
operators) and ``copy``: a device copy of a contiguous buffer of as many bytes as the kernel has to read and
write, the floor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lm_adapter.placeholders import PromptItem, expand_placeholders
from lm_adapter.rotary import MRopeLayout, RotaryTable, apply_mrope
from lm_adapter.splice import RowsLayout, RowsPiece, Splicer
from lm_adapter.step import ALIGNMENT_BYTES, StepChunk, copy_pieces, row_table, splice_step

# Inputs of the launches of one sample together exceed the L2 cache twice, up to so many launches.
L2_BYTES = 60 << 20
MAX_SETS = 64
IMAGE = 1


@dataclass(frozen=True)
class Case:
    """num_bytes: read plus written; variants: launch number -> one launch; whole: the call as an engine makes
    it, host work and upload included, where that is more than the launch; error: of the kernel."""

    op: str
    shape: str
    num_tokens: int
    num_bytes: int
    variants: dict[str, Callable[[int], object]]
    error: Callable[[], float]
    whole: dict[str, Callable[[], object]]
    num_sets: int


@dataclass(frozen=True)
class RotaryShape:
    num_q_heads: int
    num_k_heads: int
    head_dim: int
    layout: MRopeLayout


ROTARY_SHAPES = {
    "qwen3_vl_8b": RotaryShape(32, 8, 128, MRopeLayout((24, 20, 20), interleaved=True)),
    "qwen3_5_9b": RotaryShape(16, 4, 256, MRopeLayout((11, 11, 10), interleaved=True)),
    "qwen2_5_vl_7b": RotaryShape(28, 4, 128, MRopeLayout((16, 24, 24), interleaved=False)),
}
# (LM width, deepstack levels)
SPLICE_SHAPES = {
    "qwen3_vl_8b": (4096, 3),
    "qwen3_vl_2b": (2048, 3),
    "qwen3_5_9b": (4096, 0),
}
MAX_POSITIONS = 32_768


def num_sets(num_bytes: int) -> int:
    """Inputs that take turns. Half of the bytes is memory: what is rotated in place is read and written."""
    return max(1, min(MAX_SETS, -(-4 * L2_BYTES // max(1, num_bytes))))


def copy_variant(num_bytes: int, count: int, device: torch.device) -> Callable[[int], object]:
    """A copy that reads and writes ``num_bytes`` together."""
    sources = [torch.empty(max(1, num_bytes // 2), dtype=torch.uint8, device=device) for _ in range(count)]
    targets = [torch.empty_like(source) for source in sources]
    return lambda index: targets[index % count].copy_(sources[index % count])


def rotary_case(name: str, num_tokens: int, device: torch.device, dtype: torch.dtype, kernel: bool) -> Case:
    shape = ROTARY_SHAPES[name]
    num_q, num_k, dim = shape.num_q_heads, shape.num_k_heads, shape.head_dim
    half = shape.layout.rotary_dim // 2
    inv_freq = 1.0 / 5e6 ** (torch.arange(half) / half)
    table = RotaryTable.build(shape.layout, inv_freq, max_positions=MAX_POSITIONS, device=device)
    num_bytes = 2 * num_tokens * (num_q + num_k) * 2 * half * dtype.itemsize
    count = num_sets(num_bytes)
    # q, k and v of one projection, as engines have them: rows of q and k lie apart.
    projections = [
        torch.randn(num_tokens, num_q + 2 * num_k, dim, device=device, dtype=dtype) for _ in range(count)
    ]
    positions = torch.randint(MAX_POSITIONS, (3, num_tokens), device=device)

    def rotated(backend: str) -> Callable[[int], object]:
        def run(index: int) -> object:
            heads = projections[index % count]
            return apply_mrope(
                heads[:, :num_q],
                heads[:, num_q : num_q + num_k],
                positions,
                table,
                backend=backend,  # type: ignore[arg-type]
            )

        return run

    # The reference's way: angles of a step are made once, for all layers, in the model's dtype.
    at = positions[table.axes].T
    pairs = torch.arange(half, device=device)
    cos = table.cos_sin[at, pairs].repeat(1, 2).to(dtype)[:, None]
    sin = table.cos_sin[at, pairs + half].repeat(1, 2).to(dtype)[:, None]

    def engine(index: int) -> object:
        heads = projections[index % count]
        results = []
        for x in (heads[:, :num_q], heads[:, num_q : num_q + num_k]):
            turning, rest = x[..., : 2 * half], x[..., 2 * half :]
            turned = torch.cat([-turning[..., half:], turning[..., :half]], dim=-1)
            results.append(torch.cat([turning * cos + turned * sin, rest], dim=-1))
        return results

    def error() -> float:
        q, k = torch.randn(2, num_tokens, num_q, dim, device=device, dtype=dtype)[:, :, : max(num_q, num_k)]
        k = k[:, :num_k]
        found = apply_mrope(q.clone(), k.clone(), positions, table, backend="triton" if kernel else "torch")
        exact = apply_mrope(q.float(), k.float(), positions, table, backend="torch")
        return max(
            ((a.float() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact, strict=True)
        )

    variants = {"torch": rotated("torch"), "engine": engine, "copy": copy_variant(num_bytes, count, device)}
    if kernel:
        variants["kernel"] = rotated("triton")
    return Case("apply_mrope", name, num_tokens, num_bytes, variants, error, {}, count)


def splice_case(name: str, num_rows: int, device: torch.device, dtype: torch.dtype, kernel: bool) -> Case:
    """``num_rows`` visual tokens of several requests, items of up to 1024 rows with text between them."""
    width, levels = SPLICE_SHAPES[name]
    layout = RowsLayout(width, levels)
    num_bytes = 2 * num_rows * layout.width * dtype.itemsize
    count = num_sets(num_bytes)
    item_rows = [min(1024, num_rows - first) for first in range(0, num_rows, 1024)]
    prompts = [
        expand_placeholders([0] * 16 + [IMAGE] + [0] * 4, [PromptItem(IMAGE, (rows,))]) for rows in item_rows
    ]
    num_tokens = sum(map(len, prompts))
    sets = []
    for _ in range(count):
        splicers, chunks, pieces, offset = [], [], [], 0
        rows = [torch.randn(n, layout.width, device=device, dtype=dtype) for n in item_rows]
        for prompt, item in zip(prompts, rows, strict=True):
            splicer = Splicer(prompt.spans, [item], layout, inputs_embeds_dtype=dtype)
            splicers.append(splicer)
            chunks.append(StepChunk(splicer, 0, len(prompt)))
            pieces.append(RowsPiece(item, offset + 16, len(item)))
            offset += len(prompt)
        embeds = torch.zeros(num_tokens, width, device=device, dtype=dtype)
        deepstack = torch.empty(levels, num_rows, width, device=device, dtype=dtype)
        host_table = row_table(pieces)
        host_table[2] = range(num_rows)
        mask = torch.zeros(num_tokens, dtype=torch.bool)
        for piece in pieces:
            mask[piece.token : piece.token + piece.length] = True
        sets.append(
            (
                chunks,
                pieces,
                rows,
                embeds,
                deepstack,
                torch.from_numpy(host_table).to(device),
                mask.to(device),
            )
        )
    aligned = all(piece.rows.data_ptr() % ALIGNMENT_BYTES == 0 for one in sets for piece in one[1])

    def launched(index: int) -> object:
        from lm_adapter.kernels.scatter_rows import scatter_rows_

        _, _, _, embeds, deepstack, table, _ = sets[index % count]
        return scatter_rows_(table, embeds, deepstack, rows_dtype=dtype, aligned=aligned)

    def copied(index: int) -> object:
        _, pieces, _, embeds, deepstack, _, _ = sets[index % count]
        return copy_pieces(embeds, pieces, deepstack, per_token=False)

    def engine(index: int) -> object:
        """All items in one tensor, scattered by a mask, each level cut out."""
        _, _, rows, embeds, _, _, mask = sets[index % count]
        joined = torch.cat(rows)
        embeds.masked_scatter_(mask[:, None], joined[:, :width])
        return [joined[:, n * width : (n + 1) * width].contiguous() for n in range(1, levels + 1)]

    def error() -> float:
        chunks, pieces, _, embeds, deepstack, _, _ = sets[0]
        found = splice_step(embeds.zero_(), chunks, backend="triton" if kernel else "torch")
        expected = torch.zeros_like(embeds)
        copy_pieces(expected, pieces, deepstack, per_token=False)
        differs = (embeds != expected).sum() + (found.deepstack != deepstack).sum()
        return float(differs)

    variants = {"torch": copied, "engine": engine, "copy": copy_variant(num_bytes, count, device)}
    turn = itertools.count()

    def whole(backend: str) -> Callable[[], object]:
        def run() -> object:
            chunks, _, _, embeds, *_ = sets[next(turn) % count]
            return splice_step(embeds, chunks, backend=backend)  # type: ignore[arg-type]

        return run

    wholes = {"torch": whole("torch")}
    if kernel:
        variants["kernel"] = launched
        wholes["kernel"] = whole("triton")
    return Case("splice", name, num_rows, num_bytes, variants, error, wholes, count)
