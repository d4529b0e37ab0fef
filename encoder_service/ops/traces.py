"""OpenTelemetry spans of calls, items and stages, in the trace of the caller.

Owns whether spans are recorded, and their names and attributes. Tracing is off until ``start_traces``: before
that, OpenTelemetry is not imported and the functions of this module do nothing. The SDK reads the exporter,
the sampler and the service's name from the standard ``OTEL_*`` variables.

The current span is never reset: each call, item and encode runs in its own task, whose context ends with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from encoder_service.types import StageTimings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

SCOPE = "encoder_service"
RPC_SERVICE = "vision_encoder.v1.VisionEncoder"
W3C_KEYS = frozenset(("traceparent", "tracestate"))

_tracer: Tracer | None = None


def start_traces(version: str, provider: TracerProvider | None = None) -> Callable[[], None]:
    """Turns tracing on for the process. provider: by default, one that exports by OTLP over gRPC. Returns a
    function that turns tracing off; it blocks until spans are sent or the exporter gives up.

    Raises ConfigurationError if the packages of the extra ``otel`` are missing.
    """
    global _tracer
    provider = provider or _otlp_provider(version)
    _tracer = provider.get_tracer(SCOPE, version)
    return lambda: _stop(provider)


def _stop(provider: TracerProvider) -> None:
    global _tracer
    _tracer = None
    provider.shutdown()


def _otlp_provider(version: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({SERVICE_VERSION: version})
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        # No variable names the service. Attributes in code would override a name from the variables.
        resource = resource.merge(Resource({SERVICE_NAME: "vision-encoder"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def open_call(
    method: str, metadata: Iterable[tuple[str, str | bytes]], request_id: str, http_route: str = ""
) -> Span | None:
    """Starts the span of one call and makes it current. http_route: the path of a call over HTTP; empty for
    an RPC. Its parent is the caller's span if ``traceparent`` names one. With a malformed header, a new trace
    starts, as the W3C Trace Context recommendation says."""
    if _tracer is None:
        return None
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {key: value for key, value in metadata if key in W3C_KEYS and isinstance(value, str)}
    name = f"{RPC_SERVICE}/{method}"
    attributes = {"rpc.system": "grpc", "rpc.service": RPC_SERVICE, "rpc.method": method}
    if http_route:
        name = f"POST {http_route}"
        attributes = {"http.request.method": "POST", "http.route": http_route}
    span = _tracer.start_span(
        name,
        context=TraceContextTextMapPropagator().extract(carrier),
        kind=SpanKind.SERVER,
        attributes={**attributes, "ve.request_id": request_id},
    )
    enter(span)
    return span


def open_item(index: int) -> Span | None:
    """Starts the span of one item, a child of the current span. ``enter`` makes it current in a task."""
    if _tracer is None:
        return None
    return _tracer.start_span("item", attributes={"ve.item.index": index})


def enter(span: Span) -> None:
    """Makes a span current for the rest of this task and for tasks that it starts."""
    from opentelemetry import context, trace

    context.attach(trace.set_span_in_context(span))


def trace_id(span: Span) -> str:
    """The trace id as logs show it: 32 hexadecimal digits."""
    return f"{span.get_span_context().trace_id:032x}"


def add_stages(timings: StageTimings, started_s: float, ingested_s: float, ended_s: float) -> None:
    """Adds the stages of an encode that has just ended, as children of the item that started it. Times are
    seconds of the pipeline's clock. Each span is aligned with the begin or end that is known of its stage, so
    a wait for a worker thread appears as a gap before decoding."""
    if _tracer is None:
        return
    from opentelemetry import trace

    parent = trace.get_current_span()
    # The sampled flag and not is_recording(), because the call of a prefetch has ended by now.
    if not parent.get_span_context().trace_flags.sampled:
        return
    offset_s = time.time() - ended_s
    decode_s = ingested_s - timings.resize_ms / 1e3
    towered_s = ingested_s + timings.queue_ms / 1e3
    for name, begins_s, took_ms in (
        ("admit", started_s, timings.admit_ms),
        ("decode", decode_s - timings.decode_ms / 1e3, timings.decode_ms),
        ("resize", decode_s, timings.resize_ms),
        ("queue", ingested_s, timings.queue_ms),
        ("tower", towered_s, timings.tower_ms),
        ("store", ended_s - timings.store_ms / 1e3, timings.store_ms),
    ):
        if took_ms > 0:
            _add(name, parent, begins_s + offset_s, took_ms / 1e3)


def end_item(
    span: Span, timings: StageTimings, tier: str, grid: tuple[int, int, int], rows: int, delivery_s: float
) -> None:
    """Ends the span of an item that was just delivered. Adds its attributes, its first and its last stage."""
    if span.is_recording():
        now_s = time.time()
        span.set_attributes({"ve.tier": tier, "ve.grid_thw": grid, "ve.rows": rows})
        ready_s = now_s - delivery_s
        _add("identify", span, ready_s - timings.total_ms / 1e3, timings.identify_ms / 1e3)
        _add("delivery", span, ready_s, delivery_s)
    span.end()


def end_failed(span: Span, reason: str, message: str) -> None:
    """Ends the span of an item or a call that failed. reason: the error's stable code."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("ve.reason", reason)
    span.set_status(Status(StatusCode.ERROR, f"{reason}: {message}"))
    span.end()


def end_call(span: Span, status: int) -> None:
    """Ends the span of a call. status: the gRPC status number; 0 is OK."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("rpc.grpc.status_code", status)
    if status:
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def _add(name: str, parent: Span, begins_s: float, took_s: float) -> None:
    """Adds a span that has already ended. begins_s: Unix time in seconds."""
    from opentelemetry import trace

    if _tracer is None or took_s <= 0:
        return
    context = trace.set_span_in_context(parent)
    span = _tracer.start_span(name, context=context, start_time=int(begins_s * 1e9))
    span.end(int((begins_s + took_s) * 1e9))
