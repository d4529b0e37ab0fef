"""The threads that decode: who gets them when, and how much is decoded at a time."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator

import pytest

from bench.harness.waiting import PATIENCE_S
from encoder_service.ingest.workers import IngestWorkers
from encoder_service.ops.shares import Holder
from tests.unit.service.rig import until

pytestmark = pytest.mark.anyio

FLOOD, PROBE = ("namespace flood",), ("namespace probe",)


class Gate:
    """A job that lasts until ``open``, and how many of it run."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._lock = threading.Lock()
        self.num_running = self.most_running = self.num_done = 0

    def __call__(self) -> None:
        with self._lock:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        assert self._open.wait(PATIENCE_S)
        with self._lock:
            self.num_running -= 1
            self.num_done += 1

    def open(self) -> None:
        self._open.set()


@pytest.fixture
async def workers() -> AsyncIterator[IngestWorkers]:
    found = IngestWorkers(2, 1, 1000)
    yield found
    assert (found.memory.num_used, found.num_waiting) == (0, 0)
    found.shutdown(wait=True)


async def test_p51_one_caller_keeps_all_but_the_spare_threads(workers: IngestWorkers) -> None:
    gate = Gate()
    jobs = [asyncio.ensure_future(workers.run(FLOOD, gate)) for _ in range(20)]
    await until(lambda: gate.num_running == 2)
    assert await asyncio.wait_for(workers.run(PROBE, lambda: "done"), PATIENCE_S) == "done"
    gate.open()
    await asyncio.gather(*jobs)
    assert (gate.most_running, gate.num_done) == (2, 20)


async def test_p55_clips_never_hold_the_threads_of_images(workers: IngestWorkers) -> None:
    gate = Gate()
    clips = [asyncio.ensure_future(workers.run(FLOOD, gate, is_clip=True)) for _ in range(20)]
    await until(lambda: gate.num_running == 1)
    images = Gate()
    two = [asyncio.ensure_future(workers.run(FLOOD, images)) for _ in range(2)]
    await until(lambda: images.num_running == 2)
    for found in (gate, images):
        found.open()
    await asyncio.gather(*clips, *two)


async def test_p50_what_is_decoded_at_a_time_is_bounded(workers: IngestWorkers) -> None:
    gate = Gate()
    jobs = [asyncio.ensure_future(workers.run(FLOOD, gate, decoded_bytes=700)) for _ in range(3)]
    await until(lambda: gate.num_running == 1)
    await asyncio.sleep(0.01)
    assert (gate.num_running, workers.memory.num_used) == (1, 700)
    # Another caller's small image is not delayed by large ones.
    assert await asyncio.wait_for(workers.run(PROBE, lambda: 1, decoded_bytes=100), PATIENCE_S) == 1
    gate.open()
    await asyncio.gather(*jobs)
    assert gate.most_running == 1


async def test_memory_and_thread_are_held_until_the_job_of_a_caller_who_left_has_ended(
    workers: IngestWorkers,
) -> None:
    gate = Gate()
    job = asyncio.ensure_future(workers.run(FLOOD, gate, decoded_bytes=700))
    await until(lambda: gate.num_running == 1)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert workers.memory.num_used == 700
    gate.open()
    await until(lambda: workers.memory.num_used == 0)


class OpenClip:
    """A clip as the workers see it."""

    num_open = 0

    def __init__(self, held_bytes: int) -> None:
        self.held_bytes = held_bytes
        OpenClip.num_open += 1

    def close(self) -> None:
        OpenClip.num_open -= 1


async def test_p50_what_open_clips_hold_counts_until_they_are_closed(workers: IngestWorkers) -> None:
    go_on, num_inside = asyncio.Event(), 0

    async def use(holder: Holder, held_bytes: int) -> None:
        nonlocal num_inside
        async with workers.open_clip(holder, lambda: OpenClip(held_bytes)):  # type: ignore[arg-type, return-value]
            num_inside += 1
            await go_on.wait()

    clips = [asyncio.ensure_future(use(FLOOD, 400)) for _ in range(5)]
    await until(lambda: num_inside == 1 and OpenClip.num_open == 2)
    await asyncio.sleep(0.01)
    # One is inside, one is open and waits for memory, which keeps the others from opening.
    assert (num_inside, OpenClip.num_open, workers.memory.num_used) == (1, 2, 400)
    clips[1].cancel()
    probe = asyncio.ensure_future(use(PROBE, 100))
    await until(lambda: num_inside == 2)
    go_on.set()
    await asyncio.gather(*clips, probe, return_exceptions=True)
    assert OpenClip.num_open == 0


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux alone")
async def test_clips_are_less_urgent_than_images(workers: IngestWorkers) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = niceness()
    assert await workers.run(FLOOD, niceness) == own
    assert await workers.run(FLOOD, niceness, is_clip=True) == own + 5


async def test_the_work_of_threads_is_counted_while_it_runs() -> None:
    """A mean of the threads that one caller may use: 1 s of one of two threads is half a second."""
    now_s = 50.0
    workers = IngestWorkers(2, 1, 1000, clock=lambda: now_s)
    gate = Gate()
    jobs = [asyncio.ensure_future(workers.run(FLOOD, gate))]
    await until(lambda: gate.num_running == 1)
    now_s += 1.0
    assert workers.busy_s == (0.5, 0.0)
    jobs += [asyncio.ensure_future(workers.run(FLOOD, gate, is_clip=is_clip)) for is_clip in (False, True)]
    await until(lambda: gate.num_running == 3)
    now_s += 2.0
    gate.open()
    await asyncio.gather(*jobs)
    workers.shutdown(wait=True)
    now_s += 5.0
    assert workers.busy_s == (2.5, 2.0)
