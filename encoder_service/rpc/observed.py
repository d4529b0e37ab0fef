"""What operators learn of each call and item: request id, log lines, counts, spans, delivery times.

Owns the wrapping of handlers and the record of the call in progress. Leaves what calls do to ``servicer``,
spans to ``traces``, the form of lines to ``logs``. Each RPC runs in a task of its own, so the record is a
context variable that nobody takes back.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc
import structlog
from google.protobuf.message import Message

from encoder_service import traces
from encoder_service.logs import REQUEST_ID_KEY, bind_request, request_id_of
from encoder_service.metrics import Metrics
from encoder_service.pipeline import Delivered
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = structlog.get_logger(__name__)
Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

SERVER_TIMING_KEY = "server-timing"
INSTANCE_KEY = "x-instance-id"
# Messages repeat what callers sent.
MAX_LOGGED_MESSAGE = 300
STATUS_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}
UNSETTLED = -1
OUR_FAULT = frozenset(("INTERNAL", "DEVICE_FAULT"))


@dataclass
class Call:
    """One RPC. metadata: the caller's. instance_id: of this server's start. message_bytes: of its request, as
    it came. longest_delivery_s: of its items, from rows that were ready to rows that were read. is_reported:
    its failure as a whole has its line already."""

    method: str
    request_id: str
    started_s: float
    span: Span | None = None
    metadata: Metadata = ()
    instance_id: str = ""
    message_bytes: int = 0
    longest_delivery_s: float = 0.0
    is_reported: bool = False
    item_spans: dict[int, Span] = field(default_factory=dict)

    def num_bytes(self, request: Message) -> int:
        """Of the request's message: told by whoever received it, since protobuf counts all of it anew."""
        return self.message_bytes or request.ByteSize()

    def item(self, index: int, work: Coroutine[Any, Any, Delivered]) -> Coroutine[Any, Any, Delivered]:
        """The same work, under the item's span where there are spans."""
        span = traces.open_item(index)
        if span is None:
            return work
        self.item_spans[index] = span
        return _under(span, work)

    def failed(self, metrics: Metrics, failure: pb.ItemFailure, index: int | None = None) -> None:
        """One line and one count for an item that failed."""
        metrics.count_failure(failure.reason, turned_away=is_turned_away(failure))
        report = log.error if failure.reason in OUR_FAULT else log.warning
        report(
            "item failed",
            method=self.method,
            item=index,
            reason=failure.reason,
            error=failure.message[:MAX_LOGGED_MESSAGE],
        )
        span = None if index is None else self.item_spans.pop(index, None)
        if span is not None:
            traces.end_failed(span, failure.reason, failure.message)

    def refused(self, metrics: Metrics, failure: pb.ItemFailure, status: str) -> None:
        """One line and one count for a call that failed as a whole."""
        self.is_reported = True
        metrics.count_refusal(failure.reason, turned_away=is_turned_away(failure))
        log.warning(
            "call failed",
            method=self.method,
            status=status,
            reason=failure.reason,
            error=failure.message[:MAX_LOGGED_MESSAGE],
        )

    def delivered(
        self, metrics: Metrics, delivered: Delivered, index: int, transport: str, now_s: float
    ) -> None:
        """An item's rows have left the service, or its lease has. now_s: the pipeline's clock."""
        took_s = max(0.0, now_s - delivered.ready_s)
        self.longest_delivery_s = max(self.longest_delivery_s, took_s)
        metrics.count(metrics.deliveries, transport)
        metrics.stage_seconds.observe("delivery", took_s)
        span = self.item_spans.pop(index, None)
        if span is not None:
            encoded = delivered.encoded
            traces.end_item(
                span,
                delivered.timings,
                delivered.tier.value,
                encoded.grid,
                encoded.spec.num_rows,
                took_s,
            )

    def close(self, status: int) -> None:
        """The call is over; items that nobody waits for end with it."""
        for span in self.item_spans.values():
            traces.end_failed(span, "CANCELLED", "the call ended before the item")
        self.item_spans.clear()
        if self.span is not None:
            traces.end_call(self.span, status)

    def trailers(self) -> tuple[tuple[str, str], ...]:
        """What every call's trailing metadata says: its id, which start of the server answered, so that a
        client notices another one, and milliseconds in the form of the HTTP header Server-Timing."""
        call_ms = (time.monotonic() - self.started_s) * 1e3
        timing = f"call;dur={call_ms:.3f}"
        if self.longest_delivery_s:
            timing += f", delivery;dur={self.longest_delivery_s * 1e3:.3f}"
        return (
            (REQUEST_ID_KEY, self.request_id),
            (INSTANCE_KEY, self.instance_id),
            (SERVER_TIMING_KEY, timing),
        )


def is_turned_away(failure: pb.ItemFailure) -> bool:
    """Whether nothing was wrong with it but the moment."""
    return failure.retryable and failure.reason not in OUR_FAULT


_CALL: ContextVar[Call] = ContextVar("call")


def this_call(method: str = "") -> Call:
    """The record of the call that this task serves; a new one outside of any."""
    call = _CALL.get(None)
    return Call(method, "", time.monotonic()) if call is None else call


def observed(
    method: str, handler: Callable[[Request, Context], Awaitable[Response]], instance_id: str
) -> Callable[[Request, Context], Awaitable[Response]]:
    """The handler of a call of any kind, observed."""

    async def observe(request: Request, context: Context) -> Response:
        call, status = _open(method, context, instance_id), UNSETTLED
        try:
            response = await handler(request, context)
            context.set_trailing_metadata(call.trailers())
            status = 0
            return response
        finally:
            call.close(status and _failed_with(call, context))

    return observe


def _open(method: str, context: Context, instance_id: str) -> Call:
    metadata: Metadata = tuple(context.invocation_metadata() or ())
    request_id = request_id_of(metadata)
    span = traces.open_call(method, metadata, request_id)
    bind_request(request_id, "" if span is None else traces.trace_id(span))
    call = Call(method, request_id, time.monotonic(), span, metadata, instance_id)
    _CALL.set(call)
    return call


def _failed_with(call: Call, context: Context) -> int:
    """The number of the status that the call was aborted with, which has its line from now on at the latest;
    CANCELLED where its caller left."""
    code: Any = context.code()
    number = code.value[0] if isinstance(code, grpc.StatusCode) else int(code or 0)
    if number and not call.is_reported:  # refused before its handler
        log.warning(
            "call failed",
            method=call.method,
            status=STATUS_NAMES.get(number, str(number)),
            error=str(context.details() or "")[:MAX_LOGGED_MESSAGE],
        )
    return int(number or grpc.StatusCode.CANCELLED.value[0])


async def _under(span: Span, work: Coroutine[Any, Any, Delivered]) -> Delivered:
    traces.enter(span)
    return await work
