"""Rows fetched behind the scheduler's back: a thread with an event loop and a client on it.

Owns the thread, the waiting, and what is tried again. Whatever happens to an item, its handle ends with
rows that were checked or with an error; nothing here raises into the scheduler. Leaves which rows are wanted
to ``vllm_book``, and the rows' way (device memory, host memory, inline) to the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.vllm_access import Access
from lm_adapter.engines.vllm_items import Geometry, WantedRows
from lm_adapter.errors import DeadlineExceeded, EncoderError, InvalidRequest, InvalidRows, ItemFailed
from lm_adapter.shm.attachment import TRANSPORTS, check_transports
from lm_adapter.types import EncodedRows

__all__ = ["FetchSettings", "Fetched", "Fetcher"]

logger = logging.getLogger("vllm.vision_encoder")

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.5
CLOSE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class FetchSettings(Access):
    """``ec_connector_extra_config``.

    target: host:port of the encoder; namespace, model, broker_path, transports: as
    for the client; its token and TLS: see ``Access``. timeout_s: of one item, waiting for its encode
    included; retry_s: how long what can pass by itself (an encoder that restarts) is tried
    again. max_resident_bytes: of rows
    that wait for vLLM's forward pass; max_bound_items: identifiers whose key and grid are remembered. finite:
    look at every element for NaN and infinity. failures_path: a datagram socket that is told why requests
    were rejected, as the front's.
    """

    target: str
    namespace: str = ""
    model: str = ""
    transports: tuple[str, ...] = TRANSPORTS
    broker_path: str = ""
    timeout_s: float = 30.0
    retry_s: float = 5.0
    max_resident_bytes: int = 2 << 30
    max_bound_items: int = 1 << 18
    finite: bool = False
    failures_path: str = ""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> FetchSettings:
        """Raises InvalidRequest for an unknown name, a missing target or a value of another kind."""
        known = {name: field.type for name, field in cls.__dataclass_fields__.items()}
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise InvalidRequest(f"ec_connector_extra_config has {unknown}, known are {sorted(known)}")
        if not config.get("target"):
            raise InvalidRequest("ec_connector_extra_config has no target, the address of the encoder")
        values = dict(config)
        target = values.pop("target")
        if not isinstance(target, str):
            raise InvalidRequest(f"target is {target!r}, needs host:port")
        if isinstance(values.get("transports"), list):
            values["transports"] = tuple(values["transports"])
        for name, value in values.items():
            default = getattr(cls, name)
            number = isinstance(default, int | float) and not isinstance(default, bool)
            right = isinstance(value, int | float) if number else isinstance(value, type(default))
            if not right or (number and (isinstance(value, bool) or value < 0)):
                raise InvalidRequest(f"{name} is {value!r}, needs {known[name]}")
        found = cls(target=target, **values)
        check_transports(found.transports, found.broker_path)
        return found

    def client(self) -> AsyncVisionEncoderClient:
        """On the running loop. Rows go to the GPU that is current for this thread, where one is in use.
        Raises InvalidRequest, as ``client_tls``."""
        return AsyncVisionEncoderClient(
            self.target,
            namespace=self.namespace,
            model=self.model,
            timeout_s=self.timeout_s,
            transports=self.transports,
            broker_path=self.broker_path,
            token_file=self.token_file,
            tls=self.client_tls(),
        )


@dataclass(frozen=True, eq=False)
class Fetched:
    """What became of one item: rows, checked, or the error."""

    handle: object
    outcome: EncodedRows | EncoderError


class Fetcher:
    """``start`` and ``cancel`` return at once; what ended is in ``ended``, for the same thread to pop."""

    def __init__(
        self,
        settings: FetchSettings,
        geometry: Geometry,
        *,
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """prepare_thread: called on the thread before its client is made, which is with the first item.
        Raises InvalidRequest for files of the settings that would be of no use then."""
        settings.client_tls()
        self.ended: deque[Fetched] = deque()
        self._news = threading.Event()
        self._settings = settings
        self._geometry = geometry
        self._prepare_thread = prepare_thread
        self._unprepared = ""
        self._loop = asyncio.new_event_loop()
        self._client: AsyncVisionEncoderClient | None = None
        self._transport = ""
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._thread = threading.Thread(target=self._run, name="vision-encoder-fetch", daemon=True)
        self._thread.start()

    def start(self, handle: object, wanted: WantedRows) -> None:
        self._loop.call_soon_threadsafe(self._begin, handle, wanted)

    def cancel(self, handle: object) -> None:
        """The item is no longer wanted; nothing comes of it."""
        self._loop.call_soon_threadsafe(self._end, handle)

    def wait(self, timeout_s: float) -> None:
        """Returns once something has ended that was not popped yet, or when the time is over."""
        self._news.clear()
        if not self.ended:
            self._news.wait(timeout_s)

    def close(self) -> None:
        """Ends the thread; harmless when done twice."""
        if not self._loop.is_closed() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._prepare_thread()
        except Exception as error:
            # Every item says so, and text is answered.
            self._unprepared = f"the thread that fetches rows cannot: {type(error).__name__}: {error}"
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
            # An interpreter that ends first takes no more work; the encoder notices that the client is gone.
            with contextlib.suppress(RuntimeError):
                await self._client.close()

    def _begin(self, handle: object, wanted: WantedRows) -> None:
        self._tasks[handle] = self._loop.create_task(self._fetch(handle, wanted))

    def _end(self, handle: object) -> None:
        task = self._tasks.get(handle)
        if task is not None:
            task.cancel()

    async def _fetch(self, handle: object, wanted: WantedRows) -> None:
        try:
            outcome = await self._outcome(wanted)
        finally:
            self._tasks.pop(handle, None)
        self.ended.append(Fetched(handle, outcome))
        self._news.set()

    async def _outcome(self, wanted: WantedRows) -> EncodedRows | EncoderError:
        """Rows that fit, or the last error. What can pass is tried again for ``retry_s``, and rows that do
        not fit once: they may be a new encoder's, held to what the one before it had announced."""
        started = time.monotonic()
        backoff_s = FIRST_BACKOFF_S
        num_unfit = 0
        while True:
            outcome = await self._once(wanted, started)
            if isinstance(outcome, InvalidRows) and num_unfit == 0:
                num_unfit += 1
                continue
            if isinstance(outcome, EncodedRows) or not outcome.retryable:
                return outcome
            pause_s = max(backoff_s, outcome.retry_after_ms / 1e3)
            waited_s = time.monotonic() - started
            if waited_s + pause_s >= min(self._settings.retry_s, self._settings.timeout_s):
                return outcome
            await asyncio.sleep(pause_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _once(self, wanted: WantedRows, started: float) -> EncodedRows | EncoderError:
        left_s = self._settings.timeout_s - (time.monotonic() - started)
        if left_s <= 0:
            return DeadlineExceeded(f"the rows did not come within {self._settings.timeout_s} s")
        if self._unprepared:
            return ItemFailed(self._unprepared)
        try:
            assert wanted.key is not None
            if self._client is None:
                self._client = self._settings.client()
            (rows,) = await self._client.fetch([wanted.key], timeout_s=left_s)
            if isinstance(rows, ItemFailed):
                return rows
            self._geometry.check(rows, wanted.grid)
            self._note_transport(self._client)
        except EncoderError as error:
            return error
        except Exception as error:
            # An item's failure of whatever kind is that item's: the engine serves others.
            return ItemFailed(f"fetching rows failed: {type(error).__name__}: {error}")
        return rows

    def _note_transport(self, client: AsyncVisionEncoderClient) -> None:
        transport = client.transport
        if transport.name != self._transport:
            self._transport = transport.name
            logger.info("image rows come by %s: %s", transport.name, transport.reason)
