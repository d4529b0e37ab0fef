"""One RPC of a caller's call, with what it takes to read its answer and to ask again for what did not come.

Owns requests that ask for rows: their way of delivery, the events of their stream, the call that follows
where rows could not be read out of shared memory. Which calls a list of items needs is ``session``'s. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import grpc

from lm_adapter import convert
from lm_adapter.assembly import Assembler, Expected, within
from lm_adapter.errors import CallFailed, InvalidRows, ItemFailed, StreamViolation
from lm_adapter.events import shared_rows_bytes
from lm_adapter.trace_context import with_trace
from lm_adapter.transport.pixel_choice import NO_PIXELS, CallPixels
from lm_adapter.transport.reading import MAX_SHARED_ATTEMPTS, TRANSPORT_UNAVAILABLE, Receiver
from lm_adapter.transport.wire import ChunkView
from lm_adapter.types import Item, ModelInfo, Outcome, PrefetchStatus
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from lm_adapter.session import Session

__all__ = [
    "EncodePlan",
    "Metadata",
    "PrefetchCall",
    "PrefetchPlan",
    "RowsCall",
    "digest_metadata",
    "rows_call",
]

DIGEST_HEADER = "x-content-digest"
"""Hex digest of a call's only item, for ring-hash load balancing."""
Metadata: TypeAlias = tuple[tuple[str, str], ...]
_DELIVERIES: dict[str, pb.Delivery.ValueType] = {
    "host": pb.DELIVERY_HOST_SHM,
    "device": pb.DELIVERY_DEVICE_LEASE,
}


class EncodePlan(NamedTuple):
    """``refused`` holds the items that are never sent; the calls follow one another."""

    refused: dict[int, ItemFailed]
    calls: list[RowsCall]


@dataclass
class RowsCall:
    """One Encode or Fetch. num_before of the caller's num_items have their outcome when it starts."""

    session: Session
    method: str
    request: pb.EncodeRequest | pb.FetchRequest
    metadata: Metadata
    expected: Sequence[Expected]
    models: Sequence[ModelInfo]
    receiver: Receiver
    assembler: Assembler
    num_before: int
    num_items: int
    pixels: CallPixels = NO_PIXELS
    later: list[RowsCall] = field(default_factory=list)
    """What follows after the follow-up."""

    @property
    def calls_path(self) -> str:
        """Of the socket at which it may go without gRPC; empty for gRPC: so it is for inline rows."""
        return "" if self.receiver.transport is None else self.receiver.transport.calls_path

    def feed(self, event: pb.ItemEvent | ChunkView) -> tuple[int, Outcome] | None:
        """The caller's index and outcome of the item that this event finished. Raises StreamViolation."""
        finished = self.assembler.feed_event(event)
        if finished is None:
            return None
        index, outcome = finished
        caller_index = self.receiver.indices[index]
        if self.pixels.refused(caller_index, outcome):
            self.assembler.ask_item_again(index)
            return None
        self.pixels.done(caller_index, consumed=not isinstance(outcome, ItemFailed))
        if isinstance(outcome, InvalidRows):
            # The geometry may be that of a server since replaced.
            self.session.forget_info()
        return caller_index, outcome

    def copied_bytes(self, event: pb.ItemEvent | ChunkView) -> int:
        """What feeding this event copies out of shared memory; 0 for rows that are borrowed or inline."""
        if self.receiver.transport is None or self.receiver.handling.borrow:
            return 0
        return shared_rows_bytes(event)

    def finish(self, trailers: Iterable[tuple[str, str | bytes]] | None) -> None:
        """The stream ended OK, with this metadata. Raises TruncatedStream."""
        self.session.note_server(trailers)
        self.assembler.finish()

    def failed(self, error: grpc.RpcError, *, closed: bool) -> CallFailed:
        return self.session.failed(
            error,
            self.method,
            closed=closed,
            num_items=self.num_items,
            num_arrived=self.num_before + self.assembler.num_finished,
        )

    def absorbs(self, failure: CallFailed) -> bool:
        """Whether a failure is of the way of delivery alone, and ``follow_up`` asks again in another."""
        return failure.reason == TRANSPORT_UNAVAILABLE and self.assembler.ask_again(failure.message)

    def follow_up(self) -> RowsCall | None:
        """The call for the items that are to be asked for once more: in the same way while all that was
        wrong were stale leases and attempts are left, then inline. Their pixels go inline: segments are read
        once. That may take several messages."""
        again = self.assembler.again
        last, session = self.receiver, self.session
        if last.transport is not None:
            last.transport.note(self.assembler.num_shared, self.assembler.refusal)
        if not again:
            return self._first_of(self.later)
        transport = None
        if all(again.values()) and last.attempt < MAX_SHARED_ATTEMPTS:
            transport = session.transports.current()
        if transport is None and not last.inline_allowed:
            transport = last.transport
        calls = [
            rows_call(
                session,
                self.method,
                request,
                metadata=self.metadata,
                expected=[self.expected[position] for position in positions],
                models=self.models,
                receiver=Receiver(
                    last.handling,
                    [last.indices[position] for position in positions],
                    transport,
                    last.inline_allowed,
                    last.attempt + 1,
                ),
                num_before=self.num_before + self.assembler.num_finished,
                num_items=self.num_items,
            )
            for positions, request in self._requests_again(sorted(again))
        ]
        return self._first_of(calls + self.later)

    def _requests_again(
        self, positions: Sequence[int]
    ) -> list[tuple[Sequence[int], pb.EncodeRequest | pb.FetchRequest]]:
        """Requests for some of the items, and which those are."""
        if isinstance(self.request, pb.FetchRequest) or not self.pixels.messages:
            return [(positions, _only(self.request, positions))]
        indices = self.receiver.indices
        for position in positions:
            item = self.request.items[position]
            item.CopyFrom(self.pixels.inlined(indices[position], item))
        sizes = {position: self.request.items[position].ByteSize() for position in positions}
        return [
            (portion, _only(self.request, portion))
            for portion in within(positions, sizes, self.pixels.max_message_bytes)
        ]

    def _first_of(self, calls: list[RowsCall]) -> RowsCall | None:
        if not calls:
            return None
        first, *first.later = calls
        return first


