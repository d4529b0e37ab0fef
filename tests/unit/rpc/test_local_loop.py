"""Calls without gRPC on event loops: how a loop keeps and reads its connections, asyncio's and uvloop's."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from lm_adapter.transport.local_calls import LocalCalls
from lm_adapter.transport.local_frames import LocalError
from lm_adapter.transport.local_loop import LoopCall
from tests.unit.rpc.local_rig import PREAMBLE, LocalRig, frame, message, no_grpc, until
from vision_encoder.v1 import broker_pb2 as pb

END = frame(pb.LOCAL_FRAME_END, b"")
Run = Callable[[Awaitable[None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs one coroutine in a loop of its own."""
    factory: Any = asyncio.new_event_loop
    if request.param == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop

    def run(work: Any) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(work)

    return run


@pytest.fixture
def listener(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(str(folder / "calls"))
        made.listen()
        made.settimeout(20)
        yield made


def begun(calls: LocalCalls, path: str, method: str = "Echo", timeout_s: float = 20.0) -> LoopCall:
    found = calls.begin_on_loop(path, method, b"question", timeout_s, (), no_grpc)
    assert isinstance(found, LoopCall)
    return found


async def answer_of(call: LoopCall) -> list[bytes]:
    try:
        return [each async for each in call]
    finally:
        call.cancel()


@asynccontextmanager
async def accepted(listener: socket.socket) -> AsyncIterator[socket.socket]:
    connection, _ = await asyncio.to_thread(listener.accept)
    with connection:
        connection.settimeout(20)
        yield connection


def test_a_connection_stays_known_to_its_loop(rig: LocalRig, calls: LocalCalls, run: Run) -> None:
    async def work() -> None:
        loop: Any = asyncio.get_running_loop()
        added: list[int] = []
        real = loop.add_reader
        if isinstance(loop, asyncio.SelectorEventLoop):
            loop.add_reader = lambda fd, *rest: (added.append(fd), real(fd, *rest))
        for _ in range(5):
            assert await answer_of(begun(calls, rig.path)) == [b"question"]
        assert len(added) <= 1
        assert rig.server.num_connections == 1

    run(work())


def test_an_answer_in_pieces(listener: socket.socket, calls: LocalCalls, run: Run) -> None:
    async def work() -> None:
        asked = asyncio.ensure_future(answer_of(begun(calls, listener.getsockname())))
        async with accepted(listener) as encoder:
            for byte in PREAMBLE + message(b"first") + message(b"second") + END:
                encoder.sendall(bytes([byte]))
                await asyncio.sleep(0.002)
            assert await asked == [b"first", b"second"]
            # Rows are handed out before the end has come; the connection waits for it.
            call = begun(calls, listener.getsockname())
            encoder.recv(1 << 16)
            await asyncio.to_thread(encoder.sendall, message(b"rows"))
            assert await anext(call) == b"rows"
            ending = asyncio.ensure_future(answer_of(call))
            await asyncio.sleep(0.02)
            assert not ending.done()
            encoder.sendall(END)
            assert await ending == []
            assert len(calls._idle) == 1

    run(work())


@pytest.mark.parametrize("last", [b"", b"more"], ids=["closes", "goes-on"])
def test_a_kept_connection_on_which_something_happened_is_not_used(
    listener: socket.socket, calls: LocalCalls, run: Run, last: bytes
) -> None:
    path = listener.getsockname()

    async def work() -> None:
        asked = asyncio.ensure_future(answer_of(begun(calls, path)))
        async with accepted(listener) as encoder:
            encoder.recv(1 << 16)
            encoder.sendall(PREAMBLE + END)
            assert await asked == []
            (kept,) = calls._idle
            if last:
                encoder.sendall(last)
        await asyncio.sleep(0.02)  # the loop sees it, and does not look again and again
        asked = asyncio.ensure_future(answer_of(begun(calls, path)))
        async with accepted(listener) as encoder:
            encoder.recv(1 << 16)
            encoder.sendall(PREAMBLE + message(b"new") + END)
            assert await asked == [b"new"]
        assert kept.socket.fileno() < 0

    run(work())


def test_a_call_that_is_cancelled_in_the_middle_takes_its_connection_along(
    listener: socket.socket, calls: LocalCalls, run: Run
) -> None:
    path = listener.getsockname()

    async def work() -> None:
        asked = asyncio.ensure_future(answer_of(begun(calls, path)))
        async with accepted(listener) as encoder:
            encoder.recv(1 << 16)
            encoder.sendall(PREAMBLE + message(b"first") + message(b"second")[:7])
            await asyncio.sleep(0.02)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert await asyncio.to_thread(encoder.recv, 1) == b"", "the encoder learns of it"
        assert not calls._idle
        assert not calls._in_use
        asked = asyncio.ensure_future(answer_of(begun(calls, path)))
        async with accepted(listener) as encoder:
            encoder.recv(1 << 16)
            encoder.sendall(PREAMBLE + message(b"whole") + END)
            assert await asked == [b"whole"]

    run(work())


def test_a_deadline_is_of_the_whole_call(listener: socket.socket, calls: LocalCalls, run: Run) -> None:
    async def work() -> None:
        started_s = time.monotonic()
        asked = asyncio.ensure_future(answer_of(begun(calls, listener.getsockname(), timeout_s=0.3)))
        async with accepted(listener) as encoder:
            encoder.sendall(PREAMBLE)
            while not asked.done():  # it never stops, and never ends
                encoder.sendall(message(b"more"))
                await asyncio.sleep(0.01)
            with pytest.raises(LocalError) as late:
                await asked
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert 0.25 < time.monotonic() - started_s < 10

    run(work())


def test_a_deadline_ends_a_request_that_nobody_reads(
    listener: socket.socket, calls: LocalCalls, run: Run
) -> None:
    async def work() -> None:
        call = calls.begin_on_loop(listener.getsockname(), "Echo", bytes(16 << 20), 0.2, (), no_grpc)
        async with accepted(listener):
            with pytest.raises(LocalError) as late:
                await answer_of(call)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    run(work())


def test_what_nobody_takes_stays_with_the_encoder(rig: LocalRig, calls: LocalCalls, run: Run) -> None:
    async def work() -> None:
        call = calls.begin_on_loop(rig.path, "Flood", b"1000", 20, (), no_grpc)
        assert len(await anext(call)) == 1 << 16
        await asyncio.sleep(0.2)
        assert len(rig.handlers.events) < 100, "it is not read ahead of its reader"
        call.cancel()

    run(work())
    until(lambda: rig.server.num_connections == 0)


def test_a_connection_outlives_its_loop(rig: LocalRig, calls: LocalCalls, run: Run) -> None:
    async def work() -> None:
        assert await answer_of(begun(calls, rig.path)) == [b"question"]

    for _ in range(3):
        run(work())
    assert rig.server.num_connections == 1


def test_another_loops_connection_is_not_taken_while_that_loop_lives(
    rig: LocalRig, calls: LocalCalls, run: Run
) -> None:
    begin, go_on = threading.Event(), threading.Event()

    async def first() -> None:
        assert await answer_of(begun(calls, rig.path)) == [b"question"]
        begin.set()
        await asyncio.to_thread(go_on.wait, 20)
        assert await answer_of(begun(calls, rig.path)) == [b"question"]

    async def second() -> None:
        assert await answer_of(begun(calls, rig.path)) == [b"question"]

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(run, first())
        assert begin.wait(20)
        run(second())
        go_on.set()
        other.result(20)


@pytest.mark.parametrize("in_use", [True, False])
def test_closing_on_another_thread_closes_what_a_loop_reads(
    rig: LocalRig, calls: LocalCalls, run: Run, in_use: bool
) -> None:
    async def work() -> None:
        assert await answer_of(begun(calls, rig.path)) == [b"question"]
        (kept,) = calls._idle
        waits = asyncio.ensure_future(answer_of(begun(calls, rig.path, "Wait"))) if in_use else None
        if waits is not None:
            await asyncio.to_thread(until, lambda: rig.handlers.events == ["waits"])
        await asyncio.to_thread(calls.close)
        if waits is not None:
            with pytest.raises(LocalError) as ended:
                await waits
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.sleep(0)
        assert kept.socket.fileno() < 0
        if isinstance(loop := asyncio.get_running_loop(), asyncio.SelectorEventLoop):
            assert len(loop._selector.get_map()) == 1, "the loop's own"

    run(work())
    until(lambda: rig.server.num_connections == 0)


def test_a_timer_that_is_early_is_set_again(run: Run, listener: socket.socket, calls: LocalCalls) -> None:
    """uvloop's are, by up to a millisecond: while a message is looked at, nobody learns of it."""

    async def work() -> None:
        call = begun(calls, listener.getsockname(), timeout_s=0.5)
        first = asyncio.ensure_future(anext(call))
        async with accepted(listener) as encoder:
            encoder.sendall(PREAMBLE + message(b"first"))  # and no word any more
            assert await first == b"first"
            assert call._timer is not None
            call._timer.cancel()
            call._expire()
            async with asyncio.timeout(10):
                with pytest.raises(LocalError) as raised:
                    await anext(call)
            assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            call.cancel()

    run(work())


def test_a_client_that_is_forgotten_leaves_no_connection(run: Run, rig: LocalRig, folder: Path) -> None:
    async def main() -> None:
        for _ in range(20):
            forgotten = LocalCalls()
            assert await answer_of(begun(forgotten, rig.path)) == [b"question"]
            del forgotten
        gc.collect()
        await asyncio.to_thread(until, lambda: not rig.server.num_connections)
        # The loop has let go of their numbers too: others' connections have them now.
        kept = LocalCalls()
        for _ in range(3):
            assert await answer_of(begun(kept, rig.path)) == [b"question"]
        kept.close()

    run(main())


def test_a_connection_that_is_forgotten_elsewhere_is_closed_by_its_loop(run: Run, rig: LocalRig) -> None:
    async def main() -> None:
        forgotten = [LocalCalls()]
        assert await answer_of(begun(forgotten[0], rig.path)) == [b"question"]
        await asyncio.to_thread(forgotten.clear)
        await asyncio.to_thread(gc.collect)
        await asyncio.to_thread(until, lambda: not rig.server.num_connections)

    run(main())


def test_a_call_that_ran_into_its_deadline_goes_with_its_last_reference(
    run: Run, rig: LocalRig, calls: LocalCalls
) -> None:
    async def main() -> None:
        call = begun(calls, rig.path, "Wait", timeout_s=0.05)
        with pytest.raises(LocalError):
            await anext(call)
        call.cancel()
        reference = weakref.ref(call)
        del call
        await asyncio.sleep(0.01)
        assert reference() is None

    gc.collect()
    gc.disable()
    try:
        run(main())
    finally:
        gc.enable()
