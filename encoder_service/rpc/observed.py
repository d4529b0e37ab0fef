"""The records of each call: request id, log lines, counts, spans, status, delivery times.

Owns the wrapper around handlers. A handler returns or raises; the wrapper ends the call with the status.
``traces`` owns spans, ``logs`` the format of lines. The record of the current call is a context variable,
because each RPC runs in its own task.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc
import structlog
from prometheus_client import Counter

from encoder_service.errors import DeviceFault, Draining, NotReady, Overloaded
from encoder_service.ops import traces
from encoder_service.ops.logs import REQUEST_ID_KEY, bind_request, request_id_of
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.shares import Holder
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.pipeline import EncodeResult, holder_of
from encoder_service.rpc.auth import holder_of_namespace
from encoder_service.rpc.status import (
    as_service_error,
    failure_of,
    status_of,
    status_text,
    trailing_metadata,
)
from encoder_service.scheduler.admission import Permit
from vision_encoder.layout.keys import ROUTING_KEY
from vision_encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = structlog.get_logger(__name__)
Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

INSTANCE_KEY = "x-instance-id"
# Log lines shorten the messages of errors, which may repeat content of callers.
MAX_LOGGED_CHARS = 300
OUR_FAULT = frozenset(("INTERNAL", "DEVICE_FAULT"))
TAKES_NO_WORK = (Draining, NotReady, Overloaded, DeviceFault)


@dataclass
class Call:
    """One RPC. metadata: the caller's metadata. instance_id: of this server process. host: the caller's.
    holder: the holder that the caller counts as before its request is read. permit: counts its message.
    tokens: the server's; None without a gate."""

    method: str
    request_id: str
    span: Span | None = None
    metadata: Metadata = ()
    instance_id: str = ""
    host: str = ""
    holder: Holder = ()
    permit: Permit | None = None
    tokens: NamespaceTokens | None = None
    item_spans: dict[int, Span] = field(default_factory=dict)

    def holder_of(self, namespace: str) -> Holder:
        """The holder that the call counts as once its namespace is known."""
        if self.tokens is None:
            return holder_of(namespace)
        return holder_of_namespace(self.tokens, self.host, namespace)

    def open_item(self, index: int) -> None:
        """Starts the item's span, if tracing is on, and makes it current for the rest of this task."""
        span = traces.open_item(index)
        if span is not None:
            self.item_spans[index] = span
            traces.enter(span)

    def item_failure(
        self, metrics: Metrics, error: BaseException, index: int, num_items: int
    ) -> pb.ItemFailure:
        """Logs and counts the failure of an item, and returns it for the item's event or status. Exception:
        in a call of one item through a gateway, if this replica takes no work now, the failure is raised as
        the call's, so that the gateway tries another replica."""
        known = as_service_error(error)
        is_routed = num_items == 1 and any(name == ROUTING_KEY for name, _ in self.metadata)
        if is_routed and isinstance(known, TAKES_NO_WORK):
            call_failure = NotReady(known.message) if isinstance(known, DeviceFault) else known
            self._end_span(index, call_failure.reason, call_failure.message)
            raise call_failure from None
        failure = failure_of(known)
        self.item_failed(metrics, failure, index)
        return failure

    def item_failed(self, metrics: Metrics, failure: pb.ItemFailure, index: int) -> None:
        """Logs and counts an item that failed."""
        report = log.error if failure.reason in OUR_FAULT else log.warning
        self._report(report, "item failed", metrics, metrics.failures, failure, item=index)
        self._end_span(index, failure.reason, failure.message)

    def _end_span(self, index: int, reason: str, message: str) -> None:
        span = self.item_spans.pop(index, None)
        if span is not None:
            traces.end_failed(span, reason, message)

    def failed(self, metrics: Metrics, failure: pb.ItemFailure, status: str) -> None:
        """Logs and counts a call that failed as a whole."""
        self._report(log.warning, "call failed", metrics, metrics.call_failures, failure, status=status)

    def _report(
        self,
        report: Callable[..., object],
        event: str,
        metrics: Metrics,
        counter: Counter,
        failure: pb.ItemFailure,
        **fields: object,
    ) -> None:
        reason, error = failure.reason, failure.message[:MAX_LOGGED_CHARS]
        metrics.count(counter, reason)
        if failure.retryable and reason not in OUR_FAULT:  # refused, and may succeed later
            metrics.count(metrics.rejections, reason)
        report(event, method=self.method, **fields, reason=reason, error=error)

    def delivered(
        self, metrics: Metrics, delivered: EncodeResult, index: int, transport: str, now_s: float
    ) -> None:
        """Records that the rows of an item, or their place, were sent. now_s: the pipeline's clock."""
        took_s = max(0.0, now_s - delivered.ready_s)
        metrics.observe_delivery(transport, took_s)
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

    def close(self, status: grpc.StatusCode) -> None:
        """Ends the spans of the call and of items that have not ended."""
        for span in self.item_spans.values():
            traces.end_failed(span, "CANCELLED", "the call ended before the item")
        self.item_spans.clear()
        if self.span is not None:
            traces.end_call(self.span, status.value[0])

    def trailers(self) -> tuple[tuple[str, str], ...]:
        """The trailing metadata of every call: the request id, and the instance id, by which a client notices
        a restart."""
        return (REQUEST_ID_KEY, self.request_id), (INSTANCE_KEY, self.instance_id)


_CALL: ContextVar[Call] = ContextVar("call")


def this_call() -> Call:
    """The record of the call that this task serves."""
    return _CALL.get()


def observed(
    method: str,
    handler: Callable[[Request, Context], Awaitable[Response]],
    metrics: Metrics,
    instance_id: str,
) -> Callable[[Request, Context], Awaitable[Response]]:
    """Wraps the handler of any method. An exception becomes the call's status."""

    async def observe(request: Request, context: Context) -> Response:
        call, status = _open(method, context, instance_id), grpc.StatusCode.CANCELLED
        try:
            response = await handler(request, context)
            context.set_trailing_metadata(call.trailers())
            status = grpc.StatusCode.OK
            return response
        except Exception as exception:
            error = as_service_error(exception)
            status = status_of(error)
            call.failed(metrics, failure_of(error), status.name)
            answer = status, status_text(error), (*trailing_metadata(error), *call.trailers())
            del error
        finally:
            metrics.count(metrics.requests, method, status.name)
            call.close(status)
        # A caller may leave the answer unread. The error is deleted by now, and with it the request, which
        # its traceback refers to.
        await context.abort(*answer)
        raise AssertionError("abort returned")

    return observe


def _open(method: str, context: Context, instance_id: str) -> Call:
    metadata: Metadata = tuple(context.invocation_metadata() or ())
    request_id = request_id_of(metadata)
    span = traces.open_call(method, metadata, request_id)
    bind_request(request_id, "" if span is None else traces.trace_id(span))
    call = Call(method, request_id, span, metadata, instance_id)
    _CALL.set(call)
    return call
