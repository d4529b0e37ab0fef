"""The records of each call, of every protocol: request id, log lines, counts, spans, status, delivery times.

Owns ``recorded``, in which a handler of any protocol runs, and the wrapper around gRPC's handlers: a handler
returns or raises, and the wrapper ends the call with the status. ``traces`` owns spans, ``logs`` the format
of lines. The record of the current RPC is a context variable, because each RPC runs in its own task.

In the log a fault of the service is an error, a failure by a caller or by overload a warning, both with a
bound in number. Every call has a line at debug, and so have failures beyond the bound. Rows that were asked
for by key or digest alone and are not here (UNKNOWN_KEY) are an answer, as of any cache, and no failure in
logs or metrics.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc
import structlog

from encoder_service.errors import (
    Cancelled,
    DeviceFault,
    Draining,
    NotReady,
    Overloaded,
    UnknownKey,
    UrlUnreachable,
)
from encoder_service.ops import traces
from encoder_service.ops.logs import REQUEST_ID_KEY, RepeatedLines, bind_request, request_id_of
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.shares import Holder
from encoder_service.ops.tokens import NamespaceTokens
from encoder_service.pipeline import EncodeResult, holder_of
from encoder_service.rpc.auth import holder_of_namespace, host_of, host_port_of
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
# Retryable, though not because the service has no room.
NO_REFUSALS = OUR_FAULT | {UrlUnreachable.reason}
TAKES_NO_WORK = (Draining, NotReady, Overloaded, DeviceFault)
# Lines about failures in ``logs.REPEAT_S``: by reason and caller; by reason, while the service refuses work.
MAX_FAILURES, MAX_REFUSALS = 20, 1
failure_lines = RepeatedLines()


@dataclass
class Call:
    """One RPC, or request of another protocol. metadata: the caller's metadata. instance_id: of this server
    process. peer: the caller's address, with its port where it has one; host: without. holder: the holder
    that the caller counts as before its request is read. permit: counts its message. tokens: the server's;
    None without a gate.

    namespace, num_items: of the request, once it is read. tiers: delivered items by cache tier. failures:
    failed items by reason."""

    method: str
    request_id: str
    span: Span | None = None
    metadata: Metadata = ()
    instance_id: str = ""
    peer: str = ""
    host: str = ""
    holder: Holder = ()
    permit: Permit | None = None
    tokens: NamespaceTokens | None = None
    namespace: str = ""
    num_items: int = 0
    tiers: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    started_s: float = field(default_factory=time.monotonic)
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
        self.failures[failure.reason] += 1
        self._report("item failed", metrics, failure, item=index)
        self._end_span(index, failure.reason, failure.message)

    def _end_span(self, index: int, reason: str, message: str) -> None:
        span = self.item_spans.pop(index, None)
        if span is not None:
            traces.end_failed(span, reason, message)

    def failed(self, metrics: Metrics, failure: pb.ItemFailure, status: str) -> None:
        """Logs and counts a call that failed as a whole."""
        self._report("call failed", metrics, failure, status=status)

    def _report(self, event: str, metrics: Metrics, failure: pb.ItemFailure, **fields: object) -> None:
        reason = failure.reason
        if reason == UnknownKey.reason:
            metrics.unknown_keys.inc()
            log.debug("key unknown", **self._facts(), **fields)
            return
        is_refusal = failure.retryable and reason not in NO_REFUSALS
        metrics.count(metrics.call_failures if event == "call failed" else metrics.failures, reason)
        if is_refusal:
            metrics.count(metrics.rejections, reason)
        kind, max_lines = (event, reason, self.host), MAX_FAILURES
        if is_refusal:
            kind, max_lines = (event, reason, ""), MAX_REFUSALS
        left_out = failure_lines.due(kind, max_lines)
        report = log.error if reason in OUR_FAULT else log.warning
        if left_out is None:
            report, left_out = log.debug, {}
        error = failure.message[:MAX_LOGGED_CHARS]
        report(event, **self._facts(), **fields, reason=reason, error=error, **left_out)

    def _facts(self) -> dict[str, object]:
        """The fields of every line of the call."""
        return {"method": self.method, "peer": self.peer or self.host, "namespace": self.namespace}

    def delivered(
        self, metrics: Metrics, delivered: EncodeResult, index: int, transport: str, now_s: float
    ) -> None:
        """Records that the rows of an item, or their place, were sent. now_s: the pipeline's clock."""
        took_s = max(0.0, now_s - delivered.ready_s)
        self.tiers[delivered.tier.value] += 1
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
        """Logs the call, and ends the spans of the call and of items that have not ended."""
        log.debug(
            "call ended",
            **self._facts(),
            status=status.name,
            items=self.num_items,
            tiers=dict(self.tiers),
            failed=dict(self.failures),
            ms=round((time.monotonic() - self.started_s) * 1e3, 2),
        )
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


@contextmanager
def recorded(call: Call, metrics: Metrics) -> Iterator[None]:
    """Counts and logs the call that the block answers. What the block raises is the call's failure, and
    passes on. ``Cancelled`` is the caller's leaving, not a failure."""
    status = grpc.StatusCode.CANCELLED
    try:
        yield
        status = grpc.StatusCode.OK
    except Exception as exception:
        error = as_service_error(exception)
        status = status_of(error)
        if not isinstance(error, Cancelled):
            call.failed(metrics, failure_of(error), status.name)
        del error  # its traceback has this frame: a cycle would keep the request
        raise
    finally:
        metrics.count(metrics.requests, call.method, status.name)
        call.close(status)


def observed(
    method: str,
    handler: Callable[[Request, Context], Awaitable[Response]],
    metrics: Metrics,
    instance_id: str,
) -> Callable[[Request, Context], Awaitable[Response]]:
    """Wraps the handler of any method. An exception becomes the call's status."""

    async def observe(request: Request, context: Context) -> Response:
        metadata: Metadata = tuple(context.invocation_metadata() or ())
        peer = context.peer()
        call = open_call(method, metadata, instance_id, host_port_of(peer), host_of(peer))
        try:
            with recorded(call, metrics):
                response = await handler(request, context)
                context.set_trailing_metadata(call.trailers())
                return response
        except Exception as exception:
            error = as_service_error(exception)
            answer = status_of(error), status_text(error), (*trailing_metadata(error), *call.trailers())
            del error
        # A caller may leave the answer unread. The error is deleted by now, and with it the request, which
        # its traceback refers to.
        await context.abort(*answer)
        raise AssertionError("abort returned")

    return observe


def open_call(
    method: str, metadata: Metadata, instance_id: str, peer: str, host: str, http_route: str = ""
) -> Call:
    """Starts the record of a call, its span and its log fields, and makes it the current one of this task.
    metadata: with lower-case names. peer, host: as in ``Call``. http_route: the path of a call over HTTP."""
    request_id = request_id_of(metadata)
    span = traces.open_call(method, metadata, request_id, http_route)
    bind_request(request_id, "" if span is None else traces.trace_id(span))
    call = Call(method, request_id, span, metadata, instance_id, peer, host)
    _CALL.set(call)
    return call
