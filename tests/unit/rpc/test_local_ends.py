"""Calls without gRPC that end in odd ways: nobody is left waiting, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from encoder_service.rpc import local_server
from encoder_service.rpc.local_connection import LocalBounds
from lm_adapter.transport.local_calls import LocalCalls
from tests.unit.rpc.local_rig import (
    ASKS,
    HEADER,
    PREAMBLE,
    Ask,
    LocalRig,
    ask,
    frame,
    head,
    local_rig,
    message,
    read_all,
    reply,
    until,
)
from vision_encoder.v1 import broker_pb2 as pb


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service looks often at what takes too long."""
    monkeypatch.setattr(local_server, "CHECK_S", 0.02)


# -- handlers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ASKS)
def test_a_handler_that_is_cancelled_from_within_ends_its_call(
    rig: LocalRig, calls: LocalCalls, ask: Ask
) -> None:
    """Its caller has not left: a future that it waited for was cancelled."""
    assert ask(calls, rig.path, "EndItself").code is grpc.StatusCode.CANCELLED
    assert ask(calls, rig.path, "Echo").messages == [b"question"]


@pytest.mark.parametrize("kind", [b"text", b"metadata"])
def test_an_end_that_no_frame_can_carry_is_an_end_all_the_same(
    rig: LocalRig, calls: LocalCalls, kind: bytes
) -> None:
    found = ask(calls, rig.path, "AbortOddly", kind)
    assert found.code is grpc.StatusCode.INTERNAL
    assert ask(calls, rig.path, "Echo").messages == [b"question"]


@pytest.mark.parametrize(
    ("method", "request_", "num_bytes"),
    [("Unary", b"x" * 998 + "\u0149".encode(), 1001), ("Double", bytes(600), 1200)],
)
def test_what_a_handler_writes_has_the_bound_that_grpc_has(
    folder: Path, calls: LocalCalls, method: str, request_: bytes, num_bytes: int
) -> None:
    """One letter's capital has two letters, and a byte more."""
    with local_rig(folder, LocalBounds(max_message_bytes=1000)) as rig:
        found = ask(calls, rig.path, method, request_)
        assert found.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert found.error is not None
        assert f"Sent message larger than max ({num_bytes} vs. 1000)" in found.error.details()
        assert ask(calls, rig.path, method, b"x" * 500).code is grpc.StatusCode.OK


# -- what a client may leave half done -----------------------------------------------------------------------


def big_answer(connection: socket.socket) -> None:
    """Asks for one of which the kernel takes no more than a part."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(PREAMBLE + head("Echo") + message(bytes(20 << 20)))


@pytest.mark.usefixtures("often")
def test_a_reader_that_is_slow_with_one_message_is_no_client_that_does_not_read(folder: Path) -> None:
    with local_rig(folder, LocalBounds(stuck_s=1.0)) as rig, rig.raw() as connection:
        big_answer(connection)
        num_bytes, started_s = 0, time.monotonic()
        while num_bytes < 20 << 20:
            data = connection.recv(1 << 20)
            assert data, "it was left"
            num_bytes += len(data)
            if time.monotonic() - started_s < 3:
                time.sleep(0.05)
        assert rig.closed_for("not_reading") == 0


def fill(connection: socket.socket, rig: LocalRig, num_bytes: int) -> int:
    """Has answers that nobody reads wait, as many as it takes for so many bytes of them, which stay below
    what holds a handler back."""
    num_calls = 0
    connection.sendall(PREAMBLE)
    while rig.waiting_bytes() < num_bytes:
        connection.sendall(head("Echo") + message(bytes(9000)))
        num_calls += 1
        until(lambda: rig.server.counters.calls["Echo"] == num_calls and not any(  # noqa: B023
            each.call for each in rig.server._connections
        ))  # fmt: skip
    return num_calls


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("leaves", ["stays", "half"])
def test_an_idle_client_that_leaves_its_answers_unread_is_closed(folder: Path, leaves: str) -> None:
    """Those below what holds a handler back: nothing waits for them but the connection's end."""
    with local_rig(folder, LocalBounds(idle_s=0.5, stuck_s=0.5)) as rig, rig.raw() as connection:
        fill(connection, rig, 1000)
        if leaves == "half":
            connection.shutdown(socket.SHUT_WR)
        until(lambda: rig.server.num_connections == 0)
        assert sum(rig.server.counters.closed.values()) <= 2


@pytest.mark.usefixtures("often")
def test_a_call_of_a_client_that_half_closes_is_given_up(rig: LocalRig) -> None:
    with rig.raw() as connection:
        fill(connection, rig, 1000)
        connection.sendall(head("Wait") + message())
        until(lambda: rig.handlers.events == ["waits"])
        connection.shutdown(socket.SHUT_WR)
        until(lambda: rig.handlers.events == ["waits", "cancelled"])


