"""The blocking client of a fleet: the asyncio one, on a loop and a thread of its own.

Owns that thread. There is one implementation of attempts, because to leave an attempt that is late means to
cancel it, which a call that blocks a thread cannot be. CUDA streams are taken from the calling thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Collection, Coroutine, Generator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from lm_adapter.collect import collect
from lm_adapter.errors import CallCancelled, InvalidRequest, ItemFailed
from lm_adapter.fleet.async_client import AsyncFleetClient
from lm_adapter.fleet.call import FleetCounts
from lm_adapter.fleet.directory import ReplicaView
from lm_adapter.fleet.endpoints import Endpoints
from lm_adapter.fleet.settings import FleetSettings
from lm_adapter.leases import LeaseRecord
from lm_adapter.session import rows_or_raise
from lm_adapter.transport.buffers import RowsOptions
from lm_adapter.transport.off_loop import CallerStreams
from lm_adapter.types import EncodedRows, Item, KeyStatus, Outcome, PrefetchStatus, ServerInfo

__all__ = ["FleetClient"]

FINISH_S = 2.0
ResultT = TypeVar("ResultT")


class FleetClient:
    """``AsyncFleetClient`` for callers without a loop: the same arguments, answers, deadlines and errors.
    Thread-safe; a context manager."""

    def __init__(
        self, endpoints: Endpoints, *, settings: FleetSettings | None = None, **options: Any
    ) -> None:
        """options: of ``AsyncFleetClient``. Raises InvalidRequest."""
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._ends: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet-client", daemon=True)
        self._thread.start()

        async def open_client() -> AsyncFleetClient:
            return AsyncFleetClient(endpoints, settings=settings, **options)

        try:
            self._client = asyncio.run_coroutine_threadsafe(open_client(), self._loop).result()
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def settings(self) -> FleetSettings:
        return self._client.settings

    @property
    def counts(self) -> FleetCounts:
        """Since the client began; goes on counting."""
        return self._client.counts

    @property
    def replicas(self) -> list[ReplicaView]:
        """See ``AsyncFleetClient``."""
        return self._client.replicas

    def home(self, digest: bytes) -> str:
        """See ``AsyncFleetClient``."""
        return self._client.home(digest)

    def close(self) -> None:
        """Calls in progress end with CallCancelled. Harmless when done twice. Raises InvalidRequest on the
        client's own thread."""
        self._check_thread()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
        self._end_loop()

    def wait_ready(self, timeout_s: float, *, num_replicas: int = 1) -> ServerInfo:
        """See ``AsyncFleetClient``."""
        return self._call(self._client.wait_ready(timeout_s, num_replicas=num_replicas))

    def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """See ``AsyncFleetClient``."""
        return self._call(self._client.info(timeout_s=timeout_s))

    def encode(
        self, items: Sequence[Item], *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> list[Outcome]:
        """See ``AsyncFleetClient``."""
        return collect(self.encode_iter(items, timeout_s=timeout_s, **rows))

    def encode_one(
        self, item: Item, *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> EncodedRows:
        """See ``AsyncFleetClient``."""
        return rows_or_raise(self.encode([item], timeout_s=timeout_s, **rows)[0])

    def encode_iter(
        self, items: Sequence[Item], *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> Generator[tuple[int, Outcome], None, None]:
        """Each item's index and outcome as it finishes; closing the generator cancels the call."""
        stream = self._client._encode_on(CallerStreams(), items, timeout_s, rows)

        # A step that this thread was interrupted in is still ending when the stream is closed.
        one_at_a_time = asyncio.Lock()

        async def step() -> tuple[int, Outcome] | None:
            async with one_at_a_time:
                return await anext(stream, None)

        async def end() -> None:
            async with one_at_a_time:
                await stream.aclose()

        try:
            while (finished := self._call(step())) is not None:
                yield finished
        finally:
            if self._is_own_thread:  # a generator that was dropped is closed on whichever thread finds it
                self._ends.add(ending := self._loop.create_task(end()))
                ending.add_done_callback(self._ends.discard)
            else:
                with suppress(CallCancelled):
                    self._call(end())

    def fetch(
        self,
        keys: Sequence[bytes],
        *,
        first: Sequence[str] = (),
        timeout_s: float | None = None,
        **rows: Unpack[RowsOptions],
    ) -> list[Outcome]:
        """See ``AsyncFleetClient``."""
        return self._call(self._client._fetch_on(CallerStreams(), keys, first, timeout_s, rows))

    def read_shared(self, record: LeaseRecord, *, reader: int, **options: Any) -> EncodedRows:
        """See ``AsyncFleetClient``."""
        return self._call(self._client.read_shared(record, reader=reader, **options))

    def prefetch(
        self, items: Sequence[Item], *, avoid: Collection[str] = (), timeout_s: float | None = None
    ) -> list[PrefetchStatus | ItemFailed]:
        """See ``AsyncFleetClient``."""
        return self._call(self._client.prefetch(items, avoid=avoid, timeout_s=timeout_s))

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[KeyStatus]:
        """See ``AsyncFleetClient``."""
        return self._call(self._client.lookup(keys, timeout_s=timeout_s))

    @property
    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _check_thread(self) -> None:
        if self._is_own_thread:
            raise InvalidRequest(
                "on the fleet client's own thread, as in on_rows or an async fallback, a call would wait for "
                "itself"
            )

    def _call(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        try:
            self._check_thread()
        except InvalidRequest:
            work.close()
            raise
        with self._lock:  # what is begun before the end is ended with it
            if self._closed:
                work.close()
                raise CallCancelled("the fleet's client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise CallCancelled("the call was cancelled: the fleet's client is closed") from error
        except BaseException:
            # Of this thread (an interrupt) as well as of the call.
            future.cancel()
            raise

    async def _finish(self) -> None:
        """Every call has its answer, or is cancelled, before the loop stops: nobody waits for it for ever."""
        await self._client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=FINISH_S)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
