"""Rows for a request: from files to checked rows, on a thread of its own.

Owns what is asked of the encoder, how many bytes of rows are held at once, and what is refused. The thread,
its retries and its time limits are ``engines.shared.calls``. Imports neither SGLang nor torch; torch where
rows go to a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.sglang.settings import Settings
from lm_adapter.engines.shared.calls import EncoderCalls
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.errors import DeadlineExceeded, EncoderError, InvalidRequest, InvalidRows
from lm_adapter.items import Grid, ImageItem
from lm_adapter.types import EncodedRows

MAX_ROWS_BYTES = 1 << 30
"""Of the requests whose rows are asked for, or are here and not handed to SGLang yet."""


class ByteLimit:
    """Holds at most so many bytes at once, first come, first served. Thread-safe, for any event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._free_bytes = max_bytes
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._lock = threading.Lock()

    @contextlib.asynccontextmanager
    async def hold(self, num_bytes: int, timeout_s: float) -> AsyncIterator[None]:
        """A holder of more than the limit is alone. Raises DeadlineExceeded where there is no room in
        time."""
        num_bytes = min(num_bytes, self._max_bytes)
        granted: Future[None] = Future()
        with self._lock:
            self._waiting.append((num_bytes, granted))
        self._free(0)
        try:
            try:
                await asyncio.wait_for(asyncio.wrap_future(granted), timeout_s)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"rows of other requests left no room for {num_bytes} bytes within {timeout_s} s, "
                    f"{self._max_bytes} bytes are held at most"
                ) from None
            yield
        finally:
            self._free(0 if granted.cancel() else num_bytes)

    def _free(self, num_bytes: int) -> None:
        with self._lock:
            self._free_bytes += num_bytes
            while self._waiting and (
                self._waiting[0][0] <= self._free_bytes or self._waiting[0][1].cancelled()
            ):
                next_bytes, granted = self._waiting.popleft()
                if granted.set_running_or_notify_cancel():
                    self._free_bytes -= next_bytes
                    granted.set_result(None)


class RowReader:
    """Thread-safe. ``read`` is for any event loop."""

    def __init__(self, settings: Settings, geometry: Geometry, gpu: int | None = None) -> None:
        """gpu: the index of the GPU that rows go to; None for the host. Raises InvalidRequest for transports
        that leave no way there."""
        if gpu is None:
            transports = tuple(name for name in settings.transports if name != "device")
            if not transports:
                raise InvalidRequest(
                    f"transports is {list(settings.transports)}, but SGLang takes rows from host memory: set "
                    "--mm-feature-transport cuda_ipc"
                )
            settings = dataclasses.replace(settings, transports=transports)
        self._geometry = geometry
        self._gpu = gpu
        self._limit = ByteLimit(MAX_ROWS_BYTES)
        self._timeout_s = settings.timeout_s
        self._calls = EncoderCalls(settings, name="rows", reads_rows=True)

    def close(self) -> None:
        self._calls.close()

    @contextlib.asynccontextmanager
    async def read(
        self, images: Sequence[ImageFile], grids: Sequence[Grid]
    ) -> AsyncIterator[list[EncodedRows]]:
        """Checked rows of each image, which count in MAX_ROWS_BYTES until the block ends. grids: as the
        model's processor computes them. Raises EncoderError: the first image's that has no rows. A caller
        that is cancelled takes its call along."""
        items = [ImageItem(image.data, digest=image.digest) for image in images]
        started_s = time.monotonic()
        async with self._limit.hold(sum(map(self._geometry.num_bytes, grids)), self._timeout_s):
            waited_s = time.monotonic() - started_s

            async def call(client: AsyncVisionEncoderClient, left_s: float) -> list[EncodedRows]:
                left_s = max(left_s - waited_s, 0.0)
                try:
                    return await self._encode(client, items, grids, left_s)
                except InvalidRows:
                    # After an encoder's restart the client may have compared them with the former's model.
                    return await self._encode(client, items, grids, left_s)

            outcome: Any = await asyncio.wrap_future(self._calls.ask(call))
            if isinstance(outcome, EncoderError):
                raise outcome
            yield outcome

    async def _encode(
        self,
        client: AsyncVisionEncoderClient,
        items: Sequence[ImageItem],
        grids: Sequence[Grid],
        left_s: float,
    ) -> list[EncodedRows]:
        if self._gpu is not None:
            import torch

            # Rows go to the calling thread's current GPU.
            torch.cuda.set_device(self._gpu)
        rows = []
        for outcome, grid in zip(await client.encode(items, timeout_s=left_s), grids, strict=True):
            if isinstance(outcome, EncoderError):
                raise outcome
            self._geometry.check(outcome, grid)
            rows.append(outcome)
        return rows
