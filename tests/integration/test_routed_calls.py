"""Calls that a gateway routed: a failure that another replica may not have is the status of the call."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from encoder_service.engine.device import DeviceEngine
from encoder_service.errors import DeviceFault, UrlUnreachable
from encoder_service.scheduler.admission import UndeliveredBytes
from tests.integration.conftest import RunningService, connected
from tests.integration.images import photo
from vision_encoder.layout.keys import ROUTING_KEY
from vision_encoder.v1 import encoder_pb2 as pb
from vision_encoder.v1 import encoder_pb2_grpc

ROUTED = ((ROUTING_KEY, "00" * 32),)
TIMEOUT_S = 30


@pytest.fixture
def stub(service: RunningService) -> Iterator[encoder_pb2_grpc.VisionEncoderStub]:
    with connected(service) as found:
        yield found


def items(*files: bytes) -> list[pb.Item]:
    return [pb.Item(modality=pb.MODALITY_IMAGE, encoded=data) for data in files]


def test_an_overloaded_replica_refuses_a_routed_call(
    service: RunningService, stub: encoder_pb2_grpc.VisionEncoderStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.service.pipeline is not None
    monkeypatch.setattr(service.service.pipeline, "undelivered", UndeliveredBytes(0))
    request = pb.EncodeRequest(items=items(photo(256, 256)))
    (event,) = stub.Encode(request, timeout=TIMEOUT_S)
    assert event.failure.reason == "QUEUE_FULL"
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Encode(request, timeout=TIMEOUT_S, metadata=ROUTED))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    prefetch = pb.PrefetchRequest(items=items(photo(256, 256)))
    assert stub.Prefetch(prefetch, timeout=TIMEOUT_S).statuses[0].failure.reason == "QUEUE_FULL"
    with pytest.raises(grpc.RpcError) as raised:
        stub.Prefetch(prefetch, timeout=TIMEOUT_S, metadata=ROUTED)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_draining_replica_refuses_a_routed_call(
    service: RunningService, stub: encoder_pb2_grpc.VisionEncoderStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.service.pipeline, "_draining", True)
    request = pb.EncodeRequest(items=items(photo(32, 32)))
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Encode(request, timeout=TIMEOUT_S, metadata=ROUTED))
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "DRAINING" in (raised.value.details() or "")


def test_no_new_work_after_a_device_fault_is_a_refusal_of_the_replica(
    service: RunningService, stub: encoder_pb2_grpc.VisionEncoderStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceEngine, "fault", DeviceFault("the device failed"))
    request = pb.EncodeRequest(items=items(photo(32, 64)))
    (event,) = stub.Encode(request, timeout=TIMEOUT_S)
    assert event.failure.reason == "DEVICE_FAULT"
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Encode(request, timeout=TIMEOUT_S, metadata=ROUTED))
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_p33_what_fails_at_every_replica_is_not_the_calls_status(
    stub: encoder_pb2_grpc.VisionEncoderStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway would send it to a second replica, and the adapter repeat both."""

    async def unreachable(*_: object, **__: object) -> None:
        raise UrlUnreachable("the host does not answer")

    monkeypatch.setattr("encoder_service.pipeline.Pipeline.encode", unreachable)
    (event,) = stub.Encode(pb.EncodeRequest(items=items(photo(32, 64))), timeout=TIMEOUT_S, metadata=ROUTED)
    assert (event.failure.reason, event.failure.retryable) == ("URL_UNREACHABLE", True)


def test_a_bad_item_of_a_routed_call_fails_alone(stub: encoder_pb2_grpc.VisionEncoderStub) -> None:
    request = pb.EncodeRequest(items=items(b"no image"))
    (event,) = stub.Encode(request, timeout=TIMEOUT_S, metadata=ROUTED)
    assert event.failure.reason == "UNDECODABLE_IMAGE"


def test_p48_the_header_does_not_change_the_key(stub: encoder_pb2_grpc.VisionEncoderStub) -> None:
    request = pb.EncodeRequest(items=items(photo(64, 32)))
    results = [
        next(event.result for event in stub.Encode(request, timeout=TIMEOUT_S, metadata=metadata))
        for metadata in ((), ROUTED, ((ROUTING_KEY, "no digest at all"),))
    ]
    assert len({result.key for result in results}) == 1
    assert [result.tier for result in results[1:]] == [pb.CACHE_TIER_HOST] * 2
