"""Calls without gRPC of a running service: the same rows, failures, limits and figures as over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lm_adapter import (
    AsyncVisionEncoderClient,
    CallCancelled,
    CallFailed,
    EncodedRows,
    ImageItem,
    ItemFailed,
    VisionEncoderClient,
)
from lm_adapter.errors import DeadlineExceeded, EncoderUnavailable
from tests.integration.conftest import running
from tests.integration.images import photo
from tests.integration.test_service import figures
from tests.integration.test_shared_memory import Shared, sharing
from tests.unit.transport.broker_rig import socket_folder, wait_until

SETTINGS = {"device_arena_bytes": 0, "tokens": {"shut": "secret"}, "max_items_per_request": 8}
ENCODES = 've_local_calls_total{method="Encode"}'
FETCHES = 've_local_calls_total{method="Fetch"}'


@pytest.fixture(scope="module")
def module_shared(checkpoints: dict[str, Path], device: torch.device) -> Iterator[Shared]:
    with sharing(checkpoints["qwen3_vl"], device, **SETTINGS) as found:
        yield found


@pytest.fixture
def shared(module_shared: Shared) -> Iterator[Shared]:
    yield module_shared
    module_shared.check()


def connected(shared: Shared, **given: object) -> VisionEncoderClient:
    """Every item is asked for by a call, unless a test wants otherwise."""
    given = {"directory": False, "hash_items": "off", "timeout_s": 60, **given}
    client = VisionEncoderClient(shared.service.target, **given)  # type: ignore[arg-type]
    assert client.wait_transport().name == "host"
    return client


def count(shared: Shared, name: str) -> float:
    return figures(shared.service).get(name, 0.0)


def payload(rows: object) -> bytes:
    assert isinstance(rows, EncodedRows), rows
    return np.asarray(rows.payload).tobytes()


def test_rows_are_those_of_grpc_and_calls_are_counted(shared: Shared) -> None:
    items = [ImageItem(photo(40 + 8 * number, 56)) for number in range(5)]
    before, requests = count(shared, ENCODES), count(shared, 've_requests_total{method="Encode",status="OK"}')
    with connected(shared) as local, connected(shared, local_calls=False) as by_grpc:
        found = local.encode(items)
        assert count(shared, ENCODES) == before + 1
        same = by_grpc.encode(items)
        assert count(shared, ENCODES) == before + 1
        assert count(shared, 've_requests_total{method="Encode",status="OK"}') == requests + 2
        assert [payload(rows) for rows in found] == [payload(rows) for rows in same]
        for rows, other in zip(found, same, strict=True):
            assert isinstance(rows, EncodedRows)
            assert isinstance(other, EncodedRows)
            assert (rows.key, rows.content_digest, rows.grid_thw, rows.timings.tower_ms > 0) == (
                other.key, other.content_digest, other.grid_thw, True,
            )  # fmt: skip
        keys = [rows.key for rows in found if isinstance(rows, EncodedRows)]
        fetches = count(shared, FETCHES)
        with connected(shared) as other_client:
            other_client._session.resident.failed = lambda _: None  # type: ignore[method-assign]
            other_client._session.resident.link = lambda _: None  # type: ignore[method-assign, assignment]
            assert [payload(rows) for rows in other_client.fetch(keys)] == [payload(rows) for rows in found]
        assert count(shared, FETCHES) == fetches + 1


def test_a_loop_calls_likewise(shared: Shared) -> None:
    async def run() -> None:
        async with AsyncVisionEncoderClient(
            shared.service.target, timeout_s=60, directory=False, hash_items="off"
        ) as client:
            assert (await client.wait_transport()).name == "host"
            before = count(shared, ENCODES)
            photos = [photo(48, 48 + 8 * (number % 4)) for number in range(32)]
            found = await asyncio.gather(*(client.encode_one(ImageItem(data)) for data in photos))
            assert count(shared, ENCODES) == before + len(photos)
            with connected(shared, local_calls=False) as by_grpc:
                same = by_grpc.encode([ImageItem(data) for data in photos[:8]])
            assert [payload(rows) for rows in found[:8]] == [payload(rows) for rows in same]

    asyncio.run(run())


def test_failures_are_those_of_grpc(shared: Shared) -> None:
    """Of an item, of a call, of a namespace that is shut, of a model that is not served."""

    def failures(**given: object) -> list[object]:
        found: list[object] = []
        with connected(shared, **given) as client:
            outcome = client.encode([ImageItem(b"no image")])[0]
            assert isinstance(outcome, ItemFailed)
            found.append((outcome.reason, outcome.message, outcome.retryable))
            client._session.info = replace(
                client.info(), limits=replace(client.info().limits, max_items_per_request=0)
            )
            for items in ([ImageItem(photo())] * 9,):
                with pytest.raises(CallFailed) as refused:
                    client.encode(items)
                found.append((type(refused.value), refused.value.reason, refused.value.retryable))
        for wrong in ({"namespace": "shut"}, {"model": "other"}):
            with connected(shared, **given) as client:
                client._session.namespace = str(wrong.get("namespace", ""))
                client._session.model = str(wrong.get("model", ""))
                with pytest.raises(CallFailed) as refused:
                    client.encode([ImageItem(photo())])
                found.append((type(refused.value), refused.value.reason, refused.value.message))
        return found

    before = count(shared, ENCODES)
    local = failures()
    assert count(shared, ENCODES) == before + 4
    assert local == failures(local_calls=False)


def test_a_caller_that_leaves_frees_what_it_had(shared: Shared) -> None:
    gate = shared.service.service._gate.permits
    with connected(shared) as client:
        for _ in range(10):
            stream = client.encode_iter([ImageItem(photo(64, 64)) for _ in range(4)])
            next(stream)
            stream.close()
        wait_until(lambda: gate.num_calls == 0, 20)
        with pytest.raises(DeadlineExceeded):
            client.encode([ImageItem(photo(512, 512)) for _ in range(8)], timeout_s=0.01)
        wait_until(lambda: gate.num_calls == 0, 20)
        assert payload(client.encode_one(ImageItem(photo())))


def test_closing_a_client_ends_its_calls(shared: Shared) -> None:
    client = connected(shared)
    with ThreadPoolExecutor(1) as threads:
        ends: list[float] = []

        def many() -> BaseException | None:
            try:
                while True:
                    client.encode([ImageItem(photo(64, 64)) for _ in range(4)])
            except CallFailed as error:
                ends.append(time.monotonic())
                return error

        under_way = threads.submit(many)
        time.sleep(0.3)
        client.close()
        assert isinstance(under_way.result(20), CallCancelled)


def test_many_threads_at_once(shared: Shared) -> None:
    photos = [photo(40 + 8 * number, 40) for number in range(8)]
    with connected(shared) as client:
        expected = [payload(client.encode_one(ImageItem(data))) for data in photos]

        def many(number: int) -> None:
            for turn in range(10):
                index = (number + turn) % len(photos)
                assert payload(client.encode_one(ImageItem(photos[index]))) == expected[index]

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(many, range(16)))
        assert shared.service.service._grpc.local is not None
        assert shared.service.service._grpc.local.num_connections <= 17


def test_without_the_socket_calls_go_by_grpc(checkpoints: dict[str, Path], device: torch.device) -> None:
    with sharing(checkpoints["qwen3_vl"], device, device_arena_bytes=0, local_calls=False) as shared:
        assert shared.service.service._grpc.local is None
        with connected(shared) as client:
            assert payload(client.encode_one(ImageItem(photo())))
        assert not any(name.startswith("ve_local") for name in figures(shared.service))
    with sharing(checkpoints["qwen3_vl"], device, device_arena_bytes=0) as shared:
        local = shared.service.service._grpc.local
        assert local is not None
        Path(local.path).unlink()
        with connected(shared) as client:
            assert payload(client.encode_one(ImageItem(photo())))
        assert count(shared, ENCODES) == 0


def test_a_service_that_stops_and_one_that_follows(
    checkpoints: dict[str, Path], device: torch.device, tmp_path: Path
) -> None:
    """The client's kept connections are those of a service that is gone; the next has a socket of its own."""
    data = photo()
    with socket_folder() as folder:
        settings = {
            "broker_path": f"{folder}/broker.sock",
            "listen": (f"unix:{tmp_path}/grpc",),
            "arena_bytes": 16 << 20,
            "device_arena_bytes": 0,
        }
        with VisionEncoderClient(
            f"unix:{tmp_path}/grpc", directory=False, hash_items="off", timeout_s=20
        ) as client:
            expected = []
            for _ in range(2):
                with running(checkpoints["qwen3_vl"], device, **settings) as service:
                    client.wait_ready(60)
                    wait_until(lambda: client.wait_transport().name == "host", 30)
                    expected.append(payload(client.encode_one(ImageItem(data))))
                    assert figures(service)[ENCODES] == 1
                with pytest.raises(EncoderUnavailable):
                    client.encode_one(ImageItem(data))
            assert expected[0] == expected[1]
