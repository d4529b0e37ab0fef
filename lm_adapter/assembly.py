"""From items to a request, and from a stream of raw events to validated rows. No I/O.

Owns what an Encode or Fetch call is apart from its transport: which items go out in which message, and the
assembly of the answer. Both clients feed it; so can a test, or an engine with a channel of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from lm_adapter import convert
from lm_adapter.checks import RowsHeader, check_digest, check_header, check_models
from lm_adapter.errors import InvalidRequest, InvalidRows, ItemFailed, StreamViolation, TruncatedStream
from lm_adapter.events import parsed
from lm_adapter.leases import LeaseRecord
from lm_adapter.transport.buffers import Bytes, RowsHandling
from lm_adapter.transport.host_shm import host_tensor
from lm_adapter.transport.inline import InlineRowsBuffer
from lm_adapter.transport.reading import TRANSPORT_UNAVAILABLE, Reading, Receiver, Unreadable
from lm_adapter.transport.wire import ChunkView
from lm_adapter.types import EncodedRows, Item, ModelInfo, Outcome
from vision_encoder.v1 import encoder_pb2 as pb

__all__ = [
    "Assembler",
    "Expected",
    "ItemBatch",
    "PreparedItems",
    "prepare_items",
    "within",
]

DEFAULT_MAX_ROWS_BYTES = 4 * 1024**3
_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED = 3, 8
# A request's own fields around its items; names are short, this is generous.
_REQUEST_OVERHEAD_BYTES = 1024
# An item's tag and length inside its request.
_ITEM_OVERHEAD_BYTES = 8

EventT = TypeVar("EventT")


@dataclass
class ItemBatch:
    """Items of one message. ``indices[i]`` is the caller's index of ``messages[i]``."""

    messages: list[pb.Item] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    num_bytes: int = _REQUEST_OVERHEAD_BYTES


@dataclass(frozen=True)
class PreparedItems:
    """Items as messages, in as many batches as the server's limits need. ``refused`` maps the caller's index
    of an item that cannot be sent to its failure."""

    batches: list[ItemBatch] = field(default_factory=list)
    refused: dict[int, ItemFailed] = field(default_factory=dict)


def prepare_items(
    items: Sequence[Item],
    *,
    max_message_bytes: int = 0,
    max_items: int = 0,
    shared: Mapping[int, pb.Item] | None = None,
) -> PreparedItems:
    """Items as messages, in order. An item that does not fit the wire, or is over the message limit all by
    itself, fails alone.

    max_message_bytes, max_items: the server's limits of one call; 0 means none. shared: messages of items
    whose content is in shared memory, by index.
    """
    prepared, shared = PreparedItems(), shared or {}
    for index, item in enumerate(items):
        try:
            message = shared[index] if index in shared else convert.item_message(item)
        except InvalidRequest as error:
            prepared.refused[index] = ItemFailed(error.message, reason=error.reason, status=_INVALID_ARGUMENT)
            continue
        num_bytes = message.ByteSize() + _ITEM_OVERHEAD_BYTES
        if max_message_bytes and num_bytes + _REQUEST_OVERHEAD_BYTES > max_message_bytes:
            prepared.refused[index] = ItemFailed(
                f"the item has {num_bytes} bytes on the wire, the server takes messages of "
                f"{max_message_bytes}",
                reason="MESSAGE_TOO_LARGE",
                status=_RESOURCE_EXHAUSTED,
                details={"found": num_bytes, "allowed": max_message_bytes},
            )
            continue
        batch = prepared.batches[-1] if prepared.batches else None
        if (
            batch is None
            or (max_items and len(batch.messages) >= max_items)
            or (max_message_bytes and batch.num_bytes + num_bytes > max_message_bytes)
        ):
            batch = ItemBatch()
            prepared.batches.append(batch)
        batch.messages.append(message)
        batch.indices.append(index)
        batch.num_bytes += num_bytes
    return prepared


def within(positions: Sequence[int], sizes: Mapping[int, int], max_message_bytes: int) -> list[Sequence[int]]:
    """The positions in portions that fit into one message each; 0: all in one."""
    portions: list[list[int]] = []
    left = 0
    for position in positions:
        needed = sizes[position] + _ITEM_OVERHEAD_BYTES
        if not portions or (max_message_bytes and needed > left):
            portions.append([])
            left = max_message_bytes - _REQUEST_OVERHEAD_BYTES
        portions[-1].append(position)
        left -= needed
    return list(portions)


@dataclass(frozen=True)
class Expected:
    """What is known of one item's answer before it comes; None where nothing is."""

    key: bytes | None = None
    content_digest: bytes | None = None


@dataclass
class _Arriving:
    """An item between its result and its last chunk."""

    result: pb.ItemResult
    header: RowsHeader
    buffer: InlineRowsBuffer
    out: Bytes | None


