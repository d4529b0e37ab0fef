"""The threads on which pixels are made.

Owns as much of a thread pool as the service needs, which is less than the library's: its threads run from the
start to the end, and a job of which nobody wants a ``Future`` has none. For a photograph of 39 KB the
library's ``submit`` took the event loop as long as asking what the photograph's rows are called.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


class WorkerThreads(Executor):
    """Started by the first job. Threads are daemons: a decoder that hangs does not keep the process."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{number}", daemon=True)
            for number in range(num_threads)
        ]
        self._lock = threading.Lock()
        self._is_started = self._is_closed = False

    def start_soon(self, job: Callable[[], object]) -> None:
        """Runs it when a thread is free. It must not raise. Raises RuntimeError after ``shutdown``."""
        if not self._is_started:
            self._start()
        if self._is_closed:
            raise RuntimeError("the worker threads were stopped")
        self._jobs.put(job)

    def submit(self, fn: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        future: Future[Result] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.start_soon(job)
        # For shutdown, which ends those that have not begun.
        job.future = future  # type: ignore[attr-defined]
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Twice is once. cancel_futures: what waits is not run; jobs without a future are forgotten."""
        with self._lock:
            self._is_closed = True
        if cancel_futures:
            with contextlib.suppress(Empty):
                while True:
                    waiting = getattr(self._jobs.get_nowait(), "future", None)
                    if waiting is not None:
                        waiting.cancel()
        if not self._is_started:
            return
        for _ in self._threads:
            self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _start(self) -> None:
        with self._lock:
            if not self._is_started and not self._is_closed:
                for thread in self._threads:
                    thread.start()
                self._is_started = True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # or the last one's pixels would stay until the next
