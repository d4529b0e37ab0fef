"""The fake service itself: what users' tests may rely on, seen through plain gRPC."""

from __future__ import annotations

import grpc
import pytest

from lm_adapter.testing import FakeEncoder
from vision_encoder.v1 import encoder_pb2 as pb
from vision_encoder.v1 import encoder_pb2_grpc

DIGEST = bytes(range(32))


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (pb.Item(content_digest=DIGEST, encoded=b"x"), "INVALID_REQUEST"),
        (pb.Item(modality=pb.MODALITY_IMAGE, content_digest=b"short", encoded=b"x"), "INVALID_DIGEST"),
        (pb.Item(modality=pb.MODALITY_IMAGE, digest_only=pb.DigestOnly()), "INVALID_DIGEST"),
        (
            pb.Item(modality=pb.MODALITY_IMAGE, content_digest=DIGEST, digest_only=pb.DigestOnly()),
            "UNKNOWN_KEY",
        ),
        (pb.Item(modality=pb.MODALITY_IMAGE, content_digest=DIGEST, url="http://x"), "UNSUPPORTED_CONTENT"),
        (pb.Item(modality=pb.MODALITY_IMAGE, content_digest=DIGEST), "UNSUPPORTED_CONTENT"),
        (
            pb.Item(
                modality=99,  # type: ignore[arg-type]
                content_digest=DIGEST,
                encoded=b"x",
            ),
            "INVALID_REQUEST",
        ),
    ],
)
def test_items_are_refused_with_the_services_reasons(item: pb.Item, reason: str) -> None:
    with FakeEncoder() as fake, grpc.insecure_channel(fake.target) as channel:
        stub = encoder_pb2_grpc.VisionEncoderStub(channel)
        (event,) = stub.Encode(pb.EncodeRequest(items=[item]), timeout=5)
        assert event.failure.reason == reason
        (status,) = stub.Prefetch(pb.PrefetchRequest(items=[item]), timeout=5).statuses
        assert status.failure.reason == reason
