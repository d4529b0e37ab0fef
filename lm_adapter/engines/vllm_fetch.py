"""Fetches rows for the vLLM connector on a thread with an event loop and a client of its own.

Owns the thread, the time limits and the retries. Each started fetch ends with checked rows or an error;
nothing here raises into vLLM's scheduler. Leaves which rows are wanted to ``vllm_tracker``, and how they are
delivered (device memory, host memory, inline) to the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.vllm_items import Geometry, WantedRows
from lm_adapter.engines.vllm_settings import FetchSettings
from lm_adapter.errors import DeadlineExceeded, EncoderError, InvalidRows, ItemFailed
from lm_adapter.types import EncodedRows

__all__ = ["Fetched", "Fetcher"]

logger = logging.getLogger("vllm.vision_encoder")

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.5
CLOSE_S = 10.0


@dataclass(frozen=True, eq=False)
class Fetched:
    """The end of one fetch."""

    handle: object
    outcome: EncodedRows | EncoderError


class Fetcher:
    """``start`` and ``cancel`` return at once; ``ended`` holds what has ended, for the same thread to pop."""

    def __init__(
        self,
        settings: FetchSettings,
        geometry: Geometry,
        *,
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """prepare_thread: called on the thread before its client is made, with the first fetch. Raises
        InvalidRequest for unusable files of the settings."""
        settings.client_tls()
        self.ended: deque[Fetched] = deque()
        self._has_ended = threading.Event()
        self._settings = settings
        self._geometry = geometry
        self._prepare_thread = prepare_thread
        self._thread_failure = ""
        self._loop = asyncio.new_event_loop()
        self._client: AsyncVisionEncoderClient | None = None
        self._transport = ""
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._thread = threading.Thread(target=self._run, name="vision-encoder-fetch", daemon=True)
        self._thread.start()

    def start(self, handle: object, wanted: WantedRows) -> None:
        self._loop.call_soon_threadsafe(self._begin, handle, wanted)

    def cancel(self, handle: object) -> None:
        """Ends the fetch without an entry in ``ended``, unless it has ended already."""
        self._loop.call_soon_threadsafe(self._cancel, handle)

    def wait(self, timeout_s: float) -> None:
        """Waits until ``ended`` is not empty, at most ``timeout_s``."""
        self._has_ended.clear()
        if not self.ended:
            self._has_ended.wait(timeout_s)

    def close(self) -> None:
        """Ends the thread. Harmless when repeated."""
        if not self._loop.is_closed() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._prepare_thread()
        except Exception as error:
            # Requests without images go on; each fetch fails with this reason.
            self._thread_failure = f"the fetching thread cannot be prepared: {type(error).__name__}: {error}"
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._finish())
            self._loop.close()

    async def _finish(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._client is not None:
            # An interpreter that is ending starts no more threads, which closing needs.
            with contextlib.suppress(RuntimeError):
                await self._client.close()

    def _begin(self, handle: object, wanted: WantedRows) -> None:
        self._tasks[handle] = self._loop.create_task(self._fetch(handle, wanted))

    def _cancel(self, handle: object) -> None:
        task = self._tasks.get(handle)
        if task is not None:
            task.cancel()

    async def _fetch(self, handle: object, wanted: WantedRows) -> None:
        try:
            outcome = await self._fetch_with_retries(wanted)
        finally:
            self._tasks.pop(handle, None)
        self.ended.append(Fetched(handle, outcome))
        self._has_ended.set()

    async def _fetch_with_retries(self, wanted: WantedRows) -> EncodedRows | EncoderError:
        """Rows that fit, or the last error. Retryable failures are repeated for ``retry_s``. Rows that do not
        fit are asked for once more: after an encoder's restart the client may have compared them with the
        former encoder's model."""
        started_s = time.monotonic()
        backoff_s = FIRST_BACKOFF_S
        is_first_misfit = True
        while True:
            outcome = await self._fetch_once(wanted, started_s)
            if isinstance(outcome, InvalidRows) and is_first_misfit:
                is_first_misfit = False
                continue
            if isinstance(outcome, EncodedRows) or not outcome.retryable:
                return outcome
            pause_s = max(backoff_s, outcome.retry_after_ms / 1e3)
            waited_s = time.monotonic() - started_s
            if waited_s + pause_s >= min(self._settings.retry_s, self._settings.timeout_s):
                return outcome
            await asyncio.sleep(pause_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _fetch_once(self, wanted: WantedRows, started_s: float) -> EncodedRows | EncoderError:
        left_s = self._settings.timeout_s - (time.monotonic() - started_s)
        if left_s <= 0:
            return DeadlineExceeded(f"the rows did not come within {self._settings.timeout_s} s")
        if self._thread_failure:
            return ItemFailed(self._thread_failure)
        try:
            assert wanted.key is not None
            if self._client is None:
                self._client = self._open_client()
            (rows,) = await self._client.fetch([wanted.key], timeout_s=left_s)
            if isinstance(rows, ItemFailed):
                return rows
            self._geometry.check(rows, wanted.grid)
            self._log_transport(self._client)
        except EncoderError as error:
            return error
        except Exception as error:
            # Whatever fails, only this item may fail with it.
            return ItemFailed(f"fetching rows failed: {type(error).__name__}: {error}")
        return rows

    def _open_client(self) -> AsyncVisionEncoderClient:
        """On the loop. Rows go to the thread's current GPU, if it uses one. Raises InvalidRequest."""
        settings = self._settings
        return AsyncVisionEncoderClient(
            settings.target,
            namespace=settings.namespace,
            model=settings.model,
            timeout_s=settings.timeout_s,
            transports=settings.transports,
            broker_path=settings.broker_path,
            token_file=settings.token_file,
            tls=settings.client_tls(),
        )

    def _log_transport(self, client: AsyncVisionEncoderClient) -> None:
        transport = client.transport
        if transport.name != self._transport:
            self._transport = transport.name
            logger.info("image rows come by %s: %s", transport.name, transport.reason)
