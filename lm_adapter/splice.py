"""Rows into ``inputs_embeds``: a prefill step's chunks, main level and deepstack levels, in one launch.

Owns the check of rows against the prompt and the model, the step's table of where each row comes from and
goes to, and the torch version of the copy; the fused one is ``kernels.scatter_rows``. Every item is checked
in full before the first element is written, so that a bad result never leaves an engine half changed. Where
rows go comes from ``placeholders``. torch is imported where tensors are made.

A row is [D * (1 + L)]: the main level first, then the deepstack levels in order. The main level replaces the
placeholder's embedding; level i is added to the hidden state of the same tokens after decoder layer i
(Qwen3-VL, ``_deepstack_process``). One tensor holds both, so they cannot come apart.

Rows are converted to the dtype of ``inputs_embeds``, the only cast here: equal dtypes copy, float16 and
bfloat16 widen to float32 exactly, float32 rounds to nearest even to float16 or bfloat16 as the full model
does with its tower's output. float16 and bfloat16 never become one another, which loses mantissa or range;
integers and float64 are refused. Positions, grids and timings are integers and floats of the host and never
pass through here.

Nothing waits for the device: the table is made on the host from what the host knows, travels from pinned
memory in the current stream, and holds the addresses of the rows, which stay where they are, be that torch's
memory or an arena mapped from another process. Rows of host memory are sent ahead of it. Only embeddings that
lie on the host themselves are complete when the step returns.

Shape legend: T tokens of a step, V visual tokens of it, R rows of an item, D LM width, L deepstack levels.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest, InvalidRows
from lm_adapter.placeholders import ItemSpan
from lm_adapter.rotary import Backend, choose_backend

if TYPE_CHECKING:
    import torch

__all__ = [
    "RowsLayout",
    "Splicer",
    "StepChunk",
    "StepSplice",
    "check_item_rows",
    "items_needed",
    "splice_step",
]

_CASTS = {
    "float32": ("float32", "float16", "bfloat16"),
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
}
"""dtype of the rows -> dtypes of inputs_embeds that they may be written to."""

_ALIGNMENT_BYTES = 16
"""Of every row's address, for the kernel's widest loads."""

_NO_ROW = 0
"""The address in the table of a text token, whose deepstack levels are zeroed."""


@dataclass(frozen=True)
class RowsLayout:
    """What the language model takes. out_width: D; num_deepstack_levels: L."""

    out_width: int
    num_deepstack_levels: int = 0

    @property
    def width(self) -> int:
        return self.out_width * (1 + self.num_deepstack_levels)


class StepChunk(NamedTuple):
    """Tokens [start, start + num_tokens) of one request. In the step's batch requests follow one another."""

    splicer: Splicer
    start: int
    num_tokens: int


@dataclass(frozen=True, eq=False)
class StepSplice:
    """What a step's forward pass needs besides its ``inputs_embeds``.

    num_visual: V; visual_tokens: int64 [V] on the device, in rising order; deepstack: [L, V, D] in that
    order, or the per-token buffer [L, T, D] that was given, zero where there is no row.
    """

    num_visual: int
    visual_tokens: torch.Tensor
    deepstack: torch.Tensor


class _Piece(NamedTuple):
    """Rows [row, row + length) of an item's [R, D * (1 + L)]; they go to tokens [token, token + length) of
    the step."""

    rows: torch.Tensor
    row: int
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
    L)] of a dtype that may be written to ``inputs_embeds_dtype``.

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
    """The rows of one prompt, spliced chunk by chunk (``splice_step``).

    spans: one per item, in prompt order, from ``expand_placeholders``; rows: one [R, D * (1 + L)] tensor per
    item, on any device, or None for an item whose tokens are all in a prefix cache (``items_needed``).
    Everything is checked at construction. Rows may be dropped as the prefill passes them (``drop_before``),
    so that nothing is held through decoding.
    """

    def __init__(
        self,
        spans: Sequence[ItemSpan],
        rows: Sequence[torch.Tensor | None],
        layout: RowsLayout,
        *,
        inputs_embeds_dtype: torch.dtype,
        announced_levels: Sequence[int | None] | None = None,
    ) -> None:
        """Raises InvalidRows when an item's rows do not fit, InvalidRequest when their number does not."""
        if len(spans) != len(rows):
            raise InvalidRequest(f"prompt has {len(spans)} items, rows came for {len(rows)}")
        announced = [None] * len(rows) if announced_levels is None else announced_levels
        for span, item_rows, levels in zip(spans, rows, announced, strict=True):
            if item_rows is not None:
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
        # Of each segment, in the prompt's order: its item's index, its first row, its first token, its end.
        self._segments: list[tuple[int, int, int, int]] = []
        for index, span in enumerate(spans):
            row = 0
            for segment in span.segments:
                self._segments.append((index, row, segment.start, segment.end))
                row += segment.length
        self._segment_ends = [end for *_, end in self._segments]
        self.layout = layout
        self.inputs_embeds_dtype = inputs_embeds_dtype

    def drop_before(self, end: int) -> None:
        """Lets go of the rows of items that end at or before token ``end``."""
        for index, span in enumerate(self._spans):
            if span.end <= end:
                self._rows[index] = None

    def _pieces(self, start: int, end: int, offset: int) -> list[_Piece]:
        """The rows of tokens [start, end), in the tokens' order; token ``start`` is the step's token
        ``offset``. Raises as ``splice_step``."""
        if start < 0:
            raise InvalidRequest(f"a chunk starts at token 0 or later, got {start}")
        pieces = []
        for place in range(bisect.bisect_right(self._segment_ends, start), len(self._segments)):
            index, row, segment_start, segment_end = self._segments[place]
            first, last = max(segment_start, start), min(segment_end, end)
            if first >= last:
                break
            row += first - segment_start
            rows = self._rows[index]
            if rows is None:
                raise InvalidRequest(
                    f"item {self._spans[index].item}: rows {row}..{row + last - first} are "
                    "needed, which were dropped or never given; fetch the item again",
                    reason="ROWS_DROPPED",
                )
            pieces.append(_Piece(rows, row, offset + first - start, last - first))
        return pieces


