"""Fetches and checks the rows of a request.

Owns the calls to the encoder and the limit on the bytes that are held at once. ``shared.encoder_thread`` owns
the thread, its retries and its time limits; ``shared.geometry`` owns which rows are refused. Imports neither
SGLang nor torch, except torch if rows go to a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any

from lm_adapter.client import AsyncVisionEncoderClient
from lm_adapter.engines.sglang.settings import Settings
from lm_adapter.engines.shared.agreement import Agreement
from lm_adapter.engines.shared.encoder_thread import EncoderThread
from lm_adapter.engines.shared.first_contact import check_encoder
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.shared.images import ImageFile
from lm_adapter.errors import DeadlineExceeded, EncoderError, InvalidRequest, InvalidRows
from lm_adapter.items import Grid, ImageItem
from lm_adapter.types import EncodedRows

logger = logging.getLogger("sglang.vision_encoder")

MAX_ROWS_BYTES = 1 << 30
"""Limit on rows that are being fetched or not yet handed to SGLang."""


class ByteLimit:
    """A limit on bytes that are held at once, first come, first served. Thread-safe; callers may be on
    different event loops."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._free_bytes = max_bytes
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._lock = threading.Lock()

    @contextlib.asynccontextmanager
    async def hold(self, num_bytes: int, timeout_s: float) -> AsyncIterator[None]:
        """Holds the bytes within the block. A request for more than the limit waits until nothing else is
        held. Raises DeadlineExceeded if the bytes do not become free in time."""
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
    """Reads rows from one encoder. Thread-safe; callers of ``read`` may be on different event loops."""

    def __init__(self, settings: Settings, geometry: Geometry, gpu: int | None = None) -> None:
        """gpu: the index of the GPU that rows go to; None for the host. Raises InvalidRequest if none of the
        transports ends there, and as ``check_encoder``."""
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
        self._encoder_thread = EncoderThread(
            Agreement(settings, geometry), name="rows", reads_rows=True, logger=logger
        )
        check_encoder(self._encoder_thread, settings.target, logger)

    def close(self) -> None:
        self._encoder_thread.close()

    @contextlib.asynccontextmanager
    async def read(
        self, images: Sequence[ImageFile], grids: Sequence[Grid]
    ) -> AsyncIterator[list[EncodedRows]]:
        """Checked rows of all images, in order. They count in MAX_ROWS_BYTES until the block ends. grids: as
        the model's processor computes them. Raises the EncoderError of the first image that has no rows, and
        DeadlineExceeded. Cancelling the caller cancels the call."""
        items = [ImageItem(image.data, digest=image.digest) for image in images]
        started_s = time.monotonic()
        async with self._limit.hold(sum(map(self._geometry.num_bytes, grids)), self._timeout_s):
            waited_s = time.monotonic() - started_s

            async def call(client: AsyncVisionEncoderClient, left_s: float) -> list[EncodedRows]:
                left_s = max(left_s - waited_s, 0.0)
                try:
                    return await self._encode(client, items, grids, left_s)
                except InvalidRows:
                    # The client may have compared them with the model of before the encoder's restart.
                    return await self._encode(client, items, grids, left_s)

            outcome: Any = await asyncio.wrap_future(self._encoder_thread.submit_future(call))
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

            # The client places rows on the calling thread's current GPU.
            torch.cuda.set_device(self._gpu)
        rows = []
        for outcome, grid in zip(await client.encode(items, timeout_s=left_s), grids, strict=True):
            if isinstance(outcome, EncoderError):
                raise outcome
            self._geometry.check(outcome, grid)
            rows.append(outcome)
        return rows
