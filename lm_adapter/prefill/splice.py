"""Copies rows into ``inputs_embeds``: all chunks of a prefill step, main and deepstack levels, in one launch.

Owns checking rows against the prompt and the model, the step's table of source and destination of each row,
and the torch version of the copy; the fused version is ``kernels.scatter_rows``. ``Splicer`` checks every
item completely before anything is written, so an invalid result never leaves ``inputs_embeds`` half written.
``placeholders`` computes where rows go. torch is imported only inside functions.

A row is [D * (1 + L)]: the main level first, then the deepstack levels in order. The main level replaces the
placeholder's embedding. Level i is added to the hidden state of the same token after decoder layer i
(Qwen3-VL, ``_deepstack_process``). One tensor holds all levels, so they cannot get out of step.

Only rows are converted, to the dtype of ``inputs_embeds``. Equal dtypes are copied. float16 and bfloat16
widen to float32 exactly. float32 is rounded to nearest even to float16 or bfloat16, as the full model rounds
its tower's output. Conversions between float16 and bfloat16 lose mantissa or range and are refused, as are
integers and float64.

The host never waits for the device. The host builds the table from values that it knows and copies it from
pinned memory on the current stream. The table holds the addresses of rows, which may be in torch's memory or
in an arena mapped from another process; rows on the device are not moved. Rows elsewhere are copied to the
device first. Results are complete on return only if ``inputs_embeds`` is in host memory.

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
from lm_adapter.prefill.placeholders import ItemSpan
from lm_adapter.prefill.rotary import Backend, choose_backend

if TYPE_CHECKING:
    import torch

_CASTS = {
    "float32": ("float32", "float16", "bfloat16"),
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
}
"""dtype of the rows -> dtypes of inputs_embeds that they may be written to."""

_ALIGNMENT_BYTES = 16
"""The alignment of every row's address that the kernel's widest loads need."""

_NO_ROW = 0
"""The table's address for a text token. Its deepstack levels are zeroed."""


@dataclass(frozen=True)
class RowsLayout:
    """The row layout that the language model needs. out_width: D; num_deepstack_levels: L."""

    out_width: int
    num_deepstack_levels: int = 0

    @property
    def width(self) -> int:
        return self.out_width * (1 + self.num_deepstack_levels)


class StepChunk(NamedTuple):
    """Tokens [start, start + num_tokens) of one request. A step concatenates its chunks."""

    splicer: Splicer
    start: int
    num_tokens: int


@dataclass(frozen=True, eq=False)
class StepSplice:
    """What a step's forward pass needs besides its ``inputs_embeds``.

    num_visual: V; visual_tokens: int64 [V] on the device, in ascending order; deepstack: [L, V, D] in the
    same order, or the given per-token buffer [L, T, D], which is zero where there is no row.
    """

    num_visual: int
    visual_tokens: torch.Tensor
    deepstack: torch.Tensor


class _Piece(NamedTuple):
    """Rows [row, row + length) of an item's [R, D * (1 + L)], which go to tokens [token, token + length) of
    the step."""

    rows: torch.Tensor
    row: int
    token: int
    length: int


