"""Images that take long to decode delay their own callers alone."""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from PIL import Image

from bench.harness.waiting import wait_until
from encoder_service.ingest.preprocessor import OpenItem
from encoder_service.rpc.server import SERVICE
from encoder_service.types import LoadedPixels, PreprocessOptions
from lm_adapter import DeadlineExceeded, ImageItem, ItemFailed, VisionEncoderClient
from tests.integration.conftest import RunningService, running
from tests.integration.health import health_of
from tests.integration.held import held, wait_until_free
from tests.integration.images import photo
from vision_encoder.v1 import encoder_pb2 as pb
from vision_encoder.v1 import encoder_pb2_grpc

INGEST_THREADS = 2
LIMIT_S = 60.0


def slow_photo() -> bytes:
    """An image that ``gated`` knows by its size."""
    return photo(333, 211)


@contextmanager
def gated(found: RunningService) -> Iterator[tuple[threading.Event, Callable[[], int]]]:
    """Slow photographs wait for the event; how many of them wait now."""
    assert found.service.pipeline is not None
    preprocessor = found.service.pipeline.model.preprocessor
    original, go_on, waiting = preprocessor.open_image, threading.Event(), list[int]()

    def open_image(data: bytes, options: PreprocessOptions) -> OpenItem:
        opened = original(data, options)

        def load() -> LoadedPixels:
            waiting.append(1)
            assert go_on.wait(LIMIT_S)
            waiting.pop()
            return opened.load()

        with Image.open(io.BytesIO(data)) as image:
            return replace(opened, load=load) if image.size == (333, 211) else opened

    preprocessor.open_image = open_image  # type: ignore[method-assign]
    try:
        yield go_on, lambda: len(waiting)
    finally:
        go_on.set()
        preprocessor.open_image = original  # type: ignore[method-assign]


def noise() -> bytes:
    """A fresh JPEG of about 400 kB."""
    out = io.BytesIO()
    Image.frombytes("RGB", (580, 580), random.randbytes(580 * 580 * 3)).save(out, "JPEG", quality=95)
    return out.getvalue()


def refusal(call: Iterator[pb.ItemEvent]) -> str:
    """Why a call's only item, or the call, is refused."""
    try:
        return next(call).failure.reason
    except grpc.RpcError as error:
        return str(error.details()).partition(":")[0]  # type: ignore[attr-defined]


def request_of(*images: bytes) -> pb.EncodeRequest:
    return pb.EncodeRequest(items=[pb.Item(modality=pb.MODALITY_IMAGE, encoded=data) for data in images])


def test_p34_p17_with_every_thread_busy_the_rest_waits_bounded_and_in_time(
    checkpoint: Path, device: torch.device
) -> None:
    """Health checks and resident rows are answered, deadlines hold, cancelled items are dropped, and items
    that wait count against the queue's bounds."""
    image = photo(60, 40)
    with (
        running(
            checkpoint,
            device,
            ingest_threads=INGEST_THREADS,
            max_message_bytes=1 << 20,
            max_queued_bytes=1_900_000,
        ) as found,
        gated(found) as (go_on, num_waiting),
        grpc.insecure_channel(found.target) as channel,
        VisionEncoderClient(found.target, timeout_s=LIMIT_S) as client,
    ):
        stub = encoder_pb2_grpc.VisionEncoderStub(channel)
        resident = client.encode_one(ImageItem(image))
        slow = [stub.Encode(request_of(slow_photo()), timeout=LIMIT_S) for _ in range(INGEST_THREADS)]
        wait_until(lambda: num_waiting() == INGEST_THREADS)

        assert health_of(found.target, SERVICE) == 1
        assert client.encode_one(ImageItem(image)).key == resident.key
        started_s = time.monotonic()
        with pytest.raises((DeadlineExceeded, ItemFailed), match="deadline"):
            client.encode_one(ImageItem(photo(50, 50)), timeout_s=0.3)  # from the server or from gRPC
        assert time.monotonic() - started_s < 5
        left = stub.Encode(request_of(photo(50, 50)), timeout=LIMIT_S)
        wait_until(lambda: held(found)["encodes"] == INGEST_THREADS + 1)
        left.cancel()
        wait_until(lambda: held(found)["encodes"] == INGEST_THREADS)

        # Calls that wait for a thread hold their bytes; a namespace's share has room for two of these.
        calls = []
        for number in range(1, 5):
            data = noise()
            assert 360_000 < len(data) < 450_000
            calls.append(stub.Encode(request_of(data), timeout=LIMIT_S))
            if number <= 2:
                wait_until(lambda number=number: held(found)["bytes of content"] > number * 360_000)  # type: ignore[misc]
        assert [refusal(call) for call in calls[2:]] == ["QUEUE_FULL"] * 2
        assert held(found)["bytes of content"] <= 1_900_000

        go_on.set()
        for call in [*slow, *calls[:2]]:
            assert {event.WhichOneof("event") for event in call} == {"result", "chunk"}
        wait_until_free(found)
