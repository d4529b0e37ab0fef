"""Rows that are resident come in one round trip of the broker's socket: no gRPC call, the same rows."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import blake3
import numpy as np
import pytest
import torch

from lm_adapter import (
    AsyncVisionEncoderClient,
    DigestItem,
    EncodedRows,
    ImageItem,
    ItemFailed,
    VisionEncoderClient,
    resident_call,
)
from lm_adapter.transport.resident_fetch import fetch
from tests.integration.images import photo
from tests.integration.test_service import figures
from tests.integration.test_shared_memory import Shared, sharing
from tests.unit.transport.broker_rig import RawClient, wait_until
from vision_encoder.v1 import broker_pb2, encoder_pb2

OWN = {"alone": 1 << 20}


@pytest.fixture(scope="module")
def module_shared(checkpoints: dict[str, Path], device: torch.device) -> Iterator[Shared]:
    settings = {
        "isolated_namespaces": OWN,
        "broker_tokens": {"alone": "secret"},
        "device_arena_bytes": 0,
    }
    with sharing(checkpoints["qwen3_vl"], device, **settings) as found:
        yield found


@pytest.fixture
def shared(module_shared: Shared) -> Iterator[Shared]:
    yield module_shared
    module_shared.check()


def connected(shared: Shared, **given: object) -> VisionEncoderClient:
    """A client that leases every item: what is read without is ``test_directory_reads``'."""
    given = {"directory": False, **given}
    client = VisionEncoderClient(shared.service.target, timeout_s=60, **given)  # type: ignore[arg-type]
    assert client.wait_transport().name == "host"
    return client


def new_item() -> ImageItem:
    data = photo()
    return ImageItem(data, digest=blake3.blake3(data).digest())


class Counted:
    """What happened inside, by metric."""

    NAMES: ClassVar = {
        "fetched": "ve_broker_fetched_total",
        "missed": "ve_broker_fetch_misses_total",
        "shared": "ve_shared_deliveries_total",
        "hits": "ve_store_hits_total",
        "misses": "ve_store_misses_total",
        "items": 've_items_total{tier="host"}',
        "delivered": 've_deliveries_total{transport="host"}',
        "read": "ve_directory_reads_total",
        "stale": "ve_directory_stale_total",
        "renewed": "ve_leases_renewed_total",
        "renew": 've_requests_total{method="Renew",status="OK"}',
        "encode": 've_requests_total{method="Encode",status="OK"}',
        "fetch": 've_requests_total{method="Fetch",status="OK"}',
        "release": 've_requests_total{method="Release",status="OK"}',
    }

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def _now(self) -> dict[str, float]:
        found = figures(self._shared.service)
        return {name: found.get(metric, 0.0) for name, metric in self.NAMES.items()}

    def __enter__(self) -> dict[str, float]:
        self._before = self._now()
        self.found: dict[str, float] = {}
        return self.found

    def __exit__(self, *_: object) -> None:
        wait_until(lambda: len(self._shared.leases) == 0, "the end of every lease")
        now = self._now()
        self.found.update(
            {name: now[name] - self._before[name] for name in now if now[name] != self._before[name]}
        )


def rows_of(outcome: object) -> EncodedRows:
    assert isinstance(outcome, EncodedRows), outcome
    return outcome


def same(rows: object, others: object) -> None:
    assert torch.equal(rows_of(rows).torch(), rows_of(others).torch())
    assert rows_of(rows).grid_thw == rows_of(others).grid_thw


def test_resident_rows_come_without_any_grpc_call(shared: Shared) -> None:
    items = [new_item() for _ in range(3)]
    with connected(shared) as client:
        first = client.encode(items)
        keys = [rows_of(rows).key for rows in first]
        with Counted(shared) as counted:
            again, fetched = client.encode(items), client.fetch(keys)
        assert counted == {"fetched": 6, "shared": 6, "hits": 6, "items": 6, "delivered": 6}
        for rows, encoded, by_key in zip(first, again, fetched, strict=True):
            same(rows, encoded)
            same(rows, by_key)


def test_the_async_client_does_the_same(shared: Shared) -> None:
    items = [new_item() for _ in range(2)]

    async def main() -> None:
        async with AsyncVisionEncoderClient(shared.service.target, timeout_s=60, directory=False) as client:
            await client.wait_transport()
            first = await client.encode(items)
            keys = [rows_of(rows).key for rows in first]
            with Counted(shared) as counted:
                many = await asyncio.gather(*(client.fetch(keys) for _ in range(8)))
                again = await client.encode(items)
            assert counted == {"fetched": 18, "shared": 18, "hits": 18, "items": 18, "delivered": 18}
            for rows, *others in zip(first, again, *many, strict=True):
                for other in others:
                    same(rows, other)

    asyncio.run(main())