def rows_call(
    session: Session,
    method: str,
    request: pb.EncodeRequest | pb.FetchRequest,
    *,
    metadata: Metadata,
    expected: Sequence[Expected],
    models: Sequence[ModelInfo],
    receiver: Receiver,
    num_before: int,
    num_items: int,
    pixels: CallPixels = NO_PIXELS,
) -> RowsCall:
    """The call, its way of delivery put into the request."""
    transport = receiver.transport
    if transport is None:
        request.delivery = pb.DELIVERY_INLINE
        request.ClearField("lease")
    else:
        request.delivery = _DELIVERIES[transport.name]
        request.lease.owner_id = transport.owner_id
        request.lease.num_readers = receiver.handling.num_readers
        request.lease.lease_ms = transport.lease_ms
    assembler = Assembler(expected, models=models, max_rows_bytes=session.max_rows_bytes, receiver=receiver)
    return RowsCall(
        session,
        method,
        request,
        with_trace(metadata),
        expected,
        models,
        receiver,
        assembler,
        num_before,
        num_items,
        pixels,
    )


def _only(
    request: pb.EncodeRequest | pb.FetchRequest, positions: Sequence[int]
) -> pb.EncodeRequest | pb.FetchRequest:
    """The same request for some of its items or keys."""
    if isinstance(request, pb.FetchRequest):
        return pb.FetchRequest(
            keys=[request.keys[position] for position in positions], namespace=request.namespace
        )
    return pb.EncodeRequest(
        items=[request.items[position] for position in positions],
        namespace=request.namespace,
        model=request.model,
        priority=request.priority,
    )


@dataclass
class PrefetchCall:
    """One Prefetch of the caller's items ``indices``."""

    request: pb.PrefetchRequest
    metadata: Metadata
    indices: list[int]
    pixels: CallPixels = NO_PIXELS
    refused: list[int] = field(default_factory=list)
    """Positions of items whose pixels were not taken in the way they went."""

    def __post_init__(self) -> None:
        self.metadata = with_trace(self.metadata)

    def read(self, response: pb.PrefetchResponse) -> dict[int, PrefetchStatus | ItemFailed]:
        """Statuses by the caller's index, but for those of ``follow_ups``. Raises StreamViolation."""
        statuses = response.statuses
        if len(statuses) != len(self.indices):
            raise StreamViolation(
                f"Prefetch answered for {len(statuses)} items, {len(self.indices)} were sent"
            )
        read: dict[int, PrefetchStatus | ItemFailed] = {}
        for position, (index, message) in enumerate(zip(self.indices, statuses, strict=True)):
            status = convert.prefetch_status(message)
            if self.pixels.refused(index, status):
                self.refused.append(position)
                continue
            read[index] = status
            self.pixels.done(index, consumed=not isinstance(status, ItemFailed))
        return read

    def follow_ups(self) -> list[PrefetchCall]:
        """The calls for what was refused, inline."""
        request, indices = self.request, self.indices
        messages = {
            position: self.pixels.inlined(indices[position], request.items[position])
            for position in self.refused
        }
        sizes = {position: message.ByteSize() for position, message in messages.items()}
        return [
            PrefetchCall(
                pb.PrefetchRequest(
                    items=[messages[position] for position in portion],
                    namespace=request.namespace,
                    model=request.model,
                    priority=request.priority,
                ),
                self.metadata,
                [indices[position] for position in portion],
            )
            for portion in within(self.refused, sizes, self.pixels.max_message_bytes)
        ]


class PrefetchPlan(NamedTuple):
    """As ``EncodePlan``."""

    refused: dict[int, ItemFailed]
    calls: list[PrefetchCall]


def digest_metadata(items: Sequence[Item]) -> Metadata:
    """The routing header of a call with one item whose digest is known; none for any other call."""
    if len(items) == 1 and items[0].digest:
        return ((DIGEST_HEADER, items[0].digest.hex()),)
    return ()
