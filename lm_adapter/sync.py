"""The blocking client: a facade over the asyncio client, which runs in a thread of its own.

Owns that thread and its event loop. Rows that are resident in shared memory are read on the caller's thread.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Self, TypeVar, Unpack, overload

from lm_adapter.client import AsyncVisionEncoderClient, rows_or_raise
from lm_adapter.errors import CallCancelled, InvalidRequest, ItemFailed
from lm_adapter.items import Item
from lm_adapter.options import ClientOptions
from lm_adapter.shm.attachment import Transport
from lm_adapter.shm.mapping import current_stream
from lm_adapter.types import EncodedRows, KeyStatus, Outcome, PrefetchStatus, ServerInfo

CLOSE_TIMEOUT_S = 10.0
CALLS_END_S = 1.0
"""Time that calls have to finish after their client is closed. The remaining ones are then cancelled."""

ResultT = TypeVar("ResultT")


class VisionEncoderClient:
    """A blocking client for one service address. Thread-safe; a context manager. Methods, arguments and
    errors are those of ``AsyncVisionEncoderClient``."""

    def __init__(
        self,
        target: str,
        *,
        fleet: bool = False,
        fallback_target: str = "",
        **options: Unpack[ClientOptions],
    ) -> None:
        """fleet: see ``AsyncVisionEncoderClient``; fallback_target: see ``local_first.LocalFirstClient``.
        Raises InvalidRequest, also if both are given."""
        if fleet and fallback_target:
            raise InvalidRequest("fleet and fallback_target exclude each other: both name the gateway")
        self._lock = threading.Lock()
        self._is_closed = False
        self._closing = asyncio.Event()
        made: Future[tuple[asyncio.AbstractEventLoop, AsyncVisionEncoderClient]] = Future()

        async def serve() -> None:
            try:
                if fallback_target:
                    from lm_adapter.local_first import LocalFirstClient

                    client: AsyncVisionEncoderClient = LocalFirstClient(
                        target, fallback_target=fallback_target, **options
                    )
                else:
                    client = AsyncVisionEncoderClient(target, fleet=fleet, **options)
            except BaseException as error:
                made.set_exception(error)
                return
            made.set_result((asyncio.get_running_loop(), client))
            await self._closing.wait()
            await self._end_calls()

        self._thread = threading.Thread(
            target=lambda: asyncio.run(serve()), name="vision-encoder-client", daemon=True
        )
        self._thread.start()
        self._loop, self._client = made.result()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.target!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def target(self) -> str:
        return self._client.target

    @property
    def transport(self) -> Transport:
        return self._client.transport

    def close(self) -> None:
        """Ends calls in progress on all threads with CallCancelled, and waits until the client is closed. Can
        be repeated."""
        if self._thread.is_alive():
            with self._lock:
                if not self._is_closed:
                    self._is_closed = True
                    self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_TIMEOUT_S)

    def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        return self._run(lambda: self._client.info(timeout_s=timeout_s))

    def is_serving(self, *, timeout_s: float | None = None) -> bool:
        return self._run(lambda: self._client.is_serving(timeout_s=timeout_s))

    def wait_ready(self, timeout_s: float) -> ServerInfo:
        return self._run(lambda: self._client.wait_ready(timeout_s))

    def wait_transport(self, timeout_s: float | None = None) -> Transport:
        self._client.note_device()
        return self._run(lambda: self._client.wait_transport(timeout_s))

    @overload
    def encode(self, items: Item, *, timeout_s: float | None = None) -> EncodedRows: ...
    @overload
    def encode(self, items: Sequence[Item], *, timeout_s: float | None = None) -> list[Outcome]: ...
    def encode(
        self, items: Item | Sequence[Item], *, timeout_s: float | None = None
    ) -> EncodedRows | list[Outcome]:
        if isinstance(items, Item):
            return self.encode_one(items, timeout_s=timeout_s)
        hashed: Sequence[Item] = self._client.hashed(items)
        call: Callable[..., Coroutine[Any, Any, list[Outcome]]] = self._client.encode
        return self._rows(hashed, functools.partial(call, hashed, timeout_s=timeout_s))

    def encode_one(self, item: Item, *, timeout_s: float | None = None) -> EncodedRows:
        (outcome,) = self.encode([item], timeout_s=timeout_s)
        return rows_or_raise(outcome)

    def fetch(
        self,
        keys: Sequence[bytes],
        *,
        routing_digests: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        fetch = functools.partial(
            self._client.fetch, keys, routing_digests=routing_digests, timeout_s=timeout_s
        )
        return self._rows(keys, fetch)

    def prefetch(
        self, items: Sequence[Item], *, timeout_s: float | None = None, until_encoded: bool = False
    ) -> list[PrefetchStatus | ItemFailed]:
        return self._run(
            lambda: self._client.prefetch(items, timeout_s=timeout_s, until_encoded=until_encoded)
        )

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        routing_digests: Sequence[bytes] = (),
        timeout_s: float | None = None,
    ) -> list[KeyStatus]:
        return self._run(
            lambda: self._client.lookup(keys, routing_digests=routing_digests, timeout_s=timeout_s)
        )

    def _rows(
        self, entries: Sequence[Item | bytes], start: Callable[..., Coroutine[Any, Any, list[Outcome]]]
    ) -> list[Outcome]:
        """Reads the rows on this thread if all of them are resident in shared memory, else starts a call."""
        self._client.note_device()
        stream = current_stream()
        rows = self._client.read_resident(entries, stream)
        return self._run(lambda: start(stream=stream)) if rows is None else rows

    def _run(self, start: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Runs a call on the loop's thread. If the caller is interrupted, the call is cancelled."""
        closed = f"call to {self.target}: the client is closed, or belongs to the parent process"
        if not self._thread.is_alive():
            raise CallCancelled(closed)
        with self._lock:  # a call must not be scheduled after the loop has begun to end
            if self._is_closed:
                raise CallCancelled(closed)
            future = asyncio.run_coroutine_threadsafe(start(), self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise CallCancelled(closed) from error
        except BaseException:
            future.cancel()
            raise

    async def _end_calls(self) -> None:
        """Closes the client and waits for its calls. Those that remain are cancelled when the loop ends."""
        await self._client.close()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls, timeout=CALLS_END_S)
