"""What an operator sees of real calls: ids, log lines, traces that go through, timings, counts."""

from __future__ import annotations

import re
from collections.abc import Iterator

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext

from encoder_service.ops import traces
from lm_adapter import EncodedRows, ImageItem, ItemFailed, VisionEncoderClient
from tests.integration.conftest import RunningService
from tests.integration.images import photo
from vision_encoder.v1 import encoder_pb2 as pb
from vision_encoder.v1 import encoder_pb2_grpc


@pytest.fixture
def stub(service: RunningService) -> Iterator[encoder_pb2_grpc.VisionEncoderStub]:
    with grpc.insecure_channel(service.target) as channel:
        yield encoder_pb2_grpc.VisionEncoderStub(channel)


def encode_request(*contents: bytes) -> pb.EncodeRequest:
    return pb.EncodeRequest(
        items=[pb.Item(modality=pb.MODALITY_IMAGE, encoded=content) for content in contents]
    )


def test_a_callers_request_id_comes_back(stub: encoder_pb2_grpc.VisionEncoderStub) -> None:
    call = stub.Encode(encode_request(photo()), metadata=(("x-request-id", "abc-1"),), timeout=30)
    list(call)
    trailers = dict(call.trailing_metadata())
    assert trailers["x-request-id"] == "abc-1"
    _, unary = stub.GetServerInfo.with_call(pb.GetServerInfoRequest(), timeout=30)
    made_up = dict(unary.trailing_metadata())["x-request-id"]
    assert isinstance(made_up, str)
    assert re.fullmatch(r"[0-9a-f]{32}", made_up)


def test_every_stage_that_an_encode_passes_has_its_time(service: RunningService) -> None:
    with VisionEncoderClient(service.target, timeout_s=60) as client:
        data = photo(256, 192)
        first, again = client.encode_one(ImageItem(data)), client.encode_one(ImageItem(data))
    passed = {name: value for name, value in vars(first.timings).items() if value > 0}
    assert passed.keys() == vars(first.timings).keys()
    parts = sum(value for name, value in passed.items() if name not in ("total_ms", "delivery_ms"))
    assert parts <= first.timings.total_ms * 1.05
    assert {name for name, value in vars(again.timings).items() if value > 0} == {
        "identify_ms",
        "total_ms",
        "delivery_ms",
    }
    metrics = service.service.metrics.registry
    for stage in ("delivery", *(name.removesuffix("_ms") for name in passed)):
        assert metrics.get_sample_value("ve_stage_seconds_count", {"stage": stage}), stage


# -- traces --------------------------------------------------------------------------------------------


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    found = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    stop = traces.start_traces("0", provider)
    yield found
    stop()


def context_of(span: ReadableSpan) -> SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def span_id(span: ReadableSpan) -> int:
    return context_of(span).span_id


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def test_the_adapters_trace_goes_through_calls_items_and_stages(
    service: RunningService, exporter: InMemorySpanExporter
) -> None:
    tracer = TracerProvider().get_tracer("engine")
    with VisionEncoderClient(service.target, timeout_s=60) as client:
        client.info()
        exporter.clear()
        with tracer.start_as_current_span("prefill") as prefill:
            good, bad = client.encode([ImageItem(photo()), ImageItem(b"bad")])
            assert isinstance(good, EncodedRows)
            assert isinstance(bad, ItemFailed)
            (fetched,) = client.fetch([good.key])
            assert isinstance(fetched, EncodedRows)
    service.on_loop(lambda: None)  # the call's span ends after its last message
    spans = exporter.get_finished_spans()
    assert {context_of(span).trace_id for span in spans} == {prefill.get_span_context().trace_id}
    calls = {span.name.rpartition("/")[2]: span for span in spans if "/" in span.name}
    assert calls.keys() == {"Encode", "Fetch"}
    assert {parent_of(call) for call in calls.values()} == {span_id(prefill)}  # type: ignore[arg-type]
    items = [span for span in spans if span.name == "item" and parent_of(span) == span_id(calls["Encode"])]
    by_index = {(span.attributes or {})["ve.item.index"]: span for span in items}
    assert (by_index[0].attributes or {})["ve.tier"] == "miss"
    assert (by_index[1].attributes or {})["ve.reason"] == "UNDECODABLE_IMAGE"
    assert not by_index[1].status.is_ok
    stages = {span.name for span in spans if parent_of(span) == span_id(by_index[0])}
    assert stages >= {"identify", "admit", "decode", "queue", "tower", "store", "delivery"}
    (found,) = (span for span in spans if span.name == "item" and parent_of(span) == span_id(calls["Fetch"]))
    assert (found.attributes or {})["ve.tier"] == "host"


@pytest.mark.parametrize("header", ["", "garbage", "00-" + "0" * 32 + "-" + "1" * 16 + "-01"])
def test_a_trace_that_cannot_be_joined_begins_anew(
    header: str,
    stub: encoder_pb2_grpc.VisionEncoderStub,
    exporter: InMemorySpanExporter,
    service: RunningService,
) -> None:
    list(
        stub.Encode(
            encode_request(photo()), metadata=(("traceparent", header),) if header else (), timeout=30
        )
    )
    service.on_loop(lambda: None)
    (call,) = (span for span in exporter.get_finished_spans() if "/" in span.name)
    assert call.parent is None
    assert (call.attributes or {})["rpc.grpc.status_code"] == 0
