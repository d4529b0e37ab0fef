"""Calls to the encoder for threads that must not wait: a thread with an event loop and a client.

Owns the thread, the time limits, the retries, and the log line of an encoder that disagrees. Each call ends
with a value or an error; no call raises into the engine. The user of the thread passes the call: a function
from client and seconds to a value.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.shared.agreement import Agreement
from lm_adapter.errors import DeadlineExceeded, EncoderError, ItemFailed, ModelMismatch, ProtocolMismatch

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.5
CLOSE_S = 10.0
DISAGREEMENTS = (ModelMismatch, ProtocolMismatch)
"""Failures of an encoder that this engine cannot use."""

Call = Callable[[AsyncVisionEncoderClient, float], Awaitable[Any]]
"""Gets the client and the number of seconds that are left. Returns a value or an EncoderError, or raises
one."""


@dataclass(frozen=True, eq=False)
class Completed:
    """A call that has ended. outcome: its value, or an EncoderError."""

    handle: object
    outcome: Any


class EncoderThread:
    """``submit``, ``cancel`` and ``call_soon`` return at once; after ``close`` they do nothing. ``completed``
    has the calls that have ended; one thread pops them."""

    def __init__(
        self,
        agreement: Agreement,
        *,
        name: str,
        reads_rows: bool = False,
        logger: logging.Logger | None = None,
    ) -> None:
        """name: of the thread. reads_rows: as of ``Agreement.client``. logger: gets one line when the encoder
        is found to disagree, and one when it does not any more."""
        self.completed: deque[Completed] = deque()
        self._has_ended = threading.Event()
        self._agreement = agreement
        self._settings = agreement.settings
        self._reads_rows = reads_rows
        self._logger = logger
        self._disagreement = ""
        self._loop = asyncio.new_event_loop()
        self._client: AsyncVisionEncoderClient | None = None
        self._tasks: dict[object, asyncio.Task[Any]] = {}
        self._thread = threading.Thread(target=self._run, name=f"vision-encoder-{name}", daemon=True)
        self._thread.start()

    def submit(self, handle: object, call: Call) -> None:
        """Starts the call. Its outcome goes into ``completed``, with the handle."""
        self.call_soon(self._begin, handle, call)

    def submit_future(self, call: Call) -> Future[Any]:
        """Starts the call. The future gets its outcome: a value, or an EncoderError. Cancelling the future
        cancels the call."""
        return asyncio.run_coroutine_threadsafe(self._with_retries(call), self._loop)

    def contact(self, timeout_s: float) -> EncoderError | None:
        """Has the encoder describe itself, without retries. Why that failed, or None."""
        error: EncoderError | None = self.run_coroutine(self._ask(timeout_s), 2 * timeout_s + CLOSE_S)
        return error

    def watch(
        self, interval_s: float, timeout_s: float, note: Callable[[EncoderError | None], object]
    ) -> None:
        """Has the encoder describe itself now and every ``interval_s``. note: gets what ``contact`` returns,
        on the thread."""

        async def run() -> None:
            while True:
                note(await self._ask(timeout_s))
                await asyncio.sleep(interval_s)

        asyncio.run_coroutine_threadsafe(run(), self._loop)

    def cancel(self, handle: object) -> None:
        """Ends the call without an entry in ``completed``, unless it has ended already."""
        self.call_soon(self._cancel, handle)

    @property
    def num_pending(self) -> int:
        """Number of calls of ``submit`` that have not ended."""
        return len(self._tasks)

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls the function soon, on the thread."""
        # An engine may go on for some steps after it has closed its connector.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def run_coroutine(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = CLOSE_S) -> Any:
        """Runs the coroutine on the thread, and waits for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Waits until ``completed`` is not empty, at most ``timeout_s``."""
        self._has_ended.clear()
        if not self.completed:
            self._has_ended.wait(timeout_s)

    def close(self) -> None:
        """Ends the thread. Can be repeated."""
        if not self._loop.is_closed() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._finish())
            self._loop.close()

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            # Closing needs a thread, and an interpreter that is ending starts none.
            with contextlib.suppress(RuntimeError):
                await self._client.close()

    def _begin(self, handle: object, call: Call) -> None:
        task = self._loop.create_task(self._carry_out(handle, call))
        self._tasks[handle] = task
        # A callback, because a task that is cancelled before it begins runs nothing of its own.
        task.add_done_callback(lambda _: self._tasks.pop(handle, None))

    def _cancel(self, handle: object) -> None:
        task = self._tasks.get(handle)
        if task is not None:
            task.cancel()

    async def _carry_out(self, handle: object, call: Call) -> None:
        self.completed.append(Completed(handle, await self._with_retries(call)))
        self._has_ended.set()

    async def _with_retries(self, call: Call) -> Any:
        """A value, or the last error. Retryable failures are repeated for ``retry_s``."""
        started_s = time.monotonic()
        backoff_s = FIRST_BACKOFF_S
        while True:
            outcome = await self._once(call, started_s)
            self._note(outcome)
            if not isinstance(outcome, EncoderError) or not outcome.retryable:
                return outcome
            pause_s = max(backoff_s, outcome.retry_after_ms / 1e3)
            waited_s = time.monotonic() - started_s
            if waited_s + pause_s >= min(self._settings.retry_s, self._settings.timeout_s):
                return outcome
            await asyncio.sleep(pause_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _note(self, outcome: Any) -> None:
        """Logs the beginning and the end of a disagreement; the failures of single images are not logged
        here."""
        if isinstance(outcome, EncoderError):
            # A rank's report states only the reason.
            if outcome.reason not in {kind.default_reason for kind in DISAGREEMENTS}:
                return
            disagreement = outcome.message
        else:
            disagreement = ""
        if self._logger is not None and disagreement != self._disagreement:
            if disagreement:
                self._logger.error("images fail until this is changed: %s", disagreement)
            else:
                self._logger.info("the encoder at %s serves this model's rows now", self._settings.target)
        self._disagreement = disagreement

    async def _ask(self, timeout_s: float) -> EncoderError | None:
        async def call(client: AsyncVisionEncoderClient, left_s: float) -> None:
            await client.info(timeout_s=min(timeout_s, left_s))

        error: EncoderError | None = await self._once(call, time.monotonic())
        return error

    async def _once(self, call: Call, started_s: float) -> Any:
        left_s = self._settings.timeout_s - (time.monotonic() - started_s)
        if left_s <= 0:
            return DeadlineExceeded(f"the encoder did not answer within {self._settings.timeout_s} s")
        try:
            if self._client is None:
                self._client = self._agreement.client(reads_rows=self._reads_rows)
            return await call(self._client, left_s)
        except EncoderError as error:
            return error
        except Exception as error:
            # No error may end more than this item.
            return ItemFailed(f"the call to the encoder failed: {type(error).__name__}: {error}")