class Assembler:
    """Puts items together from the raw ItemEvents of one call.

    Whatever breaks a rule fails its own item with InvalidRows and its neighbours go on; a message that
    belongs to no item, or that comes for an item already handed out, raises StreamViolation.
    """

    def __init__(
        self,
        expected: Sequence[Expected],
        *,
        models: Sequence[ModelInfo] = (),
        max_rows_bytes: int = DEFAULT_MAX_ROWS_BYTES,
        receiver: Receiver | None = None,
    ) -> None:
        """expected: one per item of the call, in its order. models: the geometries that rows may have; none
        means that results are held to their own figures alone. max_rows_bytes: bound of one item. receiver:
        how rows are taken; without one, inline and into memory of their own."""
        self._receiver = receiver or Receiver(RowsHandling(), range(len(expected)))
        self._expected = expected
        self._models = models
        self._max_rows_bytes = max_rows_bytes
        self._arriving: dict[int, _Arriving] = {}
        # True: handed out whole. False: failed here, the rest of its events are let pass.
        self._finished: dict[int, bool] = {}
        self.again: dict[int, bool] = {}
        """Items without an outcome that are to be asked for once more: whether only their lease was stale."""
        self.num_shared = 0
        """Items whose rows were read out of shared memory."""
        self.refusal = ""
        """Why the first of the others that have to come inline could not be; empty where none has to."""
        self._lease_taken = False

    @property
    def num_items(self) -> int:
        return len(self._expected)

    @property
    def num_finished(self) -> int:
        return len(self._finished) - len(self.again)

    def missing(self) -> list[int]:
        """Indices of the items without an outcome."""
        return [index for index in range(self.num_items) if index not in self._finished]

    def feed(self, message: bytes) -> tuple[int, Outcome] | None:
        """Takes one serialised ItemEvent; returns the index and outcome of the item it finished, if any.

        Raises StreamViolation.
        """
        return self.feed_event(parsed(message))

    def feed_event(self, event: pb.ItemEvent | ChunkView) -> tuple[int, Outcome] | None:
        """``feed`` for an event that is parsed already."""
        if isinstance(event, ChunkView):
            return self._guarded(event.item_index, self._on_chunk, event)
        index = event.item_index
        match event.WhichOneof("event"):
            case "result":
                return self._on_leased_result(index, event.result)
            case "chunk":
                data = memoryview(event.chunk.data)
                return self._guarded(index, self._on_chunk, ChunkView(index, event.chunk.offset_bytes, data))
            case "failure":
                return self._guarded(index, self._on_failure, event)
            case _:
                return None  # an event newer than this adapter

    def finish(self) -> None:
        """The stream ended OK. Raises TruncatedStream when items are without an outcome."""
        missing = self.missing()
        if missing:
            raise TruncatedStream(
                f"the stream ended with {self.num_finished} of {self.num_items} items; missing: "
                f"{', '.join(map(str, missing[:16]))}{', ...' if len(missing) > 16 else ''}",
                details={"num_items": self.num_items, "num_arrived": self.num_finished},
            )

    def _guarded(
        self, index: int, step: Callable[[int, EventT], Outcome | None], event: EventT
    ) -> tuple[int, Outcome] | None:
        if index >= self.num_items:
            raise StreamViolation(f"an event is for item {index}, the call has {self.num_items} items")
        if index in self._finished:
            if self._finished[index]:
                raise StreamViolation(f"an event came for item {index}, which had been answered in full")
            return None
        whole = False
        try:
            outcome = step(index, event)
            whole = True
        except ItemFailed as error:
            outcome = error
        except Unreadable as error:
            if self._receiver.may_ask_again(stale=error.stale):
                self._note_refusal(error)
                self.again[index] = error.stale
                self._finished[index] = False
                return None
            outcome = error.as_failure()
        if outcome is None:
            return None
        self._arriving.pop(index, None)
        self._finished[index] = whole
        return index, outcome

    def ask_again(self, why: str) -> bool:
        """The call was refused for its way of delivery: whether what is missing is asked for once more."""
        if not self._receiver.may_ask_again(stale=False):
            return False
        self._note_refusal(Unreadable(why, stale=False))
        for index in self.missing():
            self.again[index] = self._finished[index] = False
        return True

    def ask_item_again(self, index: int) -> None:
        """This item's failure was of the way its pixels went alone: it has no outcome yet."""
        self.again[index] = self._finished[index] = False

    def _note_refusal(self, error: Unreadable) -> None:
        if not error.stale and not self.refusal:
            self.refusal = error.message

    def _on_leased_result(self, index: int, result: pb.ItemResult) -> tuple[int, Outcome] | None:
        """A lease that came with a result whose rows are not even looked for goes back at once."""
        self._lease_taken = False
        try:
            return self._guarded(index, self._on_result, result)
        finally:
            if not self._lease_taken:
                self._receiver.give_back_unheard(_lease_id(result), own=True)

    def _on_failure(self, _index: int, event: pb.ItemEvent) -> ItemFailed:
        message = event.failure
        is_of_rows = message.reason == TRANSPORT_UNAVAILABLE and "pixels" not in message.details
        if is_of_rows and self._receiver.may_ask_again(stale=False):
            raise Unreadable(message.message, stale=False)
        return convert.item_failed(message)

    def _on_result(self, index: int, result: pb.ItemResult) -> Outcome | None:
        if index in self._arriving:
            raise InvalidRows("result", "a second result came for one item", found=2, expected=1)
        header = RowsHeader(
            convert.grid(result.grid_thw),
            result.num_rows,
            result.width,
            convert.dtype_name(result.dtype),
            result.num_deepstack_levels,
            result.rows_bytes,
            convert.chunk_grids(result),
        )
        expected = self._expected[index]
        check_digest("key", result.key, expected.key)
        check_digest("content_digest", result.content_digest, expected.content_digest)
        check_models(header, self._models)
        check_header(header)
        delivery = result.WhichOneof("rows")
        if delivery != "inline" and (delivery is None or self._receiver.transport is None):
            raise InvalidRows(
                "delivery", f"rows come as {delivery}, expected inline", found=delivery, expected="inline"
            )
        if header.rows_bytes > self._max_rows_bytes:
            raise InvalidRows(
                "rows_bytes",
                f"rows have {header.rows_bytes} bytes, this client takes {self._max_rows_bytes}",
                found=header.rows_bytes,
                expected=self._max_rows_bytes,
            )
        if delivery != "inline":
            return self._read_shared(index, result, header)
        num_chunks = result.inline.num_chunks
        if num_chunks < 1:
            raise InvalidRows(
                "num_chunks", "0 rows chunks announced, expected at least 1", found=0, expected=1
            )
        out = self._receiver.out_of(index, header.rows_bytes)
        on_host = out if isinstance(out, np.ndarray) else None
        buffer = InlineRowsBuffer(header.rows_bytes, num_chunks, on_host)
        self._arriving[index] = _Arriving(result, header, buffer, out)
        return None

    def _read_shared(self, index: int, result: pb.ItemResult, header: RowsHeader) -> EncodedRows:
        """Raises InvalidRows, ItemFailed, Unreadable."""
        record = self._record(result, header)
        if record.transport == "device":
            lease = result.lease
            said = (tuple(lease.shape), convert.dtype_name(lease.dtype))
            expected = ((header.num_rows, header.width), header.dtype)
            if said != expected:
                raise InvalidRows(
                    "shape",
                    f"the lease is of {said}, the result of {expected}",
                    found=said,
                    expected=expected,
                )
        self._lease_taken = True
        try:
            payload, reading = self._receiver.read(index, record)
        except BaseException:
            self._receiver.give_back_unheard(record.lease_id, own=False)
            raise
        self.num_shared += 1
        return self._encoded_rows(result, header, payload, reading, record)

    def _on_chunk(self, index: int, chunk: ChunkView) -> Outcome | None:
        arriving = self._arriving.get(index)
        if arriving is None:
            raise InvalidRows(
                "result", "a rows chunk came before its result", found="chunk", expected="result"
            )
        arriving.buffer.write(chunk.offset_bytes, chunk.data)
        if (tell := self._receiver.handling.on_rows) is not None:
            rows = self._encoded_rows(arriving.result, arriving.header, arriving.buffer.payload, None)
            num_ready = arriving.buffer.num_bytes * rows.num_rows // rows.num_bytes
            tell(self._receiver.indices[index], rows, num_ready)
        if not arriving.buffer.complete:
            return None
        payload: Bytes = arriving.buffer.payload
        if arriving.out is not None and not isinstance(arriving.out, np.ndarray):
            arriving.out.copy_(host_tensor(arriving.buffer.payload))
            payload = arriving.out
        return self._encoded_rows(arriving.result, arriving.header, payload, None)

    def _encoded_rows(
        self,
        result: pb.ItemResult,
        header: RowsHeader,
        payload: Bytes,
        reading: Reading | None,
        record: LeaseRecord | None = None,
    ) -> EncodedRows:
        is_for_others = self._receiver.handling.num_readers > 1
        return EncodedRows(
            key=result.key,
            content_digest=result.content_digest,
            grid_thw=header.grid_thw,
            num_rows=header.num_rows,
            width=header.width,
            dtype=header.dtype,
            num_deepstack_levels=header.num_deepstack_levels,
            payload=payload,
            tier=convert.tier(result.tier),
            timings=convert.timings(result.timings),
            timestamps_s=tuple(result.timestamps_s),
            chunk_grids=header.chunk_grids,
            shared=(record or self._record(result, header)) if is_for_others else None,
            reading=reading,
        )

    def _record(self, result: pb.ItemResult, header: RowsHeader) -> LeaseRecord:
        return convert.lease_record(
            result, header, self._receiver.handling.num_readers, self._receiver.owner_id
        )


def _lease_id(result: pb.ItemResult) -> bytes:
    """Empty for rows that come inline."""
    return result.host.lease_id or result.lease.lease_id
