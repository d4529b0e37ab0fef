"""The blocking client: a facade over the asyncio client, which runs on a thread of its own.

Owns the thread and its event loop. Rows that are resident in shared memory are read on the caller's thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="vision-encoder-client", daemon=True)
        self._thread.start()

        async def make() -> AsyncVisionEncoderClient:
            return AsyncVisionEncoderClient(target, **options)

        try:
            self._client = asyncio.run_coroutine_threadsafe(make(), self._loop).result()
        except BaseException:
            self._stop_loop()
            raise

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
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(CLOSE_TIMEOUT_S)
            self._stop_loop()

    def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        return self._run(lambda: self._client.info(timeout_s=timeout_s))

    def wait_ready(self, timeout_s: float) -> ServerInfo:
        return self._run(lambda: self._client.wait_ready(timeout_s))

    def wait_transport(self, timeout_s: float | None = None) -> Transport:
        self._client.note_device()
        return self._run(lambda: self._client.wait_transport(timeout_s))

    def encode(self, items: Sequence[Item], *, timeout_s: float | None = None) -> list[Outcome]:
        self._client.note_device()
        stream = current_stream()
        found = self._client.read_resident(items, stream)
        if found is not None:
            return found
        return self._run(lambda: self._client.encode(items, timeout_s=timeout_s, stream=stream))

    def encode_one(self, item: Item, *, timeout_s: float | None = None) -> EncodedRows:
        (outcome,) = self.encode([item], timeout_s=timeout_s)
        return rows_or_raise(outcome)

    def fetch(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[Outcome]:
        self._client.note_device()
        stream = current_stream()
        found = self._client.read_resident(keys, stream)
        if found is not None:
            return found
        return self._run(lambda: self._client.fetch(keys, timeout_s=timeout_s, stream=stream))

    def prefetch(
        self, items: Sequence[Item], *, timeout_s: float | None = None
    ) -> list[PrefetchStatus | ItemFailed]:
        return self._run(lambda: self._client.prefetch(items, timeout_s=timeout_s))

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[KeyStatus]:
        return self._run(lambda: self._client.lookup(keys, timeout_s=timeout_s))

    def _run(self, start: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Runs a call on the loop's thread. An interrupted caller cancels the call."""
        if not self._thread.is_alive():
            raise CallCancelled(
                f"call to {self.target}: the client is closed, or belongs to the parent process"
            )
        future = asyncio.run_coroutine_threadsafe(start(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
