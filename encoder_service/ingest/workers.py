"""The threads that decode and resize, and who gets them when.

Owns how work is shared among them: callers take turns, so that a caller with a thousand images delays another
one's by a job at most; clips have threads of their own, since a part of a clip can take seconds; and the
pixels that are decoded at a time have a limit in bytes, whatever the size of the files. Used from the event
loop; only the functions run on the threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from encoder_service.ingest.video.clip import Clip
from encoder_service.ops.shares import Holder, WaitingShares

Result = TypeVar("Result")
_Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"

# The event loop works on small contents itself, for which a thread takes longer than the work of 0.1 ms: it
# hashes, parses or decodes this many bytes, or copies that many.
MAX_HASHED_ON_LOOP_BYTES = 256 << 10
MAX_COPIED_ON_LOOP_BYTES = 1 << 20
# How much less urgent than an image a clip's decoding is to the operating system.
CLIP_NICENESS = 5


class _Threads:
    """Some threads, which callers use in turns. One caller alone keeps ``num_threads`` busy; a second one
    finds more, so that it need not wait for the end of a long job. A thread that becomes free takes the next
    job by itself, without the event loop."""

    def __init__(self, num_threads: int, name: str, niceness: int = 0, *, clock: Callable[[], float]) -> None:
        self.num_spare = max(1, num_threads // 3)
        self.num_all = num_threads + self.num_spare
        self.executor = ThreadPoolExecutor(self.num_all, name, set_niceness, (niceness,))
        self._max_own = num_threads
        self._lock = threading.Lock()
        self._waiting: dict[Holder, dict[Holder, deque[_Job]]] = {}
        """By the first step of the caller's path, and below it by the whole path; both in turns."""
        self._running: Counter[Holder] = Counter()
        self._num_deferred = 0
        """Jobs that wait although a thread was free: their caller has as many threads as it may have."""
        self._clock = clock
        self._worked_s, self._counted_s = 0.0, clock()
        """Of all threads together, until the second time."""

    @property
    def busy_s(self) -> float:
        """Seconds of jobs since the start, those that run included, for each thread of ``num_threads``. Grows
        faster than time while spare threads work too."""
        with self._lock:
            self._count_work()
            return self._worked_s / self._max_own

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return sum(len(jobs) for below in self._waiting.values() for jobs in below.values())

    def submit(self, holder: Holder, function: Callable[[], Result]) -> Future[Result]:
        job: Future[Result] = Future()
        with self._lock:
            below = self._waiting.setdefault(holder[:1], {})
            below.setdefault(holder, deque()).append((job, function))
        self.executor.submit(self._run_next)
        return job

    def _run_next(self) -> None:
        found = self._take()
        if found is None:
            return
        caller, (job, function) = found
        try:
            if job.set_running_or_notify_cancel():
                try:
                    job.set_result(function())
                except BaseException as error:
                    job.set_exception(error)
        finally:
            self._give_back(caller)

    def _take(self) -> tuple[Holder, _Job] | None:
        """The next job, by turns. None while all callers that wait have as many threads as they may have."""
        with self._lock:
            for caller, below in self._waiting.items():
                if self._running[caller] < self._max_own:
                    holder, jobs = next(iter(below.items()))
                    del self._waiting[caller], below[holder]
                    job = jobs.popleft()
                    if jobs:  # behind the others
                        below[holder] = jobs
                    if below:
                        self._waiting[caller] = below
                    self._count_work()
                    self._running[caller] += 1
                    return caller, job
            self._num_deferred += 1
            return None

    def _give_back(self, caller: Holder) -> None:
        with self._lock:
            self._count_work()
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]
            if not self._num_deferred:
                return
            self._num_deferred -= 1
        with contextlib.suppress(RuntimeError):  # shut down meanwhile
            self.executor.submit(self._run_next)

    def _count_work(self) -> None:
        """Before the number of jobs that run changes, and with the lock."""
        now_s = self._clock()
        self._worked_s += self._running.total() * (now_s - self._counted_s)
        self._counted_s = now_s


class IngestWorkers:
    """max_decoded_bytes: of the images and clips that are being decoded; an item above it is decoded while
    no other is. clock: seconds, monotonic."""

    def __init__(
        self,
        num_threads: int,
        num_clip_threads: int,
        max_decoded_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory = WaitingShares(max_decoded_bytes)
        self._images = _Threads(num_threads, "ingest", clock=clock)
        self._clips = _Threads(num_clip_threads, "clips", CLIP_NICENESS, clock=clock)
        self._openings = WaitingShares(self._clips.num_all, num_reserved=self._clips.num_spare)

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The threads of images, for short work that belongs to no caller's queue."""
        return self._images.executor

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for a thread or for memory."""
        return self.memory.num_waiting + self._images.num_waiting + self._clips.num_waiting

    @property
    def busy_s(self) -> tuple[float, float]:
        """Seconds for which the threads of images, and those of clips, have worked, on average."""
        return self._images.busy_s, self._clips.busy_s

    async def run(
        self,
        holder: Holder,
        function: Callable[..., Result],
        *arguments: object,
        decoded_bytes: int = 0,
        is_clip: bool = False,
    ) -> Result:
        """The function's result, computed on a thread. decoded_bytes: the most memory that it takes for
        pixels while it runs. If the caller leaves, the function still runs to its end."""
        threads = self._clips if is_clip else self._images
        taken = await self.memory.acquire(holder, decoded_bytes) if decoded_bytes else 0
        job = threads.submit(holder, functools.partial(function, *arguments))
        try:
            return await asyncio.wrap_future(job)
        finally:
            if taken and job.done():
                self.memory.release(holder, taken)
            elif taken:
                loop = asyncio.get_running_loop()

                def release(_: object) -> None:
                    with contextlib.suppress(RuntimeError):  # the loop has ended, and the limit with it
                        loop.call_soon_threadsafe(self.memory.release, holder, taken)

                job.add_done_callback(release)

    @contextlib.asynccontextmanager
    async def open_clip(self, holder: Holder, opens: Callable[[], Clip]) -> AsyncIterator[Clip]:
        """The clip that ``opens`` gives on a thread of clips. What it holds counts as decoded until the end
        of the block, which closes it. How much that is shows when it is open, so only as many are opened at
        a time as there are threads."""
        held_bytes, opened, has_left = 0, list[Clip](), threading.Event()

        def open_it() -> Clip:
            opened.append(opens())
            if has_left.is_set():
                opened[0].close()
            return opened[0]

        try:
            async with self._openings.hold(holder):
                clip = await self.run(holder, open_it, is_clip=True)
                if clip.held_bytes:
                    held_bytes = await self.memory.acquire(holder, clip.held_bytes)
            yield clip
        finally:
            has_left.set()  # a clip that is still being opened is closed then
            for clip in opened:
                clip.close()
            self.memory.release(holder, held_bytes)

    def shutdown(self, *, wait: bool = False) -> None:
        """Starts no further job. wait: until those that run have ended."""
        for threads in (self._images, self._clips):
            threads.executor.shutdown(wait=wait, cancel_futures=True)


def set_niceness(niceness: int) -> None:
    """Makes the calling thread, and those that it starts, less urgent than the process's others."""
    if niceness and sys.platform == "linux":  # elsewhere threads have none of their own
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
