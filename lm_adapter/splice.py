"""Rows into ``inputs_embeds``: for any chunk of a prefill, main level and deepstack levels from one tensor.

Owns the check of rows against the prompt and the model, and the copy of one prompt's chunk; ``step`` copies
those of several requests at once. Every item that a chunk needs is checked in full before the first element
is written, so that a bad result never leaves an engine half changed. Where rows go comes from
``placeholders``, which of them were pruned from ``pruning``. torch is imported where tensors are made.

A row is [D * (1 + L)]: the main level first, then the deepstack levels in order. The main level replaces the
placeholder's embedding; level i is added to the hidden state of the same tokens after decoder layer i
(Qwen3-VL, ``_deepstack_process``). One tensor holds both, so they cannot come apart.

Rows are converted to the dtype of ``inputs_embeds``, the only cast here: equal dtypes copy, float16 and
bfloat16 widen to float32 exactly, float32 rounds to nearest even to float16 or bfloat16 as the full model
does with its tower's output. float16 and bfloat16 never become one another, which loses mantissa or range;
integers and float64 are refused. Positions, grids and timings are integers and floats of the host and never
pass through here.

Shape legend: C tokens of a chunk, V visual tokens of it, R rows of an item, D LM width, L deepstack levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest, InvalidRows
from lm_adapter.placeholders import ItemSpan

if TYPE_CHECKING:
    import torch

__all__ = ["ChunkSplice", "RowsLayout", "RowsPiece", "Splicer", "check_item_rows", "items_needed"]

_CASTS = {
    "float32": ("float32", "float16", "bfloat16"),
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
}
"""dtype of the rows -> dtypes of inputs_embeds that they may be written to."""


@dataclass(frozen=True)
class RowsLayout:
    """What the language model takes. out_width: D; dtype: of the rows on the wire ("bfloat16"), None for
    any."""

    out_width: int
    num_deepstack_levels: int = 0
    dtype: str | None = None

    @property
    def width(self) -> int:
        return self.out_width * (1 + self.num_deepstack_levels)


@dataclass(frozen=True, eq=False)
class ChunkSplice:
    """What a chunk's forward pass needs besides its ``inputs_embeds``.

    visual_mask: bool [C]; deepstack: L tensors [V, D] in the order of the mask's True tokens, in the
    dtype of ``inputs_embeds``. A chunk without visual tokens has L tensors of 0 rows.
    """

    visual_mask: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]

    @property
    def num_visual(self) -> int:
        """V, as the host knows it when there are deepstack levels; it may synchronise with the device
        else."""
        return len(self.deepstack[0]) if self.deepstack else int(self.visual_mask.sum())


class RowsPiece(NamedTuple):
    """rows: [length, D * (1 + L)], a view of an item's; they go to tokens [token, token + length) of the
    chunk."""

    rows: torch.Tensor
    token: int
    length: int


def items_needed(spans: Sequence[ItemSpan], start: int, end: int | None = None) -> list[int]:
    """Indices into ``spans`` of the items with rows among tokens [start, end): after a prefix-cache hit of
    ``start`` tokens, which may end inside an item's rows, the others need no rows at all."""
    return [
        index
        for index, span in enumerate(spans)
        if any(s.end > start and (end is None or s.start < end) for s in span.segments)
    ]


