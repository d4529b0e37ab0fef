"""From other threads back to the event loop, many in one wake-up.

Owns how threads that finish something tell the loop: what they tell while it is busy waits for it together,
since each wake-up costs the loop a turn and the thread a system call. What is told is its callers' business.
So is a long function that runs beside the loop once, on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from encoder_service.errors import InternalError

Result = TypeVar("Result")


class Returns:
    """For one event loop. ``post`` on any thread; all else on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_due = False

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Has the loop call it, after what was posted before. Does nothing once the loop has ended."""
        self._waiting.append((function, arguments))
        # Set and cleared without a lock: it is cleared before the loop looks at what waits, so that whoever
        # finds it set has added to what the loop is still to look at.
        if not self._is_due:
            self._is_due = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take)

    def run(
        self, workers: Executor, function: Callable[..., Result], *arguments: Any
    ) -> asyncio.Future[Result]:
        """``function`` on a worker. One whose future was cancelled before it began is not run. Raises as the
        executor's ``submit``."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                result = function(*arguments)
            except BaseException as error:
                self.post(_fail, future, error)
            else:
                self.post(_end, future, result)

        start_soon(workers, work)
        return future

    def _take(self) -> None:
        self._is_due = False
        # No more than there are: others would keep the loop from everything else.
        for _ in range(len(self._waiting)):
            function, arguments = self._waiting.popleft()
            try:
                function(*arguments)
            except Exception as error:  # of one, and not of those behind it
                self._loop.call_exception_handler(
                    {"message": "a call from a thread failed", "exception": error}
                )


def told(error: BaseException) -> BaseException:
    """The error as a future takes it, which of all errors refuses this one."""
    if not isinstance(error, StopIteration):
        return error
    made = InternalError(f"StopIteration: {error}")
    made.__cause__ = error
    return made


def start_soon(workers: Executor, job: Callable[[], object]) -> None:
    """Runs a job that does not raise on a worker; what becomes of it, it tells by itself. Raises as the
    executor's ``submit``."""
    workers.submit(job)


def _end(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(told(error))


async def on_own_thread(function: Callable[..., Result], *arguments: object) -> Result:
    """Runs a long function beside the loop. The thread is a daemon: when the caller is cancelled (a signal
    while loading), neither the loop nor the interpreter waits for it at the end, as they would for an
    executor's."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"service-{function.__name__}", daemon=True).start()
    return await asyncio.wrap_future(future)
