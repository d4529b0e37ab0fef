"""p37: the end of a service under load, as its clients and its operators see it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator

import grpc
import httpx
import pytest

from encoder_service.rpc import convert
from lm_adapter import CallFailed, EncodedRows, ImageItem, ItemFailed, VisionEncoderClient
from tests.integration.conftest import RunningService, Serve
from tests.integration.health import health_of
from tests.integration.images import photo
from vision_encoder.v1 import encoder_pb2 as pb
from vision_encoder.v1 import encoder_pb2_grpc

NUM_CLIENTS = 6


class Load:
    """Clients that go on until they are told to stop; outcomes by name."""

    def __init__(self, target: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self.num_started = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._target = target
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(NUM_CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        ends_s = time.monotonic() + 30
        while self.outcomes["rows"] < 3 * NUM_CLIENTS:
            assert time.monotonic() < ends_s, self.outcomes
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _run(self) -> None:
        with VisionEncoderClient(self._target, timeout_s=30, transports=("inline",)) as client:
            while not self._stop.is_set():
                for outcome in self._one(client):
                    with self._lock:
                        self.outcomes[outcome] += 1

    def _one(self, client: VisionEncoderClient) -> Iterator[str]:
        items = [ImageItem(photo(96, 64)) for _ in range(2)]
        self.num_started += 1
        try:
            for outcome in client.encode(items):
                if isinstance(outcome, EncodedRows):
                    yield "rows"
                else:
                    assert isinstance(outcome, ItemFailed)
                    yield f"{outcome.reason} {outcome.retryable}"
        except CallFailed as error:
            yield f"{type(error).__name__} {error.retryable}"
            time.sleep(0.02)


def test_p37_readiness_drops_first_and_what_was_accepted_finishes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call ends in rows or in a failure that says to go elsewhere; never in a broken one."""
    seen: dict[str, object] = {}
    with serve(drain_grace_s=20) as found:
        pipeline = found.service.pipeline
        assert pipeline is not None
        inner = pipeline.drain

        async def watched(grace_s: float) -> bool:
            """Looks at what probes see, before anything is refused or cut."""
            await_probes = found.loop.run_in_executor(None, probes, found)
            seen.update(await await_probes)
            seen["in flight"] = len(pipeline.inflight)
            seen["in time"] = await inner(grace_s)
            return bool(seen["in time"])

        monkeypatch.setattr(pipeline, "drain", watched)
        with Load(found.target) as load:
            started_s = time.monotonic()
            found.stop()
            took_s = time.monotonic() - started_s
            before = dict(load.outcomes)
    assert seen["health"] == 2  # NOT_SERVING
    assert seen["readyz"] == 503
    assert seen["healthz"] == 200  # draining is no reason to be killed
    assert seen["in time"] is True
    assert took_s < 15
    assert before["rows"] >= 3 * NUM_CLIENTS
    allowed = {"rows", "DRAINING True", "EncoderUnavailable True"}
    assert set(load.outcomes) <= allowed, load.outcomes
    assert load.outcomes["DRAINING True"] + load.outcomes["EncoderUnavailable True"] > 0


def probes(found: RunningService) -> dict[str, object]:
    admin = f"http://{found.service.addresses['admin']}"
    return {
        "health": health_of(found.target),
        "readyz": httpx.get(f"{admin}/readyz", timeout=10).status_code,
        "healthz": httpx.get(f"{admin}/healthz", timeout=10).status_code,
    }


def test_p37_a_caller_that_never_reads_does_not_hold_up_the_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "CHUNK_BYTES", 4096)
    with (
        serve(drain_grace_s=2) as found,
        grpc.insecure_channel(found.target) as channel,
    ):
        items = [pb.Item(modality=pb.MODALITY_IMAGE, encoded=photo(600, 600)) for _ in range(12)]
        stub = encoder_pb2_grpc.VisionEncoderStub(channel)
        half_read = stub.Encode(pb.EncodeRequest(items=items), timeout=60)
        next(half_read)
        started_s = time.monotonic()
        found.stop()
        assert time.monotonic() - started_s < 15
        with contextlib.suppress(grpc.RpcError):
            list(half_read)