def check_item_rows(
    item: int,
    rows: torch.Tensor,
    *,
    num_rows: int,
    layout: RowsLayout,
    inputs_embeds_dtype: torch.dtype,
    announced_levels: int | None = None,
) -> None:
    """Raises InvalidRows, with the figure found and the one needed, unless ``rows`` is [num_rows, D * (1 +
    L)] of the layout's dtype and may be written to ``inputs_embeds_dtype``.

    announced_levels: L as the sender says it, where it does: widths alone do not tell 64 * (1 + 3) from 128
    * (1 + 1).
    """

    def require(field: str, found: object, expected: object, why: str) -> None:
        if found != expected:
            text = f"item {item}: rows have {field} {found}, {why} needs {expected}"
            raise InvalidRows(field, text, found=found, expected=expected)

    require("rank", rows.ndim, 2, "the layout [rows, width]")
    require("num_rows", rows.shape[0], num_rows, "the prompt")
    if announced_levels is not None:
        require("deepstack levels", announced_levels, layout.num_deepstack_levels, "the language model")
    levels = f"{layout.out_width} * (1 + {layout.num_deepstack_levels} deepstack levels)"
    require("width", rows.shape[1], layout.width, f"the language model's {levels}")
    found = str(rows.dtype).removeprefix("torch.")
    if layout.dtype is not None:
        require("dtype", found, layout.dtype, "the model's announcement")
    target = str(inputs_embeds_dtype).removeprefix("torch.")
    if target not in _CASTS.get(found, ()):
        raise InvalidRows(
            "dtype",
            f"item {item}: rows of {found} may not be cast to inputs_embeds of {target}; "
            f"{found} goes to {' or '.join(_CASTS.get(found, ())) or 'nothing'}",
            found=found,
            expected=target,
        )


