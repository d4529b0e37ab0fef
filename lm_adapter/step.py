"""Rows of a whole prefill step: several requests' chunks, main level and deepstack levels, in one launch.

Owns the step's table of where each row comes from and goes to, its way to the device, and the torch version.
Rows, spans and checks are each request's ``Splicer``'s; the copy itself is ``kernels.scatter_rows``. torch is
imported where tensors are made.

Nothing waits for the device: the table is made on the host from what the host knows, travels from pinned
memory in the current stream, and holds the addresses of the rows, which stay where they are, be that torch's
memory or an arena mapped from another process. Rows of host memory are sent ahead of it.

Shape legend: T tokens of a step, V visual tokens of it, D LM width, L deepstack levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest
from lm_adapter.rotary import Backend, choose_backend
from lm_adapter.splice import RowsPiece, Splicer

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT_BYTES", "StepChunk", "StepSplice", "copy_pieces", "row_table", "splice_step"]

ALIGNMENT_BYTES = 16
"""Of every row's address, for the kernel's widest loads."""

_TEXT = 0
"""The address that stands for no row."""


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


def splice_step(
    inputs_embeds_TD: torch.Tensor,
    chunks: Sequence[StepChunk],
    *,
    deepstack_LTD: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> StepSplice:
    """Writes the main level of every chunk's visual tokens into ``inputs_embeds_TD`` in place and gathers or
    fills the deepstack levels.

    inputs_embeds_TD: [T, D]; the chunks' tokens come first, T may be larger where a graph's batch is padded.
    deepstack_LTD: a buffer that the model adds to all tokens, text and padding included, as captured graphs
    need it; it is written whole. backend: "auto" takes the kernel on CUDA where Triton is installed.
    Raises InvalidRequest, before anything is written, when chunks, shapes or dtypes disagree, and as
    ``Splicer.pieces``.
    """
    import torch

    pieces = _pieces(inputs_embeds_TD, chunks)
    num_visual = sum(piece.length for piece in pieces)
    width = inputs_embeds_TD.shape[1]
    num_levels = chunks[0].splicer.layout.num_deepstack_levels if chunks else 0
    per_token = deepstack_LTD is not None
    if deepstack_LTD is None:
        deepstack = inputs_embeds_TD.new_empty((num_levels, num_visual, width))
    else:
        deepstack = deepstack_LTD
        needed = (num_levels if chunks else deepstack.shape[0], *inputs_embeds_TD.shape)
        if tuple(deepstack.shape) != needed or deepstack.dtype != inputs_embeds_TD.dtype:
            raise InvalidRequest(
                f"the deepstack buffer is {deepstack.dtype} {list(deepstack.shape)}, needs "
                f"{inputs_embeds_TD.dtype} {list(needed)}"
            )
    with torch.no_grad():
        if choose_backend(backend, inputs_embeds_TD) == "triton":
            visual_tokens = _splice_triton(inputs_embeds_TD, pieces, deepstack, per_token=per_token)
        else:
            copy_pieces(inputs_embeds_TD, pieces, deepstack, per_token=per_token)
            visual_tokens = _upload(_tokens(pieces), inputs_embeds_TD.device)
    return StepSplice(num_visual, visual_tokens, deepstack)


def _pieces(inputs_embeds: torch.Tensor, chunks: Sequence[StepChunk]) -> list[RowsPiece]:
    """All chunks' pieces, with tokens counted in the step."""
    pieces: list[RowsPiece] = []
    offset = 0
    for request, (splicer, start, num_tokens) in enumerate(chunks):
        splicer.require_embeds(inputs_embeds)
        if num_tokens < 0:
            raise InvalidRequest(f"request {request} has {num_tokens} tokens in the step, needs 0 or more")
        if splicer.layout.width != chunks[0].splicer.layout.width:
            raise InvalidRequest(
                f"request {request} has rows of width {splicer.layout.width}, request 0 of "
                f"{chunks[0].splicer.layout.width}; a step is one model's"
            )
        pieces += [
            piece._replace(token=piece.token + offset) for piece in splicer.pieces(start, start + num_tokens)
        ]
        offset += num_tokens
    if offset > inputs_embeds.shape[0]:
        raise InvalidRequest(
            f"the step's requests have {offset} tokens, inputs_embeds has {inputs_embeds.shape[0]}"
        )
    return pieces