def test_what_is_missing_alone_goes_over_grpc(shared: Shared) -> None:
    known, new, unhashed = new_item(), new_item(), ImageItem(photo())
    with connected(shared) as client:
        (first,) = client.encode([known])
        with Counted(shared) as counted:
            outcomes = client.encode([new, known, unhashed, DigestItem(os.urandom(32))])
        assert (counted["fetched"], counted["missed"], counted["encode"]) == (1, 2, 1)
        assert counted["misses"] == 3, "what was asked for here and not found is no miss of the store twice"
        same(outcomes[1], first)
        assert isinstance(outcomes[3], ItemFailed)
        assert outcomes[3].reason == "UNKNOWN_KEY"
        fetched = client.fetch([rows_of(outcomes[2]).key, os.urandom(32), rows_of(outcomes[0]).key])
        same(fetched[0], outcomes[2])
        same(fetched[2], outcomes[0])
        assert isinstance(fetched[1], ItemFailed)


def test_buffers_keep_their_items(shared: Shared) -> None:
    known, new = new_item(), new_item()
    with connected(shared) as client:
        (first,) = client.encode([known])
        num_bytes = len(rows_of(first).payload)
        out = [np.zeros(4 * num_bytes, np.uint8) for _ in range(3)]
        outcomes = client.encode([new, known, new_item()], out=out)
        for rows, buffer in zip(outcomes, out, strict=True):
            assert np.shares_memory(rows_of(rows).payload, buffer)
        same(outcomes[1], first)


def test_more_keys_than_one_request_takes(shared: Shared) -> None:
    item = new_item()
    with connected(shared) as client:
        (first,) = client.encode([item])
        with Counted(shared) as counted:
            outcomes = client.fetch([rows_of(first).key] * 150)
        assert counted["fetched"] == 150
        for outcome in outcomes:
            same(outcome, first)


def test_p25_many_threads_of_one_client(shared: Shared) -> None:
    items = [new_item() for _ in range(4)]
    with connected(shared) as client:
        first = client.encode(items)
        go = threading.Barrier(8)

        def work(worker: int) -> None:
            go.wait(20)
            for turn in range(60):
                index = (worker + turn) % 4
                if turn % 3:
                    (rows,) = client.fetch([rows_of(first[index]).key])
                else:
                    (rows,) = client.encode([items[index]])
                same(rows, first[index])

        with Counted(shared) as counted, ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert counted["fetched"] == 480
        assert "fetch" not in counted
        assert "encode" not in counted


def test_each_of_several_readers_gives_its_lease_back(shared: Shared) -> None:
    with connected(shared) as client, connected(shared) as other:
        (first,) = client.encode([new_item()])
        key = rows_of(first).key
        (rows,) = client.fetch([key], num_readers=2)
        record = rows_of(rows).shared
        assert record is not None
        assert record.transport == "host"
        wait_until(lambda: len(shared.leases) == 1, "the first reader's release")
        same(other.read_shared(record, reader=1), first)
        wait_until(lambda: len(shared.leases) == 0, "the second reader's release")


def test_p18_an_isolated_namespace_finds_its_own_rows_alone(shared: Shared) -> None:
    item = new_item()
    with connected(shared) as everyone, connected(shared, namespace="alone", token="secret") as alone:
        (public,) = everyone.encode([item])
        with Counted(shared) as counted:
            (own,) = alone.encode([item])
            outcome = alone.fetch([rows_of(public).key])[0]
        assert counted["missed"] == 2
        assert "fetched" not in counted
        assert isinstance(outcome, ItemFailed)
        with Counted(shared) as counted:
            same(alone.encode([item])[0], own)
        assert counted["fetched"] == 1


def test_p21_leases_end_with_the_connection_they_were_fetched_over(shared: Shared) -> None:
    with connected(shared) as client:
        (rows,) = client.encode([new_item()])
        key = rows_of(rows).key
    request = broker_pb2.BrokerFetch(keys=[key], kind=broker_pb2.ARENA_KIND_HOST, lease_ms=200_000)
    wait_until(lambda: len(shared.leases) == 0, "the end of the first lease")
    with RawClient(shared.broker_path) as raw:
        (found,) = raw.ask(fetch=request).fetched.items
        assert found.result.key == key
        assert len(shared.leases) == 1
    wait_until(lambda: len(shared.leases) == 0, "the end of the lease")


def test_p21_a_client_that_leaves_in_mid_fetch_leaves_no_lease(shared: Shared) -> None:
    with connected(shared) as client:
        (rows,) = client.encode([new_item()])
    request = broker_pb2.BrokerFetch(keys=[rows_of(rows).key], kind=broker_pb2.ARENA_KIND_HOST)
    for _ in range(20):
        with RawClient(shared.broker_path) as raw:
            raw.socket.sendall(raw.frame(fetch=request) * 3)
    wait_until(lambda: shared.memory.broker.num_connections == 0, "their end")


