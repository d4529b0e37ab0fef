"""The caller's trace in a call's metadata, where there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider

from lm_adapter.trace_context import with_trace

ROOT = Path(__file__).parents[3]


def test_the_current_span_is_named_once() -> None:
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("caller") as span:
        context = span.get_span_context()
        metadata = with_trace((("x-content-digest", "ab"),))
        assert metadata == (
            ("x-content-digest", "ab"),
            ("traceparent", f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"),
        )
        assert with_trace(metadata) == metadata


def test_without_a_span_nothing_is_added() -> None:
    assert with_trace((("a", "b"),)) == (("a", "b"),)


def test_a_program_without_opentelemetry_is_not_made_to_load_it() -> None:
    code = (
        "import sys; from lm_adapter.trace_context import with_trace; import lm_adapter.calls; "
        "assert with_trace(()) == (); print(any(name.startswith('opentelemetry.') for name in sys.modules))"
    )
    # grpc itself loads parts of it where it is installed, which is not ours to change.
    grpc_alone = "import sys, grpc; print(any(name.startswith('opentelemetry.') for name in sys.modules))"
    found = [
        subprocess.run(
            [sys.executable, "-c", text],
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for text in (code, grpc_alone)
    ]
    assert found[0] == found[1]
