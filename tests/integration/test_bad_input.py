"""Bad input: each item answers with its reason, its neighbours succeed, the service goes on."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from lm_adapter import (
    EncodedRows,
    Grid,
    ImageItem,
    Item,
    ItemFailed,
    PixelItem,
    VisionEncoderClient,
)
from tests.integration.conftest import RunningService, Serve, connected
from tests.integration.images import photo
from tests.unit.ingest.image_files import bombs
from vision_encoder.v1 import encoder_pb2 as pb

PATCH_DIM = 1536


def assert_fails_alone(client: VisionEncoderClient, bad: Item, reason: str) -> ItemFailed:
    """The bad item between two good ones."""
    first, failed, last = client.encode([ImageItem(photo()), bad, ImageItem(photo())])
    assert isinstance(first, EncodedRows)
    assert isinstance(last, EncodedRows)
    assert isinstance(failed, ItemFailed), failed
    assert failed.reason == reason, failed
    assert not failed.retryable
    return failed


@pytest.mark.parametrize(
    ("data", "reason", "text"),
    [
        (b"", "UNDECODABLE_IMAGE", ""),
        (b"<!DOCTYPE html><html><body>404</body></html>", "UNDECODABLE_IMAGE", ""),
        (photo(160, 120, "JPEG")[:1500], "UNDECODABLE_IMAGE", ""),
        (photo(160, 120, "PNG")[:-60], "UNDECODABLE_IMAGE", ""),
        (photo(65535, 1), "ASPECT_RATIO_EXCEEDED", "65535"),
        # A header alone: refused before a pixel is decoded.
        (bombs(10_000, 10_000)["png"], "IMAGE_TOO_LARGE", "100000000"),
    ],
    ids=["nothing", "HTML", "cut JPEG", "cut PNG", "aspect", "bomb"],
)
def test_p33_bad_files(client: VisionEncoderClient, data: bytes, reason: str, text: str) -> None:
    """Every format, and mutations: the tests of the decoder, and the fuzzing."""
    assert text in assert_fails_alone(client, ImageItem(data), reason).message
    assert client.encode_one(ImageItem(photo(1, 1))).num_rows > 0


def pixels(rows: int, width: int = PATCH_DIM) -> np.ndarray:
    return np.random.default_rng().standard_normal((rows, width), dtype=np.float32)


def test_pixel_tensors(client: VisionEncoderClient) -> None:
    good = client.encode_one(PixelItem(pixels(24), Grid(1, 4, 6)))
    assert good.num_rows == 6
    poisoned = pixels(24)
    poisoned[5, 7] = np.nan
    assert_fails_alone(client, PixelItem(poisoned, Grid(1, 4, 6)), "NON_FINITE_PIXELS")
    assert_fails_alone(client, PixelItem(pixels(24, 100), Grid(1, 4, 6)), "PIXEL_TENSOR_MISMATCH")


def test_whole_calls_that_cannot_be_read(service: RunningService) -> None:
    with connected(service) as stub:
        good = pb.Item(modality=pb.MODALITY_IMAGE, encoded=photo())
        for request, status in (
            (pb.EncodeRequest(), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.EncodeRequest(items=[good], model="other"), grpc.StatusCode.NOT_FOUND),
            (pb.EncodeRequest(items=[good], model="other" * 10_000), grpc.StatusCode.NOT_FOUND),
            (pb.EncodeRequest(items=[good], namespace="n" * 300), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.EncodeRequest(items=[good], delivery=99), grpc.StatusCode.INVALID_ARGUMENT),  # type: ignore[arg-type]
            (pb.EncodeRequest(items=[good] * 300), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Encode(request, timeout=30))
            assert caught.value.code() is status
            trailing: dict[str, Any] = {one.key: one.value for one in caught.value.trailing_metadata()}
            failure = pb.ItemFailure.FromString(trailing["vision-encoder-failure-bin"])
            assert caught.value.details() == f"{failure.reason}: {failure.message}"
        with pytest.raises(grpc.RpcError) as caught:
            stub.Lookup(pb.LookupRequest(keys=[b"short"]), timeout=30)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError, match="has 4097 or more fields, at most 4096") as caught:
            stub.Touch(pb.TouchRequest(rows=[pb.TouchedRows()] * 100_000), timeout=30)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert list(stub.Encode(pb.EncodeRequest(items=[good]), timeout=30))


def test_oversize_messages(serve: Serve) -> None:
    """What the adapter itself does not send is in tests/unit/lm_adapter/test_client.py."""
    settings = {"max_message_bytes": 1 << 20, "max_encoded_bytes": 32768}
    with serve(**settings) as found:
        with VisionEncoderClient(found.target, timeout_s=30) as client:
            assert_fails_alone(client, ImageItem(photo(256, 256, "BMP")), "IMAGE_TOO_LARGE")
        with connected(found) as stub:
            huge = pb.Item(modality=pb.MODALITY_IMAGE, encoded=bytes(3 << 20))
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Encode(pb.EncodeRequest(items=[huge]), timeout=30))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            good_item = pb.Item(modality=pb.MODALITY_IMAGE, encoded=photo(40, 40))
            assert list(stub.Encode(pb.EncodeRequest(items=[good_item]), timeout=30))
