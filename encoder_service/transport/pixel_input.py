"""Pixels that requests bring in shared memory: from the call that names a segment to a tensor of our own.

Owns that an item's segment ends, however its call does. Named segments come from
``pixel_folder``, memfds from ``pixel_book``; the wire's messages are ``rpc``'s. Used from the event loop;
large copies run on workers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import Self

import torch

from encoder_service.config import Settings
from encoder_service.errors import InvalidRequest, TransportUnavailable
from encoder_service.scheduler.admission import Admission, Permit
from encoder_service.transport.pixel_book import SegmentBook
from encoder_service.transport.pixel_folder import SegmentFolder, segment_folder
from encoder_service.transport.pixel_layout import PixelLayout
from encoder_service.transport.pixel_segments import PixelCounters, PixelSegment, SegmentRef, refuse
from vision_encoder.v1 import encoder_pb2 as pb

COPY_INLINE_BYTES = 1 << 20
"""A tensor below this is copied on the event loop: a thread hop costs more."""
SWEEP_S = 60.0
"""Between sweeps: a publisher may be killed at any time before its request."""


class PixelInput:
    """What this service takes of pixels in shared memory. ``start`` and ``stop`` once."""

    def __init__(
        self,
        counters: PixelCounters | None = None,
        *,
        folder: SegmentFolder | None = None,
        book: SegmentBook | None = None,
        max_tensor_bytes: int = 0,
    ) -> None:
        """folder: named segments; book: those of the broker; None: not taken. max_tensor_bytes: of one."""
        self.counters = PixelCounters() if counters is None else counters
        self.folder = folder
        self.book = book
        self.max_tensor_bytes = max_tensor_bytes
        self._sweeping: asyncio.Task[None] | None = None
        # Of the calls in progress.
        self._items: set[ItemPixels] = set()

    async def start(self) -> None:
        """Sweeps what dead publishers left, now and from time to time."""
        if self.folder is not None:
            await asyncio.to_thread(self.folder.sweep)
            self._sweeping = asyncio.get_running_loop().create_task(self._keep_swept(self.folder))

    async def stop(self) -> None:
        """Ends the segments of calls that were cut off; nothing is attached any more. Twice is once."""
        sweeping, self._sweeping = self._sweeping, None
        if sweeping is not None:
            sweeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeping
        for item in list(self._items):
            item.end()
        if self.book is not None:
            self.book.close()
        if self.folder is not None:
            self.folder.close()

    def announcement(self, host_id: str) -> pb.GetServerInfoResponse:
        """What GetServerInfo tells of it: nothing where nothing is taken."""
        told = pb.GetServerInfoResponse()
        if self.folder is not None or self.book is not None:
            told.pixel_input.host_id = host_id
            told.pixel_input.name_prefixes.extend(() if self.folder is None else self.folder.prefixes)
            told.pixel_input.published = self.book is not None
            told.pixel_input.max_tensor_bytes = self.max_tensor_bytes
        return told

    def item(self, ref: SegmentRef | None, namespace: str) -> ItemPixels | None:
        """The segment of one item of a call, which sees to it that it ends."""
        if ref is None:
            return None
        item = ItemPixels(self, ref, namespace, self._items.discard)
        self._items.add(item)
        return item

    def attach(self, ref: SegmentRef, namespace: str) -> PixelSegment:
        """Raises TransportUnavailable, InvalidRequest."""
        if bool(ref.name) == bool(ref.segment_id):
            raise InvalidRequest("a pixel tensor in shared memory has either a name or a segment_id")
        if ref.name and self.folder is not None:
            return self.folder.attach(ref)
        if ref.segment_id and self.book is not None:
            return self.book.attach(ref, namespace)
        kind = "named segments" if ref.name else "published segments"
        raise refuse(self.counters, "NOT_OFFERED", f"{kind} of shared memory are not taken here")

    async def _keep_swept(self, folder: SegmentFolder) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await asyncio.to_thread(folder.sweep)


class ItemPixels:
    """One item's segment: waiting, then attached, then ended. ``end`` on every way out; the first counts."""

    def __init__(
        self,
        source: PixelInput,
        ref: SegmentRef,
        namespace: str,
        on_end: Callable[[ItemPixels], None] = lambda _: None,
    ) -> None:
        self._on_end = on_end
        self._source = source
        self._ref = ref
        self._namespace = namespace
        self._segment: PixelSegment | None = None
        self._is_waiting = True

    @contextlib.asynccontextmanager
    async def tensor(
        self, layout: PixelLayout, admission: Admission, workers: Executor
    ) -> AsyncIterator[torch.Tensor]:
        """The item's tensor, whose bytes are held at ``admission`` for as long as the block lasts, and longer
        where a worker still copies for a caller that left. The segment is ended. Raises TransportUnavailable,
        PixelTensorMismatch, QueueFull."""
        with self:
            segment = self._attach()
            layout.check(self._source.max_tensor_bytes)
            layout.check_fits(segment.file_bytes)
            permit = admission.acquire(layout.num_bytes)
            copying: Future[torch.Tensor] | None = None
            try:
                if layout.num_bytes < COPY_INLINE_BYTES:
                    tensor = segment.consume(layout)
                else:
                    copying = workers.submit(segment.consume, layout)
                    tensor = await asyncio.wrap_future(copying)
                yield tensor
            finally:
                _release_after(copying, permit)

    def end(self) -> None:
        """A segment that was not attached is attached for that, so that the rules about files hold."""
        was_waiting, self._is_waiting = self._is_waiting, False
        segment = self._segment
        if segment is None and was_waiting and self._ref.ends:
            with contextlib.suppress(TransportUnavailable, InvalidRequest):
                segment = self._source.attach(self._ref, self._namespace)
        if segment is not None:
            segment.close()
        self._on_end(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _attach(self) -> PixelSegment:
        if not self._is_waiting:
            raise InvalidRequest("the segment was consumed by this call already")
        self._is_waiting = False
        self._segment = self._source.attach(self._ref, self._namespace)
        return self._segment


def _release_after(copying: Future[torch.Tensor] | None, permit: Permit) -> None:
    """Gives the bytes back when nobody writes them any more."""
    if copying is None or copying.done():
        permit.release()
        return
    loop = asyncio.get_running_loop()

    def release(_: Future[torch.Tensor]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the count with it
            loop.call_soon_threadsafe(permit.release)

    copying.add_done_callback(release)


def open_pixel_input(settings: Settings) -> PixelInput:
    """As the settings say; not started. Raises ConfigurationError."""
    counters = PixelCounters()
    has_book = bool(settings.broker_path) and settings.max_published_bytes > 0
    return PixelInput(
        counters,
        folder=segment_folder(settings.shm_dir, settings.shm_prefixes, settings.shm_allowed_uids, counters),
        book=SegmentBook(settings.max_published_bytes, counters) if has_book else None,
        max_tensor_bytes=settings.max_message_bytes,
    )
