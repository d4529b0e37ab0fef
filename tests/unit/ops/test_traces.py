"""Spans: off nothing happens; on they are laid out as the stages went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from encoder_service.ops import traces
from encoder_service.types import StageTimings

ROOT = Path(__file__).parents[3]
TIMINGS = StageTimings(
    identify_ms=1, admit_ms=2, decode_ms=10, resize_ms=5, queue_ms=3, tower_ms=20, store_ms=1, total_ms=60
)


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    found = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    stop = traces.start_traces("0", provider)
    yield found
    stop()
    assert traces.open_item(0) is None


def test_off_nothing_happens() -> None:
    assert traces.open_call("Encode", [("traceparent", "x")], "id") is None
    assert traces.open_item(0) is None
    traces.add_stages(TIMINGS, 0.0, 0.1, 0.2)


def test_stages_are_children_in_the_order_and_time_that_they_went(exporter: InMemorySpanExporter) -> None:
    from opentelemetry import context

    before = context.get_current()
    item = traces.open_item(3)
    assert item is not None
    traces.enter(item)
    # Started at 100, waited for a worker, decoded until 100.05, encoded until 100.08.
    traces.add_stages(TIMINGS, 100.0, 100.05, 100.08)
    traces.end_item(item, TIMINGS, "miss", (1, 2, 4), 2, 0.004)
    context.attach(before)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {
        "item", "admit", "decode", "resize", "queue", "tower", "store", "identify", "delivery"
    }  # fmt: skip
    for name, took_ms in (("decode", 10), ("tower", 20), ("delivery", 4)):
        span = spans[name]
        assert span.parent is not None
        assert span.parent.span_id == item.get_span_context().span_id
        assert span.start_time is not None
        assert span.end_time is not None
        assert (span.end_time - span.start_time) / 1e6 == pytest.approx(took_ms, abs=0.01)
    begins = {name: span.start_time or 0 for name, span in spans.items()}
    since_ms = {name: (at - begins["admit"]) / 1e6 for name, at in begins.items()}
    assert since_ms["decode"] == pytest.approx(35, abs=0.1)
    assert since_ms["resize"] == pytest.approx(45, abs=0.1)
    assert since_ms["queue"] == pytest.approx(50, abs=0.1)
    assert since_ms["tower"] == pytest.approx(53, abs=0.1)
    assert since_ms["store"] == pytest.approx(79, abs=0.1)
    assert dict(spans["item"].attributes or {}) == {
        "ve.item.index": 3, "ve.tier": "miss", "ve.grid_thw": (1, 2, 4), "ve.rows": 2
    }  # fmt: skip


def test_a_stage_that_was_not_passed_is_no_span(exporter: InMemorySpanExporter) -> None:
    item = traces.open_item(0)
    assert item is not None
    traces.end_item(item, StageTimings(total_ms=1), "host", (1, 2, 2), 1, 0.0)
    assert [span.name for span in exporter.get_finished_spans()] == ["item"]


def test_a_collector_that_is_gone_keeps_no_item_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    stop = traces.start_traces("0")
    started_s = time.monotonic()
    for index in range(100):
        item = traces.open_item(index)
        assert item is not None
        traces.end_item(item, TIMINGS, "miss", (1, 2, 4), 2, 0.004)
    took_s = time.monotonic() - started_s
    stop()
    assert took_s < 10, "each of the hundred would have waited for a second"