def _tokens(pieces: Sequence[RowsPiece]) -> npt.NDArray[np.int64]:
    ranges = [np.arange(piece.token, piece.token + piece.length, dtype=np.int64) for piece in pieces]
    return np.concatenate([np.zeros(0, dtype=np.int64), *ranges])


def _upload(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """On CUDA out of pinned memory, whose owner, torch's host allocator, waits for the copy before it gives
    the memory out again; the host does not."""
    import torch

    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_pieces(
    inputs_embeds: torch.Tensor, pieces: Sequence[RowsPiece], deepstack: torch.Tensor, *, per_token: bool
) -> None:
    """The torch version of the copy: a slice for each piece and level, no table."""
    width = inputs_embeds.shape[1]
    if per_token:
        deepstack.zero_()
    place = 0
    for rows, token, length in pieces:
        moved = _sent(rows, inputs_embeds.device).to(inputs_embeds.dtype)
        inputs_embeds[token : token + length] = moved[:, :width]
        first = token if per_token else place
        for level in range(len(deepstack)):
            deepstack[level, first : first + length] = moved[:, (level + 1) * width : (level + 2) * width]
        place += length


def _splice_triton(
    inputs_embeds: torch.Tensor, pieces: Sequence[RowsPiece], deepstack: torch.Tensor, *, per_token: bool
) -> torch.Tensor:
    """One launch, and for each further dtype among the rows another. Returns the visual tokens."""
    from lm_adapter.kernels.scatter_rows import scatter_rows_

    resident = [piece._replace(rows=_resident(piece.rows, inputs_embeds.device)) for piece in pieces]
    tokens = _tokens(resident)
    text_tokens = None
    if per_token:
        is_text = np.ones(len(inputs_embeds), dtype=np.bool_)
        is_text[tokens] = False
        text_tokens = np.flatnonzero(is_text)
    dtypes = sorted({piece.rows.dtype for piece in resident}, key=str) or [inputs_embeds.dtype]
    tables = []
    for dtype in dtypes:
        table = row_table([piece for piece in resident if piece.rows.dtype == dtype], text_tokens)
        if not per_token:
            table[2] = np.searchsorted(tokens, table[1])
        tables.append(table)
        text_tokens = None  # zeroed once
    # One upload for all: the launches' tables side by side, then the visual tokens.
    uploaded = _upload(np.concatenate([*(table.ravel() for table in tables), tokens]), inputs_embeds.device)
    offset = 0
    for dtype, table in zip(dtypes, tables, strict=True):
        scatter_rows_(
            uploaded[offset : offset + table.size].view(table.shape),
            inputs_embeds,
            deepstack,
            rows_dtype=dtype,
            aligned=not (table[0] % ALIGNMENT_BYTES).any(),
        )
        offset += table.size
    return uploaded[offset:]


def _resident(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Rows on the device, each contiguous in itself."""
    import torch

    rows = _sent(rows, device)
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        rows = rows.contiguous()
    if rows.is_cuda:
        # Memory of another stream's: not given out again before this stream has read it.
        rows.record_stream(torch.cuda.current_stream(device))
    return rows


def _sent(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Rows on the device, or on their way there in the current stream. Those on the host go through pinned
    memory: a copy out of any other waits on the host until the stream has done what it was given before."""
    if device.type == "cuda" and rows.device.type == "cpu" and not rows.is_pinned():
        rows = rows.contiguous().pin_memory()
    return rows.to(device, non_blocking=True)


def row_table(
    pieces: Sequence[RowsPiece], text_tokens: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """int64 [3, entries]: address of the row, token it goes to, and its place in the deepstack levels, here
    the token. text_tokens: those whose levels are zeroed."""
    addresses = [
        piece.rows.data_ptr()
        + np.arange(piece.length, dtype=np.int64) * (piece.rows.stride(0) * piece.rows.element_size())
        for piece in pieces
    ]
    tokens = _tokens(pieces)
    if text_tokens is not None:
        addresses.append(np.full(len(text_tokens), _TEXT, dtype=np.int64))
        tokens = np.concatenate([tokens, text_tokens])
    return np.stack([np.concatenate([np.zeros(0, dtype=np.int64), *addresses]), tokens, tokens])
