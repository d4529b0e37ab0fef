"""Both faces of the fleet client where something beside the replicas is wrong: names, arguments, weights, the
caller itself."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from lm_adapter import AsyncFleetClient, EncodedRows, FleetClient, FleetSettings, InvalidRequest
from lm_adapter.errors import DeadlineExceeded
from lm_adapter.fake_service import FakeService
from lm_adapter.testing import FakeEncoder, FakeScript, Fault, fake_model
from lm_adapter.transport.channel import ClientTls
from tests.certificates import Authority
from tests.fleet.faces import NO_HEDGES, homes_of, image, is_right, targets
from tests.fleet.rig import QUICK, loopback_fleet


@contextlib.contextmanager
def takes_connections_and_says_nothing() -> Iterator[str]:
    with socket.create_server(("127.0.0.9", 0)) as listening:
        yield "{}:{}".format(*listening.getsockname())


def test_rows_of_other_weights_do_not_come_even_where_there_are_no_others(face: Callable[..., Any]) -> None:
    old, new = fake_model(), fake_model(model_fingerprint=b"n" * 32)
    settings = FleetSettings(check_interval_s=0.1, backoff_s=0.01, patience_s=0.1, check_timeout_s=1.0)
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(FakeEncoder(script=FakeScript(model=one))) for one in (old, new)]
        fingerprint = old.model_fingerprint
        with face(targets(fakes), fingerprint=fingerprint, settings=settings) as client:
            client.wait_ready(10)
            fakes[0].stop()
            outcomes = client.encode([image() for _ in range(5)], timeout_s=5)
            assert not any(isinstance(one, EncodedRows) for one in outcomes)
        with face(targets(fakes)[1:], fingerprint=fingerprint, settings=settings) as client:
            (outcome,) = client.encode([image()], timeout_s=5)
            assert outcome.reason == "NO_ENDPOINTS"
            assert "other weights" in outcome.message
    assert fakes[1].num_calls["Encode"] == 0


def test_one_replica_that_says_nothing_does_not_fail_the_first_call(
    face: Callable[..., Any], fakes: list[FakeEncoder]
) -> None:
    settings = FleetSettings(check_timeout_s=30.0)
    items = [image() for _ in range(8)]
    with (
        takes_connections_and_says_nothing() as silent,
        face([silent, *targets(fakes)], settings=settings) as client,
    ):
        outcomes = client.encode(items, timeout_s=3)
    assert all(map(is_right, outcomes, items))


@pytest.mark.anyio
async def test_a_partition_does_not_cost_a_fetch_its_deadline() -> None:
    """Of rows that lie elsewhere: everybody is asked for them, and one does not answer."""
    settings = replace(QUICK, check_timeout_s=1.0)
    async with loopback_fleet(3) as fleet, AsyncFleetClient(fleet.endpoints, settings=settings) as client:
        await client.wait_ready(10, num_replicas=3)
        items = homes_of(client, 3)
        rows = [await client.encode_one(item) for item in items.values()]
        held = [
            one.key for one, target in zip(rows, items, strict=True) if target != fleet.replicas[0].target
        ]
        fleet.replicas[0].wire.block()
        begun_s = time.monotonic()
        outcomes = await client.fetch(held, timeout_s=20)
        assert time.monotonic() - begun_s < 5
    assert len(held) == 2
    assert all(isinstance(one, EncodedRows) for one in outcomes)


def test_rows_that_one_replica_sends_wrong_come_from_another(
    face: Callable[..., Any], fakes: list[FakeEncoder]
) -> None:
    with face(targets(fakes), settings=NO_HEDGES) as client:
        client.wait_ready(10, num_replicas=3)
        item = homes_of(client, 3)[fakes[0].target]
        assert item.digest is not None
        fakes[0].script.faults[item.digest] = Fault.WRONG_WIDTH
        assert is_right(client.encode_one(item), item)
        assert client.counts.retries == 1


def test_a_caller_that_is_told_of_rows_as_they_come_hears_of_one_attempt(
    face: Callable[..., Any], fakes: list[FakeEncoder]
) -> None:
    settings = FleetSettings(hedge_min_s=0.0, hedge_max_s=0.0, check_timeout_s=1.0)
    for one in fakes:
        one.script.latency_s = 0.05
    told: list[int] = []
    items = [image() for _ in range(6)]
    with face(targets(fakes), settings=settings) as client:
        outcomes = client.encode(items, on_rows=lambda index, _rows, _num: told.append(index))
        assert client.counts.hedges == 0
    assert all(map(is_right, outcomes, items))
    assert sorted(told) == list(range(6))


def test_what_is_prefetched_says_nothing_of_how_long_rows_take(
    face: Callable[..., Any], fakes: list[FakeEncoder]
) -> None:
    settings = FleetSettings(hedge_min_s=0.01, hedge_max_s=30.0, check_timeout_s=1.0)
    with face(targets(fakes), settings=settings) as client:
        client.prefetch([image() for _ in range(40)])
        for one in fakes:
            one.script.latency_s = 0.2
        item = image()
        assert is_right(client.encode_one(item), item)
        assert client.counts.hedges == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"transports": ("pigeon",)}, "pigeon"),
        ({"token": "two words"}, "token"),
        ({"tls": ClientTls(ca="/nowhere/ca.pem")}, "cannot read /nowhere/ca.pem"),
    ],
    ids=["transports", "token", "tls"],
)
def test_arguments_that_cannot_be_are_said_when_the_client_is_made(
    face: Callable[..., Any], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        face(["127.0.0.1:1"], **arguments)


def test_replicas_by_address_with_tls_and_one_name_in_their_certificates(
    face: Callable[..., Any], tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("server", "encoder.test")
    credentials = grpc.ssl_server_credentials([(files.key.read_bytes(), files.cert.read_bytes())])
    servers, listed = [], []
    for number in (2, 3):
        server = grpc.server(ThreadPoolExecutor(8), handlers=FakeService(FakeScript()).handlers())
        listed.append(f"127.0.0.{number}:{server.add_secure_port(f'127.0.0.{number}:0', credentials)}")
        server.start()
        servers.append(server)
    try:
        tls = ClientTls(ca=authority.ca, server_name="encoder.test")
        with face(listed, tls=tls) as client:
            authority.ca.unlink()  # what was read stays, for replicas that are opened later too
            client.wait_ready(10, num_replicas=2)
            items = [image() for _ in range(8)]
            assert all(map(is_right, client.encode(items), items))
        stranger = face(listed, tls=ClientTls(server_name="encoder.test"))
        with stranger, pytest.raises(DeadlineExceeded, match="0 replicas were up"):
            stranger.wait_ready(0.3)
    finally:
        for server in servers:
            server.stop(None).wait()


def test_a_name_server_that_hangs_ends_no_call_late_and_does_not_hold_up_the_close(
    face: Callable[..., Any],
) -> None:
    go_on = threading.Event()

    def names() -> list[str]:
        go_on.wait(60)
        return []

    try:
        begun_s = time.monotonic()
        with face(names, settings=FleetSettings(patience_s=0.1)) as client:
            (outcome,) = client.encode([image()], timeout_s=1)
            assert outcome.reason in ("NO_ENDPOINTS", "DEADLINE_EXCEEDED")
            assert client.prefetch([image()], timeout_s=0.3)[0].reason == "NO_ENDPOINTS"
        assert time.monotonic() - begun_s < 10
    finally:
        go_on.set()


def test_a_thread_that_is_interrupted_in_a_call_hears_of_that(fakes: list[FakeEncoder]) -> None:
    """And of nothing that the ending of the call came across."""

    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    for one in fakes:
        one.script.latency_s = 20.0
    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        while not sum(one.num_calls["Encode"] for one in fakes):
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGUSR1)

    try:
        with FleetClient(targets(fakes)) as client:
            sending = threading.Thread(target=send)
            sending.start()
            with pytest.raises(Interrupt):
                client.encode([image(secrets.token_bytes(32)) for _ in range(6)], timeout_s=60)
            sending.join()
            for one in fakes:
                one.script.latency_s = 0.0
            item = image()
            assert is_right(client.encode_one(item), item)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_call_on_the_clients_own_thread_is_refused_and_does_not_wait_for_itself(
    fakes: list[FakeEncoder],
) -> None:
    said: list[str] = []
    with FleetClient(targets(fakes)) as client:

        def tell(*_: object) -> None:
            for call in (client.info, client.close):
                with pytest.raises(InvalidRequest) as refused:
                    call()
                said.append(refused.value.message)

        item = image()
        assert is_right(client.encode([item], on_rows=tell)[0], item)
    assert len(said) == 2
    assert all("would wait for itself" in one for one in said)


def test_a_stream_that_is_dropped_on_the_clients_own_thread_ends_its_call(fakes: list[FakeEncoder]) -> None:
    """As the garbage collector may, which runs on any thread."""
    items = [image() for _ in range(12)]
    closed = threading.Event()
    with FleetClient(targets(fakes), settings=NO_HEDGES) as client:
        client.wait_ready(10, num_replicas=3)
        for one in fakes[1:]:
            one.script.latency_s = 30.0
        stream = client.encode_iter([*homes_of(client, 3).values(), *items], timeout_s=60)
        next(stream)

        def drop() -> None:
            stream.close()
            closed.set()

        client._loop.call_soon_threadsafe(drop)
        assert closed.wait(5)
        ends_s = time.monotonic() + 10
        while sum(one.num_cancelled["Encode"] for one in fakes) < 2:
            assert time.monotonic() < ends_s, "the call goes on"
            time.sleep(0.01)
