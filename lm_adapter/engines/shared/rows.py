"""Obtains the checked rows of a request, for engines that get them beside the request.

Owns the calls to the encoder and the limit on the bytes that are held at once. ``encoder_thread`` owns the
thread, its retries and its time limits; ``geometry`` owns which rows are refused. Imports no torch, except if
rows go to a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.shared.agreement import Agreement
from lm_adapter.engines.shared.encoder_thread import EncoderThread
from lm_adapter.engines.shared.first_contact import check_encoder
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.engines.shared.settings import Settings
from lm_adapter.errors import DeadlineExceeded, EncoderError, InvalidRows
from lm_adapter.items import Grid, ImageItem
from lm_adapter.types import EncodedRows

MAX_ROWS_BYTES = 1 << 30
"""Limit on rows that are being fetched or not yet handed to the engine."""


class ByteLimit:
    """A limit on bytes that are held at once, first come, first served. Thread-safe; callers may be on
    different event loops."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._free_bytes = max_bytes
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._lock = threading.Lock()

    async def take(self, num_bytes: int, timeout_s: float | None) -> Callable[[], None]:
        """Returns the function that gives the bytes back, to be called once. A request for more than the
        limit waits until nothing else is held. timeout_s: None waits as long as it takes. Raises
        DeadlineExceeded if the bytes do not become free in time."""
        num_bytes = min(num_bytes, self._max_bytes)
        granted: Future[None] = Future()
        with self._lock:
            self._waiting.append((num_bytes, granted))
        self._free(0)
        try:
            await asyncio.wait_for(asyncio.wrap_future(granted), timeout_s)
        except BaseException as error:
            self._free(0 if granted.cancel() else num_bytes)
            if not isinstance(error, TimeoutError):
                raise
            raise DeadlineExceeded(
                f"rows of other requests left no room for {num_bytes} bytes within {timeout_s} s, "
                f"{self._max_bytes} bytes are held at most"
            ) from None
        return functools.partial(self._free, num_bytes)

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


class RowCalls:
    """Calls to one encoder for the rows of requests. Thread-safe; callers of ``take`` may be on different
    event loops."""

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        logger: logging.Logger,
        *,
        reads_rows: bool,
        has_room_in_time: bool = True,
    ) -> None:
        """reads_rows: as of ``Agreement.client``. has_room_in_time: a request waits for room for its rows
        within its ``timeout_s``; else as long as it takes. Raises as ``check_encoder``."""
        self._geometry = geometry
        self._limit = ByteLimit(MAX_ROWS_BYTES)
        self._room_s = settings.timeout_s if has_room_in_time else None
        self._encoder_thread = EncoderThread(
            Agreement(settings, geometry), name="rows", reads_rows=reads_rows, logger=logger
        )
        check_encoder(self._encoder_thread, settings.target, logger)

    def close(self) -> None:
        self._encoder_thread.close()

    async def take(
        self, images: Sequence[ImageFile], grids: Sequence[Grid]
    ) -> tuple[Any, Callable[[], None]]:
        """What ``_encode`` returns for the images. Their rows count in MAX_ROWS_BYTES until the function is
        called, which has to happen once. grids: as the model's processor computes them. Raises the
        EncoderError of the first image that has no rows, and DeadlineExceeded. Cancelling the caller cancels
        the call."""
        items = [ImageItem(image.data, digest=image.digest) for image in images]
        started_s = time.monotonic()
        give_back = await self._limit.take(sum(map(self._geometry.num_bytes, grids)), self._room_s)
        waited_s = time.monotonic() - started_s if self._room_s is not None else 0.0

        async def call(client: AsyncVisionEncoderClient, left_s: float) -> Any:
            left_s = max(left_s - waited_s, 0.0)
            try:
                return await self._encode(client, items, grids, left_s)
            except InvalidRows:
                # The client may have compared them with the model of before the encoder's restart.
                return await self._encode(client, items, grids, left_s)

        try:
            outcome: Any = await asyncio.wrap_future(self._encoder_thread.submit_future(call))
            if isinstance(outcome, EncoderError):
                raise outcome
        except BaseException:
            give_back()
            raise
        return outcome, give_back

    async def _encode(
        self,
        client: AsyncVisionEncoderClient,
        items: Sequence[ImageItem],
        grids: Sequence[Grid],
        left_s: float,
    ) -> Any:
        """On the encoder's thread. Raises EncoderError unless all items have rows that fit."""
        raise NotImplementedError


class RowReader(RowCalls):
    """Reads the rows in this process. ``take`` returns a list of EncodedRows, in the images' order."""

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        logger: logging.Logger,
        *,
        gpu: int | None = None,
        remedy: str = "set transports",
    ) -> None:
        """gpu: the index of the GPU that rows go to; None for the host. remedy: what to change if none of the
        transports ends there. Raises InvalidRequest if no transport ends there, and as ``check_encoder``."""
        if gpu is None:
            settings = settings.on_host(f"{settings.ENGINE} takes rows from host memory", remedy)
        self._gpu = gpu
        super().__init__(settings, geometry, logger, reads_rows=True)

    @contextlib.asynccontextmanager
    async def read(
        self, images: Sequence[ImageFile], grids: Sequence[Grid]
    ) -> AsyncIterator[list[EncodedRows]]:
        """As ``take``; the rows count until the block ends."""
        rows, give_back = await self.take(images, grids)
        try:
            yield rows
        finally:
            give_back()

    async def _encode(
        self,
        client: AsyncVisionEncoderClient,
        items: Sequence[ImageItem],
        grids: Sequence[Grid],
        left_s: float,
    ) -> list[EncodedRows]:
        if self._gpu is not None:
            import torch

            # The client places rows on the calling thread's current GPU.
            torch.cuda.set_device(self._gpu)
        rows = []
        for outcome, grid in zip(await client.encode(items, timeout_s=left_s), grids, strict=True):
            if isinstance(outcome, EncoderError):
                raise outcome
            self._geometry.check(outcome, grid)
            rows.append(outcome)
        return rows