def test_an_answer_that_comes_too_late_gives_its_leases_back(shared: Shared) -> None:
    with connected(shared) as client:
        (rows,) = client.encode([new_item()])
        broker = client._session.transports._broker
        assert broker is not None
        link = broker.fetch_link()
        assert link is not None
        request = broker_pb2.BrokerFetch(
            keys=[rows_of(rows).key], kind=broker_pb2.ARENA_KIND_HOST, num_readers=3, lease_ms=200_000
        )
        entered, leave = threading.Event(), threading.Event()
        granted = shared.leases.counters.granted

        def stuck() -> None:
            entered.set()
            leave.wait(20)

        shared.service.loop.call_soon_threadsafe(stuck)
        assert entered.wait(20)
        try:
            with pytest.raises(Exception, match="no leases of the broker within") as caught:
                fetch(link, request, 0.05)
            assert caught.value.reason == "TIMEOUT"  # type: ignore[attr-defined]
        finally:
            leave.set()
        wait_until(lambda: shared.leases.counters.granted == granted + 1, "the late answer")
        wait_until(lambda: len(shared.leases) == 0, "its way back")


def test_requests_without_meaning_fail_alone(shared: Shared) -> None:
    with RawClient(shared.broker_path) as raw:
        keys = [os.urandom(32)]
        for request in (
            broker_pb2.BrokerFetch(keys=keys),
            broker_pb2.BrokerFetch(keys=keys, kind=9),  # type: ignore[arg-type]
            broker_pb2.BrokerFetch(keys=keys, kind=broker_pb2.ARENA_KIND_HOST, num_readers=257),
        ):
            assert raw.ask(fetch=request).failure.reason == "INVALID_REQUEST"
        request = broker_pb2.BrokerFetch(keys=keys, kind=broker_pb2.ARENA_KIND_DEVICE)
        (absent,) = raw.ask(fetch=request).fetched.items
        assert not absent.HasField("result")
        release = encoder_pb2.ReleaseRequest(lease_ids=[os.urandom(16)])
        raw.socket.sendall(raw.frame(release=release))
        assert raw.ask(ping=broker_pb2.BrokerPing()).HasField("pong"), "unknown leases are no failure"


def test_an_older_broker_is_not_asked(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.memory.broker._desk, "fetches", None)
    item = new_item()
    with connected(shared) as client:
        (first,) = client.encode([item])
        failed = shared.memory.broker.counters.failed.total()
        with Counted(shared) as counted:
            same(client.encode([item])[0], first)
            same(client.fetch([rows_of(first).key])[0], first)
        assert (counted["encode"], counted["fetch"], counted["shared"]) == (1, 1, 2)
        assert counted["release"] >= 1
        assert shared.memory.broker.counters.failed.total() == failed


def test_a_broker_that_refuses_is_asked_once_and_rows_come_over_grpc(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = new_item()
    with connected(shared) as client:
        (first,) = client.encode([item])
        wait_until(lambda: len(shared.leases) == 0, "the first release")
        monkeypatch.setattr(shared.memory.broker._desk, "fetches", None)
        failed = shared.memory.broker.counters.failed
        before = failed["UNKNOWN_REQUEST"]
        outcomes = [client.fetch([rows_of(first).key])[0] for _ in range(3)]
        for outcome in outcomes:
            same(outcome, first)
        # A fetch, and the releases, which nobody tells apart here: they end with the connection.
        assert failed["UNKNOWN_REQUEST"] <= before + 4
        fetched = shared.memory.broker.counters.fetch_misses
        monkeypatch.undo()
        same(client.fetch([rows_of(first).key])[0], first)
        assert shared.memory.broker.counters.fetch_misses == fetched


def test_a_stuck_service_is_left_to_grpc(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer over the socket within the time: gRPC is asked, and what came late goes back."""
    monkeypatch.setattr(resident_call, "TIMEOUT_S", 0.05)
    desk = shared.memory.fetches
    answer = desk.answer
    assert answer is not None
    late: list[object] = []

    def slow(*request: object) -> bool:
        late.append(request)
        time.sleep(0.2)
        return answer(*request)  # type: ignore[arg-type]

    with connected(shared) as client:
        (first,) = client.encode([new_item()])
        wait_until(lambda: len(shared.leases) == 0, "the first release")
        monkeypatch.setattr(desk, "answer", slow)
        same(client.fetch([rows_of(first).key])[0], first)
        assert late
        monkeypatch.undo()
        wait_until(lambda: len(shared.leases) == 0, "every release")
