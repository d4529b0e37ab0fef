"""The blocking client: a facade over the asyncio client, which runs on a thread of its own.

Owns the thread and its event loop. Rows that are resident in shared memory are read on the caller's thread.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack

from lm_adapter.channel import ClientTls, FilePath
from lm_adapter.client import AsyncVisionEncoderClient, rows_or_raise
from lm_adapter.errors import CallCancelled, ItemFailed
from lm_adapter.items import Item
from lm_adapter.shm.attachment import Transport
from lm_adapter.shm.mapping import current_stream
from lm_adapter.types import EncodedRows, KeyStatus, Outcome, PrefetchStatus, ServerInfo

if TYPE_CHECKING:
    import torch


CLOSE_TIMEOUT_S = 10.0
CALLS_END_S = 1.0
"""Time that calls have to end by themselves once their client is closed; the others are cancelled."""

ResultT = TypeVar("ResultT")


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of ``AsyncVisionEncoderClient``, which documents them."""

    namespace: str
    model: str
    timeout_s: float
    transports: Sequence[str]
    broker_path: str
    token: str
    token_file: FilePath
    tls: ClientTls | None
    max_rows_bytes: int
    device: str | int | torch.device | None
    options: Mapping[str, int | str] | None


class VisionEncoderClient:
    """A blocking client of one service address. Thread-safe; a context manager. Methods, arguments and errors
    are those of ``AsyncVisionEncoderClient``."""

    def __init__(self, target: str, **options: Unpack[ClientOptions]) -> None:
        """Raises InvalidRequest."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._closing = asyncio.Event()
        made: Future[tuple[asyncio.AbstractEventLoop, AsyncVisionEncoderClient]] = Future()

        async def serve() -> None:
            try:
                client = AsyncVisionEncoderClient(target, **options)
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
        """Ends calls in progress on every thread with CallCancelled. Returns when the client is closed, also
        when it is repeated."""
        if self._thread.is_alive():
            with self._lock:
                if not self._is_closed:
                    self._is_closed = True
                    self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_TIMEOUT_S)

    def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        return self._run(lambda: self._client.info(timeout_s=timeout_s))

    def wait_ready(self, timeout_s: float) -> ServerInfo:
        return self._run(lambda: self._client.wait_ready(timeout_s))

    def wait_transport(self, timeout_s: float | None = None) -> Transport:
        self._client.note_device()
        return self._run(lambda: self._client.wait_transport(timeout_s))

    def encode(self, items: Sequence[Item], *, timeout_s: float | None = None) -> list[Outcome]:
        items = self._client.hashed(items)
        return self._rows(items, functools.partial(self._client.encode, items, timeout_s=timeout_s))

    def encode_one(self, item: Item, *, timeout_s: float | None = None) -> EncodedRows:
        (outcome,) = self.encode([item], timeout_s=timeout_s)
        return rows_or_raise(outcome)

    def fetch(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[Outcome]:
        return self._rows(keys, functools.partial(self._client.fetch, keys, timeout_s=timeout_s))

    def prefetch(
        self, items: Sequence[Item], *, timeout_s: float | None = None
    ) -> list[PrefetchStatus | ItemFailed]:
        return self._run(lambda: self._client.prefetch(items, timeout_s=timeout_s))

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[KeyStatus]:
        return self._run(lambda: self._client.lookup(keys, timeout_s=timeout_s))

    def _rows(
        self, wanted: Sequence[Item | bytes], start: Callable[..., Coroutine[Any, Any, list[Outcome]]]
    ) -> list[Outcome]:
        """Read on this thread if all of them are resident in shared memory."""
        self._client.note_device()
        stream = current_stream()
        found = self._client.read_resident(wanted, stream)
        return self._run(lambda: start(stream=stream)) if found is None else found

    def _run(self, start: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Runs a call on the loop's thread. An interrupted caller cancels the call."""
        closed = f"call to {self.target}: the client is closed, or belongs to the parent process"
        if not self._thread.is_alive():
            raise CallCancelled(closed)
        with self._lock:  # a call is on the loop before the loop ends, or not at all
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
        """Closes the client. Calls that it does not end are cancelled when the loop ends."""
        await self._client.close()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls, timeout=CALLS_END_S)
