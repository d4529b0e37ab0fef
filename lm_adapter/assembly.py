"""Builds encode requests from items, and validated rows from the events of an Encode or Fetch stream. No I/O.

Owns the batches of items that fit one message each, and the state of a stream: which items have an outcome,
which rows are arriving in chunks, and which rows the caller still has to copy from shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from lm_adapter import convert
from lm_adapter.checks import RowsHeader, check_digest, check_header, check_models, expect
from lm_adapter.errors import InvalidRows, ItemFailed, StreamViolation, TruncatedStream
from lm_adapter.items import Item
from lm_adapter.types import EncodedRows, Limits, ModelInfo, Outcome
from vision_encoder.layout.varint import read_varint
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    import torch


DEFAULT_MAX_ROWS_BYTES = 4 * 1024**3
MAX_LISTED = 16
_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED = 3, 8
MAX_VARINT_BYTES = 5
# Tags (field number << 3 | wire type) of ItemEvent.item_index and chunk, RowsChunk.offset_bytes and data.
_INDEX_TAG, _CHUNK_TAG, _OFFSET_TAG, _DATA_TAG = 1 << 3, 3 << 3 | 2, 1 << 3, 2 << 3 | 2
# Upper bounds: the fields of a request other than its items; the tag and length of one item.
_REQUEST_OVERHEAD_BYTES = 1024
_ITEM_OVERHEAD_BYTES = 8


def prepare_items(
    items: Mapping[int, Item], limits: Limits
) -> tuple[list[dict[int, pb.Item]], dict[int, ItemFailed]]:
    """Converts items to messages, batched by the server's limits for one request.

    items: by the caller's index. Returns the batches in order, each a map from index to message, and the
    items that cannot be sent: those that the wire format cannot carry, and those larger than the message
    limit. Such an item fails alone."""
    max_message_bytes = limits.max_message_bytes or math.inf
    batches: list[dict[int, pb.Item]] = []
    refused: dict[int, ItemFailed] = {}
    batch: dict[int, pb.Item] = {}
    batch_bytes = 0
    for index, item in items.items():
        try:
            message = convert.item_message(item)
        except ValueError as error:
            refused[index] = ItemFailed(
                f"the item cannot be sent: {error}", reason="INVALID_REQUEST", status=_INVALID_ARGUMENT
            )
            continue
        num_bytes = message.ByteSize() + _ITEM_OVERHEAD_BYTES
        if num_bytes + _REQUEST_OVERHEAD_BYTES > max_message_bytes:
            refused[index] = ItemFailed(
                f"the item has {num_bytes} bytes on the wire, the server takes messages of "
                f"{max_message_bytes}",
                reason="MESSAGE_TOO_LARGE",
                status=_RESOURCE_EXHAUSTED,
                details={"found": num_bytes, "allowed": max_message_bytes},
            )
            continue
        batch_bytes += num_bytes
        is_full = len(batch) >= (limits.max_items_per_request or math.inf) or batch_bytes > max_message_bytes
        if not batch or is_full:
            batch, batch_bytes = {}, _REQUEST_OVERHEAD_BYTES + num_bytes
            batches.append(batch)
        batch[index] = message
    return batches, refused


class PlacedRows(NamedTuple):
    """An item whose rows are in shared memory. The caller copies them and passes the copy to ``rows``."""

    position: int
    place: pb.RowsPlace
    header: RowsHeader
    result: pb.ItemResult

    def rows(self, payload: npt.NDArray[np.uint8] | torch.Tensor, transport: str) -> EncodedRows:
        """The validated rows. payload: uint8 [header.num_bytes]. transport: whose memory it was."""
        return _encoded_rows(self.result, self.header, payload, transport)


class RowsChunk(NamedTuple):
    """An event that carries a chunk of an item's rows. ``data`` may be a view of the message."""

    item_index: int
    offset_bytes: int
    data: bytes | memoryview


