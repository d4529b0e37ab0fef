"""From threads back to the loop: order, one wake-up for many, failures, the end."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from encoder_service.engine.returns import Returns

pytestmark = pytest.mark.anyio


class CountedLoop:
    """The running loop, with its wake-ups from threads counted."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.num_woken = 0

    def call_soon_threadsafe(self, *arguments: Any) -> object:
        self.num_woken += 1
        return self.loop.call_soon_threadsafe(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loop, name)


async def test_what_is_posted_while_the_loop_is_busy_takes_one_wake_up() -> None:
    loop = CountedLoop()
    returns, seen = Returns(loop), []  # type: ignore[arg-type]
    poster = threading.Thread(target=lambda: [returns.post(seen.append, number) for number in range(100)])
    poster.start()
    poster.join()  # the loop is busy with this
    assert (seen, loop.num_woken) == ([], 1)
    await asyncio.sleep(0)
    assert seen == list(range(100))
    returns.post(seen.append, 100)
    await asyncio.sleep(0)
    assert (seen[-1], loop.num_woken) == (100, 2)


async def test_nothing_is_lost_or_turned_round_between_threads_that_post_and_a_loop_that_takes() -> None:
    returns = Returns(asyncio.get_running_loop())
    seen: list[tuple[int, int]] = []

    def post(thread: int) -> None:
        for number in range(2000):
            returns.post(seen.append, (thread, number))

    threads = [threading.Thread(target=post, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    while len(seen) < 8000:
        await asyncio.sleep(0)
        if not any(thread.is_alive() for thread in threads):
            break
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(seen) == 8000
    for thread in range(4):
        assert [number for who, number in seen if who == thread] == list(range(2000))


async def test_one_that_fails_takes_none_behind_it_along() -> None:
    loop, failures, seen = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    returns = Returns(loop)
    for function in (lambda: 1 / 0, lambda: seen.append(1)):
        returns.post(function)
    await asyncio.sleep(0)
    loop.set_exception_handler(None)
    assert seen == [1]
    assert [type(error) for error in failures] == [ZeroDivisionError]


async def test_what_posts_more_does_not_keep_the_loop() -> None:
    returns, turns = Returns(asyncio.get_running_loop()), 0

    def again() -> None:
        nonlocal turns
        turns += 1
        returns.post(again)

    returns.post(again)
    for _ in range(10):
        await asyncio.sleep(0)
    assert 5 <= turns <= 11


def test_p37_a_loop_that_has_ended_is_told_nothing_and_nobody_fails() -> None:
    loop = asyncio.new_event_loop()
    returns = Returns(loop)
    loop.close()
    returns.post(print)


@pytest.mark.parametrize("pool", [ThreadPoolExecutor(2)])
async def test_work_runs_on_a_worker_and_its_end_is_the_futures(pool: Any) -> None:
    returns = Returns(asyncio.get_running_loop())
    name = await returns.run(pool, lambda: threading.current_thread().name)
    assert name != threading.current_thread().name
    with pytest.raises(KeyError):
        await returns.run(pool, {}.__getitem__, "missing")
    pool.shutdown()


async def test_work_whose_caller_left_before_it_began_is_not_run() -> None:
    pool, returns, ran = ThreadPoolExecutor(1), Returns(asyncio.get_running_loop()), []
    gate = threading.Event()
    first = returns.run(pool, gate.wait, 10)
    second = returns.run(pool, ran.append, 2)
    begun = returns.run(pool, ran.append, 3)
    second.cancel()
    gate.set()
    await asyncio.gather(first, begun)
    assert ran == [3]
    first = returns.run(pool, ran.append, 4)
    first.cancel()  # perhaps while it runs: its end is told to nobody
    await returns.run(pool, ran.append, 5)
    assert ran[-1] == 5
    pool.shutdown()