def items_needed(spans: Sequence[ItemSpan], start: int, end: int | None = None) -> list[int]:
    """Indices into ``spans`` of the items that have rows among tokens [start, end). After a prefix-cache hit
    of ``start`` tokens, which may end inside an item's rows, the other items need no rows."""
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
    """Raises InvalidRows, with the found and the expected value, unless ``rows`` is [num_rows, D * (1 + L)]
    with a dtype that may be written to ``inputs_embeds_dtype``.

    announced_levels: L according to the sender, if known. The width alone is ambiguous: 64 * (1 + 3) equals
    128 * (1 + 1).
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
    """The rows of one prompt, which ``splice_step`` splices chunk by chunk.

    spans: one per item, in prompt order, from ``expand_placeholders``; rows: one [R, D * (1 + L)] tensor per
    item, on any device, or None for an item whose tokens are all in a prefix cache (``items_needed``).
    The constructor checks all rows. ``drop_before`` releases rows that the prefill has passed, so that none
    are held during decoding.
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
        """Raises InvalidRows when an item's rows do not fit, InvalidRequest for a wrong number of items."""
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
        # For each segment, in prompt order: index of its item, its first row, its first token, its end token.
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
        """Releases the rows of items that end at or before token ``end``."""
        for index, span in enumerate(self._spans):
            if span.end <= end:
                self._rows[index] = None

    def _pieces(self, start: int, end: int, offset: int) -> list[_Piece]:
        """The rows of tokens [start, end), in token order. Token ``start`` is token ``offset`` of the step.
        Raises the errors of ``splice_step``."""
        if start < 0:
            raise InvalidRequest(f"a chunk starts at token 0 or later, got {start}")
        pieces = []
        for number in range(bisect.bisect_right(self._segment_ends, start), len(self._segments)):
            index, row, segment_start, segment_end = self._segments[number]
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
    """Writes the main level of every chunk's visual tokens to ``inputs_embeds_TD`` in place, and returns or
    fills the deepstack levels.

    inputs_embeds_TD: [T, D], may be a view of a larger batch. The chunks' tokens come first; T may be larger
    when a CUDA graph's batch is padded. deepstack_LTD: a buffer that the model adds to all tokens, text and
    padding included, as captured graphs need it; every element is written. backend: "auto" selects the kernel
    on CUDA if Triton is installed.
    Raises InvalidRequest, before anything is written, when chunks, shapes or dtypes disagree, for a start
    below 0 and, with reason ROWS_DROPPED, for rows that were dropped or never given.
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
    """The pieces of all chunks. Raises InvalidRequest."""
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
    """The piece with its rows on the device, or being copied there on the current stream."""
    import torch

    rows, row, _, length = piece
    if rows.device != device:
        rows = rows[row : row + length]
        if device.type == "cuda" and not rows.is_cuda and not rows.is_pinned():
            # A copy from pageable memory would block the host until the stream's earlier work is done.
            rows = rows.contiguous().pin_memory()
        # The host reads host memory without waiting for a stream, so a copy to the host must be synchronous.
        rows = rows.to(device, non_blocking=device.type == "cuda")
        piece = piece._replace(rows=rows, row=0)
    if rows.is_cuda:
        # Memory of another stream: keep the allocator from reusing it before this stream has read it.
        rows.record_stream(torch.cuda.current_stream(device))
    return piece


def _splice_torch(
    inputs_embeds: torch.Tensor, pieces: Sequence[_Piece], deepstack: torch.Tensor, *, per_token: bool
) -> torch.Tensor:
    """Copies one slice for each piece and level. Returns the visual tokens."""
    width = inputs_embeds.shape[1]
    if per_token:
        deepstack.zero_()
    num_copied = 0
    for rows, row, token, length in pieces:
        moved = rows[row : row + length].to(inputs_embeds.dtype)
        inputs_embeds[token : token + length] = moved[:, :width]
        first = token if per_token else num_copied
        for level in range(len(deepstack)):
            deepstack[level, first : first + length] = moved[:, (level + 1) * width : (level + 2) * width]
        num_copied += length
    return _upload(_row_table(pieces)[1], inputs_embeds.device)


def _splice_triton(
    inputs_embeds: torch.Tensor, pieces: Sequence[_Piece], deepstack: torch.Tensor, *, per_token: bool
) -> torch.Tensor:
    """Uses one launch for each dtype among the rows. Returns the visual tokens."""
    from lm_adapter.prefill.kernels.scatter_rows import scatter_rows_

    pieces = [_contiguous(piece) for piece in pieces]
    addresses, visual_tokens = _row_table(pieces)
    tokens, indices = visual_tokens, np.arange(len(visual_tokens))
    if per_token:
        is_text = np.ones(len(inputs_embeds), dtype=np.bool_)
        is_text[visual_tokens] = False
        text_tokens = np.flatnonzero(is_text)
        addresses = np.concatenate([addresses, np.full(len(text_tokens), _NO_ROW)])
        tokens = indices = np.concatenate([visual_tokens, text_tokens])
    tables = [np.stack([addresses, tokens, indices])]
    dtypes = sorted({piece.rows.dtype for piece in pieces}, key=str) or [inputs_embeds.dtype]
    if len(dtypes) > 1:
        dtype_of_row = np.zeros(len(tokens), dtype=np.int64)
        dtype_of_row[: len(visual_tokens)] = np.repeat(
            [dtypes.index(piece.rows.dtype) for piece in pieces], [piece.length for piece in pieces]
        )
        tables = [tables[0][:, dtype_of_row == number] for number in range(len(dtypes))]
    # One upload: the tables of all launches, then the visual tokens.
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
    """The piece with the elements of each row contiguous."""
    rows, row, _, length = piece
    if rows.stride(1) == 1 or rows.shape[1] == 1:
        return piece
    return piece._replace(rows=rows[row : row + length].contiguous(), row=0)


def _row_table(pieces: Sequence[_Piece]) -> npt.NDArray[np.int64]:
    """int64 [2, V]: the address of every row, and its token."""
    runs = []
    for rows, row, token, length in pieces:
        pitch = rows.stride(0) * rows.element_size()
        runs.append((rows.data_ptr() + row * pitch, pitch, token, length))
    starts, pitches, tokens, lengths = np.array(runs, dtype=np.int64).reshape(-1, 4).T
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    addresses = np.repeat(starts, lengths) + within * np.repeat(pitches, lengths)
    return np.stack([addresses, np.repeat(tokens, lengths) + within])


def _upload(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copies an array to the device. On CUDA the copy is asynchronous, from pinned memory; torch's host
    allocator does not reuse that memory before the copy is complete."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