def test_a_call_that_is_cut_while_nobody_reads_holds_the_next_back(folder: Path) -> None:
    with local_rig(folder, LocalBounds(stuck_s=60)) as rig, rig.raw() as connection:
        connection.sendall(PREAMBLE + head("Flood", timeout_us=200_000) + message(b"1000"))
        until(lambda: rig.waiting_bytes() > 1 << 16)
        time.sleep(0.5)
        waiting = rig.waiting_bytes()
        connection.settimeout(0.2)
        try:
            for _ in range(20):
                connection.sendall(head("Echo") + message(bytes(60_000)))
                time.sleep(0.02)
        except OSError:
            pass
        assert rig.waiting_bytes() <= waiting + 1000


def test_a_client_that_reads_late_finds_the_end_of_a_call_that_was_cut(rig: LocalRig) -> None:
    with rig.raw() as connection:
        connection.sendall(PREAMBLE + head("Flood", timeout_us=200_000) + message(b"1000"))
        until(lambda: rig.waiting_bytes() > 1 << 16)
        time.sleep(0.4)
        found = b""
        while DEADLINE_END not in found:
            data = connection.recv(1 << 16)
            assert data
            found = found[-1000:] + data
        connection.sendall(head("Echo") + message(b"next"))
        assert reply(connection)[HEADER.size :].startswith(b"next")


DEADLINE_END = frame(
    pb.LOCAL_FRAME_END,
    pb.LocalCallEnd(
        status=grpc.StatusCode.DEADLINE_EXCEEDED.value[0], details="Deadline Exceeded"
    ).SerializeToString(),
)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("said", [PREAMBLE[:-1], PREAMBLE + head("x" * 40)], ids=["hello", "head"])
def test_a_head_that_comes_byte_by_byte_has_its_time_as_a_whole(folder: Path, said: bytes) -> None:
    with local_rig(folder, LocalBounds(head_s=0.5)) as rig, rig.raw() as connection:
        started_s = time.monotonic()
        for byte in said:
            connection.sendall(bytes([byte]))
            time.sleep(0.3)
            if rig.closed_for("idle"):
                break
        assert time.monotonic() - started_s < 2.5
        assert rig.closed_for("idle") == 1


# -- the service's start and end -----------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ASKS)
def test_a_service_that_has_not_started_takes_no_call(folder: Path, calls: LocalCalls, ask: Ask) -> None:
    """It holds the path from the start; clients of the one before may come while the model loads."""
    with local_rig(folder, starts=False) as rig:
        started_s = time.monotonic()
        found = ask(calls, rig.path, "Echo", timeout_s=3.0)
        assert found.error is not None
        assert found.error.details() == "by gRPC"
        assert time.monotonic() - started_s < 2.5
        rig.start()
        with rig.raw() as connection:
            connection.sendall(PREAMBLE + head("Echo") + message())
            assert reply(connection).startswith(message())


def test_a_service_that_stops_before_its_start_leaves_nothing(folder: Path) -> None:
    with local_rig(folder, starts=False) as rig, rig.raw() as connection:
        rig.on_loop(rig.server.stop(0))
        rig.on_loop(rig.server.stop(0))
        assert read_all(connection) == b""
        assert not os.path.exists(rig.path)


@pytest.mark.parametrize("turns", range(6))
def test_a_connection_of_the_last_moment_is_closed(rig: LocalRig, calls: LocalCalls, turns: int) -> None:
    """Whatever has become of it by then; also where a call keeps the service from its end."""

    async def connect_and_stop(connection: socket.socket) -> None:
        connection.connect(rig.path)
        for _ in range(turns):
            await asyncio.sleep(0)
        stopping.set()
        await rig.server.stop(3)

    stopping = threading.Event()

    with ThreadPoolExecutor(1) as threads, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        under_way = threads.submit(ask, calls, rig.path, "Wait")
        until(lambda: rig.handlers.events == ["waits"])
        stopped = rig.later(connect_and_stop(connection))
        assert stopping.wait(20)
        connection.settimeout(1)
        assert read_all(connection) == b""
        rig.handlers.go_on.set()
        stopped.result(20)
        assert under_way.result(20).messages == [b"went on"]


def test_a_stop_waits_for_handlers_that_it_has_cut_off(rig: LocalRig, calls: LocalCalls) -> None:
    """As long as they clean up, within its bound: nothing of a call is left for the loop's end."""
    with ThreadPoolExecutor(1) as threads, rig.raw() as connection:
        under_way = threads.submit(ask, calls, rig.path, "Wait")
        connection.sendall(PREAMBLE + head("Flood") + message(b"1000"))
        until(lambda: rig.waiting_bytes() > 1 << 16 and "waits" in rig.handlers.events)
        tasks = [each.call for each in rig.server._connections]
        rig.on_loop(rig.server.stop(0.05))
        assert all(task is not None and task.done() for task in tasks)
        assert under_way.result(20).code is grpc.StatusCode.UNAVAILABLE


def test_a_stop_ends_connections_whose_answers_nobody_reads(rig: LocalRig) -> None:
    with rig.raw() as connection:
        fill(connection, rig, 1000)
        rig.on_loop(rig.server.stop(0))
        assert rig.server.num_connections == 0