class Splicer:
    """The rows of one prompt, spliced chunk by chunk.

    spans: one per item, from ``expand_placeholders``; rows: one [R, D * (1 + L)] tensor per item, on any
    device, or None for an item whose tokens are all in a prefix cache (``items_needed``). Everything is
    checked at construction. Rows may be dropped as the prefill passes them (``drop_before``), so that
    nothing is held through decoding.
    """

    def __init__(
        self,
        spans: Sequence[ItemSpan],
        rows: Sequence[torch.Tensor | None],
        layout: RowsLayout,
        *,
        inputs_embeds_dtype: torch.dtype,
        announced_levels: Sequence[int | None] | None = None,
        keep: Sequence[npt.NDArray[np.bool_] | None] | None = None,
        ready: Sequence[Callable[[int], object] | None] | None = None,
    ) -> None:
        """keep: of a pruned prompt (``pruning``), which rows of each item are in it; rows are whole all the
        same. ready: of items whose rows are still coming (``arriving``), called before a chunk is written
        with how many of the first rows it needs; returns when they are there, or raises. Raises InvalidRows
        when an item's rows do not fit, InvalidRequest when their number does not.
        """
        if len(spans) != len(rows):
            raise InvalidRequest(f"prompt has {len(spans)} items, rows came for {len(rows)}")
        if ready is not None and len(ready) != len(rows):
            raise InvalidRequest(f"prompt has {len(rows)} items, {len(ready)} say when they are ready")
        announced = [None] * len(rows) if announced_levels is None else list(announced_levels)
        masks = [None] * len(rows) if keep is None else list(keep)
        for span, item_rows, levels, mask in zip(spans, rows, announced, masks, strict=True):
            if mask is not None and int(mask.sum()) != span.length:
                raise InvalidRequest(
                    f"item {span.item}: {int(mask.sum())} of {len(mask)} rows are kept, the prompt has "
                    f"{span.length} placeholders"
                )
            if item_rows is not None:
                check_item_rows(
                    span.item,
                    item_rows,
                    num_rows=span.length if mask is None else len(mask),
                    layout=layout,
                    inputs_embeds_dtype=inputs_embeds_dtype,
                    announced_levels=levels,
                )
        self._spans = tuple(spans)
        self._rows: list[torch.Tensor | None] = list(rows)
        self._ready = [None] * len(rows) if ready is None else list(ready)
        self._kept = [None if mask is None else np.flatnonzero(mask) for mask in masks]
        self.layout = layout
        self.inputs_embeds_dtype = inputs_embeds_dtype

    @property
    def num_rows_held(self) -> int:
        """Rows not dropped yet."""
        return sum(len(rows) for rows in self._rows if rows is not None)

    def splice(self, inputs_embeds_CD: torch.Tensor, start: int) -> ChunkSplice:
        """Writes the main level of tokens [start, start + C) into ``inputs_embeds_CD`` in place.

        inputs_embeds_CD: [C, D], the embeddings of those tokens, of the dtype given at construction; a view
        of a larger batch serves. The deepstack levels come back on its device. Raises InvalidRequest for
        other shapes, dtypes and for rows dropped already, before writing anything.
        """
        import torch

        self.require_embeds(inputs_embeds_CD)
        num_tokens = inputs_embeds_CD.shape[0]
        pieces = self.pieces(start, start + num_tokens)

        device = inputs_embeds_CD.device
        width = self.layout.out_width
        visual_mask = torch.zeros(num_tokens, dtype=torch.bool)
        levels: list[list[torch.Tensor]] = [[] for _ in range(self.layout.num_deepstack_levels)]
        with torch.no_grad():
            for piece in pieces:
                tokens = slice(piece.token, piece.token + piece.length)
                visual_mask[tokens] = True
                moved = piece.rows.to(device=device, dtype=self.inputs_embeds_dtype)
                inputs_embeds_CD[tokens] = moved[:, :width]
                for level, parts in enumerate(levels, start=1):
                    parts.append(moved[:, level * width : (level + 1) * width])
        empty = torch.zeros((0, width), dtype=self.inputs_embeds_dtype, device=device)
        deepstack = tuple(torch.cat(parts) if parts else empty for parts in levels)
        return ChunkSplice(visual_mask.to(device), deepstack)

    def require_embeds(self, inputs_embeds: torch.Tensor) -> None:
        """Raises InvalidRequest unless it is [tokens, D] of the dtype given at construction."""
        if inputs_embeds.ndim != 2 or inputs_embeds.shape[1] != self.layout.out_width:
            raise InvalidRequest(
                f"inputs_embeds of a chunk has shape {list(inputs_embeds.shape)}, needs "
                f"[tokens, {self.layout.out_width}]"
            )
        if inputs_embeds.dtype != self.inputs_embeds_dtype:
            raise InvalidRequest(
                f"inputs_embeds is {inputs_embeds.dtype}, rows were checked for {self.inputs_embeds_dtype}"
            )

    def drop_before(self, end: int) -> None:
        """Lets go of the rows of items that end at or before token ``end``."""
        for index, span in enumerate(self._spans):
            if span.end <= end:
                self._rows[index] = None

    def pieces(self, start: int, end: int) -> list[RowsPiece]:
        """The rows of tokens [start, end), in the tokens' order, as views of the items' own.

        Waits for rows that are still coming. Raises InvalidRequest for a start below 0 and, with reason
        ROWS_DROPPED, for rows that are not there, and what ``ready`` raises.
        """
        if start < 0:
            raise InvalidRequest(f"a chunk starts at token 0 or later, got {start}")
        pieces = []
        for index, span in enumerate(self._spans):
            if span.start >= end or span.end <= start:
                continue
            row = 0
            for segment in span.segments:
                first, last = max(segment.start, start), min(segment.end, end)
                if first < last:
                    begin = row + first - segment.start
                    pieces += self._cut(index, begin, first - start, last - first)
                row += segment.length
        return pieces

    def _cut(self, index: int, row: int, token: int, length: int) -> list[RowsPiece]:
        """Rows [row, row + length) of those that the prompt has of an item; of a pruned one, run by run."""
        rows = self._rows[index]
        if rows is None:
            raise InvalidRequest(
                f"item {self._spans[index].item}: rows {row}..{row + length} are "
                "needed, which were dropped or never given; fetch the item again",
                reason="ROWS_DROPPED",
            )
        kept, wait = self._kept[index], self._ready[index]
        if wait is not None:
            wait(row + length if kept is None else int(kept[row + length - 1]) + 1)
        if kept is None:
            return [RowsPiece(rows[row : row + length], token, length)]
        wanted = kept[row : row + length]
        breaks = np.flatnonzero(np.diff(wanted) != 1) + 1
        starts, ends = [0, *breaks.tolist()], [*breaks.tolist(), length]
        return [
            RowsPiece(rows[int(wanted[a]) : int(wanted[a]) + b - a], token + a, b - a)
            for a, b in zip(starts, ends, strict=True)
        ]