class _ChunkedRows:
    """The buffer for rows that arrive in chunks, ordered by offset and without gaps."""

    def __init__(self, result: pb.ItemResult, header: RowsHeader) -> None:
        self.result = result
        self.header = header
        self.payload: npt.NDArray[np.uint8] = np.empty(header.num_bytes, dtype=np.uint8)
        self._view = self.payload.data
        self._num_arrived = 0
        self._end_bytes = 0

    def write(self, chunk: RowsChunk) -> bool:
        """Copies one chunk and returns whether the rows are complete. Raises InvalidRows if the chunk is out
        of order, exceeds the buffer or the number of chunks, or is the last one and leaves a gap."""
        _, offset_bytes, data = chunk
        rows_bytes, num_chunks = len(self._view), self.result.inline.num_chunks
        end_bytes = offset_bytes + len(data)
        self._num_arrived += 1
        is_last = self._num_arrived == num_chunks
        for name, found, expected, is_wrong in (
            ("chunk_offset", offset_bytes, self._end_bytes, offset_bytes != self._end_bytes),
            ("chunk_range", end_bytes, rows_bytes, end_bytes > rows_bytes),
            ("num_chunks", self._num_arrived, num_chunks, self._num_arrived > num_chunks),
            ("rows_bytes", end_bytes, rows_bytes, is_last and end_bytes != rows_bytes),
        ):
            if is_wrong:
                raise InvalidRows(
                    name,
                    f"rows chunk {self._num_arrived} of {num_chunks} has bytes {offset_bytes} to "
                    f"{end_bytes} of {rows_bytes}: {name} is {found}, expected {expected}",
                    found=found,
                    expected=expected,
                )
        self._view[offset_bytes:end_bytes] = data
        self._end_bytes = end_bytes
        return is_last


class Assembler:
    """Assembles the items of one call from its serialised ItemEvents.

    An invalid event fails its own item with InvalidRows; the other items continue. An event for an item that
    is not in the call, or that was already complete, raises StreamViolation.
    """

    def __init__(
        self,
        digests: Sequence[bytes | None],
        *,
        keys: Sequence[bytes] = (),
        models: Sequence[ModelInfo] = (),
        max_rows_bytes: int = DEFAULT_MAX_ROWS_BYTES,
        allows_places: bool = False,
    ) -> None:
        """digests: of each item, None where unknown. keys: of each item, empty if unknown. models: the
        geometries that rows may have; if empty, results are only checked for consistency. max_rows_bytes:
        limit for one item. allows_places: whether rows may be delivered in shared memory."""
        self._digests = digests
        self._keys = keys
        self._models = models
        self._max_rows_bytes = max_rows_bytes
        self._allows_places = allows_places
        self._arriving: dict[int, _ChunkedRows] = {}
        # True: complete. False: failed in this process; later events of the item are ignored.
        self._finished: dict[int, bool] = {}

    def feed(self, message: bytes) -> tuple[int, Outcome] | PlacedRows | None:
        """Takes one serialised ItemEvent. Returns the position and outcome of an item that this event
        completes, or the rows to copy from shared memory, or None. Raises StreamViolation."""
        event = _read_event(message)
        position = event.item_index
        if isinstance(event, pb.ItemEvent) and event.WhichOneof("event") is None:
            return None  # an event of a newer protocol
        if position >= len(self._digests):
            raise StreamViolation(f"an event is for item {position}, the call has {len(self._digests)} items")
        if position in self._finished:
            if self._finished[position]:
                raise StreamViolation(f"an event came for item {position}, which was complete")
            return None
        outcome: Outcome | PlacedRows | None
        try:
            if isinstance(event, RowsChunk):
                outcome = self._on_chunk(event)
            elif event.HasField("failure"):
                outcome = convert.item_failed(event.failure)
            else:
                outcome = self._on_result(position, event.result)
        except ItemFailed as error:
            self._finish(position, is_complete=False)
            return position, error
        if outcome is None:
            return None
        self._finish(position, is_complete=True)
        return outcome if isinstance(outcome, PlacedRows) else (position, outcome)

    def finish(self) -> None:
        """Called when the stream ended with OK. Raises TruncatedStream if any item has no outcome."""
        num_items = len(self._digests)
        missing = [position for position in range(num_items) if position not in self._finished]
        if missing:
            raise TruncatedStream(
                f"the stream ended with {num_items - len(missing)} of {num_items} items; missing: "
                f"{', '.join(map(str, missing[:MAX_LISTED]))}{', ...' if len(missing) > MAX_LISTED else ''}",
                details={"num_items": num_items, "num_arrived": num_items - len(missing)},
            )

    def _finish(self, position: int, *, is_complete: bool) -> None:
        self._arriving.pop(position, None)
        self._finished[position] = is_complete

    def _on_result(self, position: int, result: pb.ItemResult) -> PlacedRows | None:
        if position in self._arriving:
            raise InvalidRows("result", "a second result came for one item", found=2, expected=1)
        header = RowsHeader(
            convert.grid(result.grid_thw),
            result.num_rows,
            result.width,
            convert.dtype_name(result.dtype),
            result.num_deepstack_levels,
            result.rows_bytes,
            tuple([convert.grid(chunk) for chunk in result.chunk_grids]),
        )
        check_digest("key", result.key, self._keys[position] if self._keys else None)
        check_digest("content_digest", result.content_digest, self._digests[position])
        check_models(header, self._models)
        check_header(header)
        if header.num_bytes > self._max_rows_bytes:
            raise InvalidRows(
                "rows_bytes",
                f"rows have {header.num_bytes} bytes, this client takes {self._max_rows_bytes}",
                found=header.num_bytes,
                expected=self._max_rows_bytes,
            )
        delivery = result.WhichOneof("rows")
        if delivery == "place" and self._allows_places:
            return PlacedRows(position, result.place, header, result)
        expect("delivery", delivery, "inline")
        if not result.inline.num_chunks:
            raise InvalidRows(
                "num_chunks", "0 rows chunks announced, expected at least 1", found=0, expected=1
            )
        try:
            self._arriving[position] = _ChunkedRows(result, header)
        except MemoryError as error:
            raise out_of_memory(header.num_bytes) from error
        return None

    def _on_chunk(self, chunk: RowsChunk) -> EncodedRows | None:
        arriving = self._arriving.get(chunk.item_index)
        if arriving is None:
            raise InvalidRows(
                "result", "a rows chunk came before its result", found="chunk", expected="result"
            )
        if not arriving.write(chunk):
            return None
        return _encoded_rows(arriving.result, arriving.header, arriving.payload, "inline")


