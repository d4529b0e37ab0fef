"""How many turns of the loop a call takes when many wait, and when the loop counts as idle."""

from __future__ import annotations

import asyncio
import socket
import time
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


def test_a_stop_in_the_midst_of_calls_ends_all_of_them() -> None:
    """Those that were accepted are answered within the grace period, the others end with a status, soon."""

    async def run() -> list[str]:
        async def wait(requests: Any, _: object) -> bytes:
            found = b"".join([request async for request in requests])
            await asyncio.sleep(0.05)
            return found

        server = accepting_server([])
        handler = grpc.stream_unary_rpc_method_handler(wait)
        handlers = grpc.method_handlers_generic_handler("test.Test", {"Echo": handler})
        server.add_generic_rpc_handlers([handlers])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()

        async def call_until_it_fails(call: Any) -> str:
            while True:
                try:
                    assert await call(iter([b"a call"]), timeout=20) == b"a call"
                except grpc.aio.AioRpcError as error:
                    return str(error.code().name)

        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = [call_until_it_fails(channel.stream_unary(METHOD)) for _ in range(64)]
            callers = asyncio.gather(*calls)
            await asyncio.sleep(0.5)
            await server.stop(10)
            return await callers

    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        begun_s = time.monotonic()
        statuses = runner.run(run())
    assert set(statuses) <= {"UNAVAILABLE", "CANCELLED"}, statuses
    assert time.monotonic() - begun_s < 8


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
