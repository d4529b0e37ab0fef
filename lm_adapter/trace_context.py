"""The caller's trace, passed on to the service.

Owns the W3C headers of a call. Leaves spans to the caller: where it uses OpenTelemetry, its packages are
loaded already, and where it does not, there is no trace to pass on; so nothing is ever imported for it.
"""

from __future__ import annotations

import sys

TRACE_PARENT = "traceparent"


def with_trace(metadata: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The metadata with ``traceparent``, and ``tracestate`` where there is one, of the span that is current
    in this thread and task; unchanged where there is none, or where the metadata has them already."""
    if "opentelemetry.trace" not in sys.modules or any(key == TRACE_PARENT for key, _ in metadata):
        return metadata
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return (*metadata, *carrier.items())
