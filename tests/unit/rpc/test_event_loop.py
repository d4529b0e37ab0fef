"""How many turns of the loop a call takes when many wait, and when the loop counts as idle."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from encoder_service.rpc.accepting import accepting_server
from encoder_service.rpc.event_loop import IdleSelector, ServiceLoop

NUM_CALLERS, NUM_CALLS = 16, 320
METHOD = "/test.Test/Echo"


class Selector(IdleSelector):
    """Counts the turns. Each takes a while, as beside other threads that want the interpreter's lock."""

    num_turns = 0

    def select(self, timeout: float | None = None) -> Any:
        self.num_turns += 1
        time.sleep(0.0005)
        return super().select(timeout)


async def turns_per_call(selector: Selector) -> float:
    async def echo(requests: Any, _: object) -> bytes:
        return b"".join([request async for request in requests])

    server = accepting_server([])
    handler = grpc.stream_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Test", {"Echo": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    def call_all() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, ThreadPoolExecutor(NUM_CALLERS) as pool:
            call = channel.stream_unary(METHOD)
            answers = pool.map(lambda number: call(iter([b"%d" % number])), range(NUM_CALLS))
            assert list(answers) == [b"%d" % number for number in range(NUM_CALLS)]

    before = selector.num_turns
    await asyncio.get_running_loop().run_in_executor(None, call_all)
    found = (selector.num_turns - before) / NUM_CALLS
    await server.stop(None)
    return found


def test_calls_that_wait_share_turns_of_the_loop() -> None:
    """With asyncio's own loop it is five turns, because gRPC's completions never share one; with gRPC's own
    server two, because it accepts one call in two turns."""
    selector = Selector()
    with asyncio.Runner(loop_factory=lambda: ServiceLoop(selector)) as runner:
        assert runner.run(turns_per_call(selector)) < 1.7


def test_calls_that_were_accepted_before_a_stop_do_not_hold_it() -> None:
    """They are answered, or end with a status at once."""

    async def stopped() -> tuple[float, Counter[str], int]:
        num_handled = 0

        async def echo(requests: Any, _: object) -> bytes:
            nonlocal num_handled
            num_handled += 1
            return b"".join([request async for request in requests])

        server = accepting_server([])
        handler = grpc.stream_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.Test", {"Echo": handler})]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        are_sent = threading.Event()

        def call_all() -> Counter[str]:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, ThreadPoolExecutor(64) as pool:
                call = channel.stream_unary(METHOD)
                call(iter([b"connects"]))
                are_sent.set()

                def status(_: int) -> str:
                    try:
                        call(iter([b"a call"]), timeout=20)
                    except grpc.RpcError as error:
                        return str(error.code().name)
                    return "OK"

                return Counter(pool.map(status, range(64)))

        calls = asyncio.get_running_loop().run_in_executor(None, call_all)
        await asyncio.to_thread(are_sent.wait)
        time.sleep(0.15)  # noqa: ASYNC251 - calls come while the loop is busy
        await asyncio.sleep(0)  # a turn
        begun_s = time.monotonic()
        await server.stop(5)
        took_s = time.monotonic() - begun_s
        return took_s, await calls, num_handled

    for _ in range(3):
        with asyncio.Runner(loop_factory=ServiceLoop) as runner:
            took_s, statuses, num_handled = runner.run(stopped())
        assert took_s < 2.5
        assert set(statuses) <= {"OK", "UNAVAILABLE", "CANCELLED"}, statuses
        assert statuses["OK"] == num_handled - 1


def test_a_server_that_has_stopped_has_no_tasks() -> None:
    async def left() -> list[asyncio.Task[Any]]:
        server = accepting_server([])
        server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await asyncio.sleep(0)
        await server.stop(None)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    for _ in range(300):
        with asyncio.Runner(loop_factory=ServiceLoop) as runner:
            assert not runner.run(left())


def test_a_loop_is_idle_only_while_nothing_is_ready() -> None:
    """Turns that follow one another because a socket is ready each time are no idle time."""

    async def idle_s_of(loop: ServiceLoop) -> tuple[float, float]:
        before_s = loop.idle_s
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(b"a call that waits")
            num_turns, done = 0, loop.create_future()

            def handle() -> None:
                nonlocal num_turns
                num_turns += 1
                time.sleep(0.01)
                if num_turns == 10:
                    loop.remove_reader(ours)
                    done.set_result(None)

            loop.add_reader(ours, handle)
            await done
        ready_s = loop.idle_s - before_s
        await asyncio.sleep(0.1)
        return ready_s, loop.idle_s - before_s - ready_s

    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, ServiceLoop)
        ready_s, asleep_s = runner.run(idle_s_of(loop))
    assert ready_s < 0.01
    assert asleep_s > 0.09
