"""Rows into ``inputs_embeds``: for any chunk of a prefill, main level and deepstack levels from one tensor.

Owns the check of rows against the prompt and the model, and the copy. Every item that a chunk needs is
checked in full before the first element is written, so that a bad result never leaves an engine half
changed. Where rows go comes from ``placeholders``. torch is imported where tensors are made.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lm_adapter.errors import InvalidRequest, InvalidRows
from lm_adapter.placeholders import ItemSpan

if TYPE_CHECKING:
    import torch

__all__ = ["ChunkSplice", "RowsLayout", "Splicer", "check_item_rows"]

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


class _Piece(NamedTuple):
    """Rows [row, row + length) of an item go to tokens [token, token + length) of the chunk."""

    item: int
    row: int
    token: int
    length: int


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
    device. Everything is checked at construction. Rows may be dropped as the prefill passes them
    (``drop_before``), so that nothing is held through decoding.
    """

    def __init__(
        self,
        spans: Sequence[ItemSpan],
        rows: Sequence[torch.Tensor],
        layout: RowsLayout,
        *,
        inputs_embeds_dtype: torch.dtype,
        announced_levels: Sequence[int | None] | None = None,
    ) -> None:
        """Raises InvalidRows when an item's rows do not fit, InvalidRequest when their number does not."""
        if len(spans) != len(rows):
            raise InvalidRequest(f"prompt has {len(spans)} items, rows came for {len(rows)}")
        announced = [None] * len(rows) if announced_levels is None else list(announced_levels)
        for span, item_rows, levels in zip(spans, rows, announced, strict=True):
            check_item_rows(
                span.item,
                item_rows,
                num_rows=span.length,
                layout=layout,
                inputs_embeds_dtype=inputs_embeds_dtype,
                announced_levels=levels,
            )
        self._spans = tuple(spans)
        self._rows: list[torch.Tensor | None] = list(rows)
        self._layout = layout
        self._dtype = inputs_embeds_dtype

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

        if inputs_embeds_CD.ndim != 2 or inputs_embeds_CD.shape[1] != self._layout.out_width:
            raise InvalidRequest(
                f"inputs_embeds of a chunk has shape {list(inputs_embeds_CD.shape)}, needs "
                f"[tokens, {self._layout.out_width}]"
            )
        if inputs_embeds_CD.dtype != self._dtype:
            raise InvalidRequest(
                f"inputs_embeds is {inputs_embeds_CD.dtype}, rows were checked for {self._dtype}"
            )
        if start < 0:
            raise InvalidRequest(f"a chunk starts at token 0 or later, got {start}")
        num_tokens = inputs_embeds_CD.shape[0]
        pieces = self._pieces(start, start + num_tokens)
        sources = [self._source(piece) for piece in pieces]

        device = inputs_embeds_CD.device
        width = self._layout.out_width
        visual_mask = torch.zeros(num_tokens, dtype=torch.bool)
        levels: list[list[torch.Tensor]] = [[] for _ in range(self._layout.num_deepstack_levels)]
        with torch.no_grad():
            for piece, source in zip(pieces, sources, strict=True):
                tokens = slice(piece.token, piece.token + piece.length)
                visual_mask[tokens] = True
                moved = source.to(device=device, dtype=self._dtype)
                inputs_embeds_CD[tokens] = moved[:, :width]
                for level, parts in enumerate(levels, start=1):
                    parts.append(moved[:, level * width : (level + 1) * width])
        empty = torch.zeros((0, width), dtype=self._dtype, device=device)
        deepstack = tuple(torch.cat(parts) if parts else empty for parts in levels)
        return ChunkSplice(visual_mask.to(device), deepstack)

    def drop_before(self, end: int) -> None:
        """Lets go of the rows of items that end at or before token ``end``."""
        for index, span in enumerate(self._spans):
            if span.end <= end:
                self._rows[index] = None

    def _pieces(self, start: int, end: int) -> list[_Piece]:
        pieces = []
        for index, span in enumerate(self._spans):
            if span.start >= end or span.end <= start:
                continue
            row = 0
            for segment in span.segments:
                first, last = max(segment.start, start), min(segment.end, end)
                if first < last:
                    pieces.append(_Piece(index, row + first - segment.start, first - start, last - first))
                row += segment.length
        return pieces

    def _source(self, piece: _Piece) -> torch.Tensor:
        rows = self._rows[piece.item]
        if rows is None:
            raise InvalidRequest(
                f"item {self._spans[piece.item].item}: rows {piece.row}..{piece.row + piece.length} are "
                "needed after they were dropped; fetch the item again",
                reason="ROWS_DROPPED",
            )
        return rows[piece.row : piece.row + piece.length]
