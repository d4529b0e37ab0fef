"""Calls that a gateway routed: a failure that another replica may not have is the status of the call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from encoder_service.errors import (
    DeviceFault,
    Draining,
    Overloaded,
    UndecodableImage,
    UrlUnreachable,
    VisionEncoderError,
)
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


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("the queue is full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Draining("the service stops"), grpc.StatusCode.UNAVAILABLE),
        (DeviceFault("the device failed"), grpc.StatusCode.UNAVAILABLE),
        (UrlUnreachable("the host does not answer"), None),
        (UndecodableImage("it is damaged"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_p33_only_what_another_replica_may_not_have_is_the_status_of_a_routed_call(
    error: VisionEncoderError,
    status: grpc.StatusCode | None,
    stub: encoder_pb2_grpc.VisionEncoderStub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway would send the others to a second replica as well, and the adapter repeat both."""

    async def fails(*_: object, **__: object) -> None:
        raise error

    for name in ("encode", "prefetch"):
        monkeypatch.setattr(f"encoder_service.pipeline.Pipeline.{name}", fails)

    def outcomes(**options: Any) -> list[object]:
        """The failure's reason, or the status of the call."""
        found: list[object] = []
        try:
            (event,) = stub.Encode(pb.EncodeRequest(items=items(b"file")), timeout=TIMEOUT_S, **options)
            found.append(event.failure.reason)
        except grpc.RpcError as raised:
            found.append(raised.code())
        try:
            answer = stub.Prefetch(pb.PrefetchRequest(items=items(b"file")), timeout=TIMEOUT_S, **options)
            found.append(answer.statuses[0].failure.reason)
        except grpc.RpcError as raised:
            found.append(raised.code())
        return found

    assert outcomes() == [error.reason] * 2
    assert outcomes(metadata=ROUTED) == [status or error.reason] * 2


def test_p48_the_header_does_not_change_the_key(stub: encoder_pb2_grpc.VisionEncoderStub) -> None:
    request = pb.EncodeRequest(items=items(photo(64, 32)))
    results = [
        next(event.result for event in stub.Encode(request, timeout=TIMEOUT_S, metadata=metadata))
        for metadata in ((), ROUTED, ((ROUTING_KEY, "no digest at all"),))
    ]
    assert len({result.key for result in results}) == 1
    assert [result.tier for result in results[1:]] == [pb.CACHE_TIER_HOST] * 2