def out_of_memory(num_bytes: int) -> ItemFailed:
    return ItemFailed(
        f"this process has no memory for {num_bytes} bytes of rows",
        reason="OUT_OF_MEMORY",
        status=_RESOURCE_EXHAUSTED,
        details={"needed": num_bytes},
    )


def _read_event(message: bytes) -> RowsChunk | pb.ItemEvent:
    """Parses an ItemEvent. An event with a chunk is returned as RowsChunk. Raises StreamViolation."""
    chunk = read_chunk(message)
    if chunk is not None:
        return chunk
    try:
        event = pb.ItemEvent.FromString(message)
    except DecodeError as error:
        raise StreamViolation(f"a message of {len(message)} bytes is not an ItemEvent: {error}") from error
    if event.HasField("chunk"):
        return RowsChunk(event.item_index, event.chunk.offset_bytes, event.chunk.data)
    return event


def read_chunk(message: bytes) -> RowsChunk | None:
    """Reads an ItemEvent that has a chunk, without copying the chunk. Fields must be in protobuf's canonical
    order. None for any other message, including malformed ones, which the protobuf parser then handles."""
    try:
        item_index, at = _field(message, 0, _INDEX_TAG)
        event_bytes, at = _field(message, at, _CHUNK_TAG)
        event_end = at + event_bytes
        offset_bytes, at = _field(message, at, _OFFSET_TAG)
        data_bytes, at = _field(message, at, _DATA_TAG)
    except (IndexError, ValueError):
        return None
    if not data_bytes or not at + data_bytes == event_end == len(message) or item_index >= 1 << 32:
        return None
    return RowsChunk(item_index, offset_bytes, memoryview(message)[at:])


def _field(message: bytes, at: int, tag: int) -> tuple[int, int]:
    """The varint after ``tag`` and the offset of the next field; (0, at) if another field starts at ``at``.
    Raises IndexError at the end of the message, ValueError for a varint of more than MAX_VARINT_BYTES."""
    return read_varint(message, at + 1, MAX_VARINT_BYTES) if message[at] == tag else (0, at)


def _encoded_rows(
    result: pb.ItemResult,
    header: RowsHeader,
    payload: npt.NDArray[np.uint8] | torch.Tensor,
    transport: str,
) -> EncodedRows:
    return header.rows(
        payload,
        key=result.key,
        content_digest=result.content_digest,
        tier=convert.tier(result.tier),
        timings=convert.timings(result.timings),
        timestamps_s=tuple(result.timestamps_s),
        transport=transport,
    )