def splice_step(
    inputs_embeds_TD: torch.Tensor,
    chunks: Sequence[StepChunk],
    *,
    deepstack_LTD: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> StepSplice:
    """Writes the main level of every chunk's visual tokens into ``inputs_embeds_TD`` in place and gathers or
    fills the deepstack levels.

    inputs_embeds_TD: [T, D], a view of a larger batch serves; the chunks' tokens come first, T may be larger
    where a graph's batch is padded. deepstack_LTD: a buffer that the model adds to all tokens, text and
    padding included, as captured graphs need it; it is written whole. backend: "auto" takes the kernel on
    CUDA where Triton is installed.
    Raises InvalidRequest, before anything is written, when chunks, shapes or dtypes disagree, for a start
    below 0 and, with reason ROWS_DROPPED, for rows that are not there.
    """
    import torch

    pieces = _step_pieces(inputs_embeds_TD, chunks)
    num_visual = sum(piece.length for piece in pieces)
    num_levels = chunks[0].splicer.layout.num_deepstack_levels if chunks else 0
    per_token = deepstack_LTD is not None
    if deepstack_LTD is None:
        deepstack = inputs_embeds_TD.new_empty((num_levels, num_visual, inputs_embeds_TD.shape[1]))
    else:
        deepstack = deepstack_LTD
        needed = (num_levels if chunks else deepstack.shape[0], *inputs_embeds_TD.shape)
        if tuple(deepstack.shape) != needed or deepstack.dtype != inputs_embeds_TD.dtype:
            raise InvalidRequest(
                f"the deepstack buffer is {deepstack.dtype} {list(deepstack.shape)}, needs "
                f"{inputs_embeds_TD.dtype} {list(needed)}"
            )
    splice = _splice_triton if choose_backend(backend, inputs_embeds_TD) == "triton" else _splice_torch
    with torch.no_grad():
        resident = [_resident(piece, inputs_embeds_TD.device) for piece in pieces]
        visual_tokens = splice(inputs_embeds_TD, resident, deepstack, per_token=per_token)
    return StepSplice(num_visual, visual_tokens, deepstack)


def _step_pieces(inputs_embeds: torch.Tensor, chunks: Sequence[StepChunk]) -> list[_Piece]:
    """All chunks' pieces. Raises InvalidRequest."""
    shape, dtype = tuple(inputs_embeds.shape), inputs_embeds.dtype
    pieces: list[_Piece] = []
    offset = 0
    for request, (splicer, start, num_tokens) in enumerate(chunks):
        layout = splicer.layout
        if len(shape) != 2 or shape[1] != layout.out_width:
            raise InvalidRequest(
                f"inputs_embeds of a chunk has shape {list(shape)}, needs [tokens, {layout.out_width}]"
            )
        if dtype != splicer.inputs_embeds_dtype:
            raise InvalidRequest(
                f"inputs_embeds is {dtype}, rows were checked for {splicer.inputs_embeds_dtype}"
            )
        if num_tokens < 0:
            raise InvalidRequest(f"request {request} has {num_tokens} tokens in the step, needs 0 or more")
        first = chunks[0].splicer.layout
        if layout.width != first.width:
            raise InvalidRequest(
                f"request {request} has rows of width {layout.width}, request 0 of {first.width}; "
                "a step is one model's"
            )
        pieces += splicer._pieces(start, start + num_tokens, offset)
        offset += num_tokens
    if offset > shape[0]:
        raise InvalidRequest(f"the step's requests have {offset} tokens, inputs_embeds has {shape[0]}")
    return pieces


def _resident(piece: _Piece, device: torch.device) -> _Piece:
    """The piece with its rows on the device, or on their way there in the current stream."""
    import torch

    rows, row, _, length = piece
    if rows.device != device:
        rows = rows[row : row + length]
        if device.type == "cuda" and not rows.is_cuda and not rows.is_pinned():
            # A copy out of any other memory waits on the host until the stream has done its earlier work.
            rows = rows.contiguous().pin_memory()
        # The host reads its own memory without asking the stream, so a copy to it has to end here.
        rows = rows.to(device, non_blocking=device.type == "cuda")
        piece = piece._replace(rows=rows, row=0)
    if rows.is_cuda:
        # Memory of another stream's: not given out again before this stream has read it.
        rows.record_stream(torch.cuda.current_stream(device))
    return piece


def _splice_torch(
    inputs_embeds: torch.Tensor, pieces: Sequence[_Piece], deepstack: torch.Tensor, *, per_token: bool
) -> torch.Tensor:
    """A slice for each piece and level. Returns the visual tokens."""
    width = inputs_embeds.shape[1]
    if per_token:
        deepstack.zero_()
    place = 0
    for rows, row, token, length in pieces:
        moved = rows[row : row + length].to(inputs_embeds.dtype)
        inputs_embeds[token : token + length] = moved[:, :width]
        first = token if per_token else place
        for level in range(len(deepstack)):
            deepstack[level, first : first + length] = moved[:, (level + 1) * width : (level + 2) * width]
        place += length
    return _upload(_row_table(pieces)[1], inputs_embeds.device)


def _splice_triton(
    inputs_embeds: torch.Tensor, pieces: Sequence[_Piece], deepstack: torch.Tensor, *, per_token: bool
) -> torch.Tensor:
    """One launch, and for each further dtype among the rows another. Returns the visual tokens."""
    from lm_adapter.kernels.scatter_rows import scatter_rows_

    pieces = [_contiguous(piece) for piece in pieces]
    addresses, visual_tokens = _row_table(pieces)
    tokens, places = visual_tokens, np.arange(len(visual_tokens))
    if per_token:
        is_text = np.ones(len(inputs_embeds), dtype=np.bool_)
        is_text[visual_tokens] = False
        text_tokens = np.flatnonzero(is_text)
        addresses = np.concatenate([addresses, np.full(len(text_tokens), _NO_ROW)])
        tokens = places = np.concatenate([visual_tokens, text_tokens])
    tables = [np.stack([addresses, tokens, places])]
    dtypes = sorted({piece.rows.dtype for piece in pieces}, key=str) or [inputs_embeds.dtype]
    if len(dtypes) > 1:
        dtype_of_row = np.zeros(len(tokens), dtype=np.int64)
        dtype_of_row[: len(visual_tokens)] = np.repeat(
            [dtypes.index(piece.rows.dtype) for piece in pieces], [piece.length for piece in pieces]
        )
        tables = [tables[0][:, dtype_of_row == number] for number in range(len(dtypes))]
    # One upload for all: the launches' tables side by side, then the visual tokens.
    numbers = np.concatenate([*(table.ravel() for table in tables), visual_tokens])
    uploaded = _upload(numbers, inputs_embeds.device)
    offset = 0
    for dtype, table in zip(dtypes, tables, strict=True):
        scatter_rows_(
            uploaded[offset : offset + table.size].view(table.shape),
            inputs_embeds,
            deepstack,
            rows_dtype=dtype,
            aligned=not (table[0] % _ALIGNMENT_BYTES).any(),
        )
        offset += table.size
    return uploaded[offset:]


def _contiguous(piece: _Piece) -> _Piece:
    """The piece with rows that are each contiguous in themselves."""
    rows, row, _, length = piece
    if rows.stride(1) == 1 or rows.shape[1] == 1:
        return piece
    return piece._replace(rows=rows[row : row + length].contiguous(), row=0)


def _row_table(pieces: Sequence[_Piece]) -> npt.NDArray[np.int64]:
    """int64 [2, V]: the address of every row, and the token that it goes to."""
    runs = []
    for rows, row, token, length in pieces:
        pitch = rows.stride(0) * rows.element_size()
        runs.append((rows.data_ptr() + row * pitch, pitch, token, length))
    starts, pitches, tokens, lengths = np.array(runs, dtype=np.int64).reshape(-1, 4).T
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    addresses = np.repeat(starts, lengths) + within * np.repeat(pitches, lengths)
    return np.stack([addresses, np.repeat(tokens, lengths) + within])


def _upload(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """On CUDA out of pinned memory, whose owner, torch's host allocator, waits for the copy before it gives
    the memory out again; the host does not."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
