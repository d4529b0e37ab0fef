"""Reads the items of calls: from messages to the pipeline's records.

Owns where an item's content comes from and how long its bytes are counted. Fetches URLs, copies shared memory
segments and converts large tensors on a worker thread. ``convert`` owns the meaning of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TypeVar

from encoder_service.errors import UnknownKey
from encoder_service.ingest.pixel_segments import PixelSegments
from encoder_service.ingest.urls import NO_HOLDER, UrlFetcher
from encoder_service.ingest.workers import MAX_COPIED_ON_LOOP_BYTES
from encoder_service.ops.shares import Holder
from encoder_service.rpc import convert
from encoder_service.scheduler.admission import Admission
from encoder_service.types import DigestOnly, EncodedFile, Item
from vision_encoder.v1 import encoder_pb2 as pb

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ItemReader:
    """admission: counts content that is not part of a message; the gate counts messages.
    segments, urls: None where such items are refused."""

    admission: Admission
    workers: Executor
    segments: PixelSegments | None = None
    urls: UrlFetcher | None = None

    async def ask(
        self,
        message: pb.Item,
        question: Callable[[Item], Awaitable[Answer]],
        holder: Holder = NO_HOLDER,
    ) -> Answer:
        """Calls ``question`` with the item and returns its answer. The content is held until then. holder:
        whose share of the bytes and of the URL fetches is taken. Raises as ``convert.item_from_proto``,
        ``PixelSegments.read``, ``UrlFetcher.fetch`` and ``question``; also QueueFull."""
        if message.WhichOneof("content") == "url" and self.urls is not None:
            return await self._ask_of_url(message, self.urls, question, holder)
        async with self._read(message, holder) as item:
            return await question(item)

    @contextlib.asynccontextmanager
    async def _read(self, message: pb.Item, holder: Holder) -> AsyncIterator[Item]:
        """The item, with content in memory that the service owns."""
        loop, kind = asyncio.get_running_loop(), message.WhichOneof("content")
        wanted = convert.segment_from_proto(message)
        if wanted is not None and self.segments is not None:
            self.segments.check(wanted)
            permit = self.admission.acquire(wanted.num_bytes, holder)
            reading = self.workers.submit(self.segments.read, wanted)
            try:
                tensor = await asyncio.wrap_future(reading)
                yield convert.item_from_proto(message, tensor)
            finally:
                if reading.done():
                    permit.release()
                else:  # the caller has left, but the worker still writes to the memory
                    reading.add_done_callback(lambda _: loop.call_soon_threadsafe(permit.release))
        elif kind in ("pixels", "frames") and message.ByteSize() > MAX_COPIED_ON_LOOP_BYTES:
            yield await loop.run_in_executor(self.workers, convert.item_from_proto, message)
        else:
            yield convert.item_from_proto(message)

    async def _ask_of_url(
        self,
        message: pb.Item,
        urls: UrlFetcher,
        question: Callable[[Item], Awaitable[Answer]],
        holder: Holder,
    ) -> Answer:
        item = convert.item_from_proto(message, fetched=b"")
        if item.content_digest is not None:
            # An item with a digest is fetched only if its rows are not stored.
            with contextlib.suppress(UnknownKey):
                return await question(replace(item, content=DigestOnly()))
        permit = self.admission.acquire(0, holder)
        try:
            data = await urls.fetch(message.url, item.modality, permit.add_bytes, holder)
            return await question(replace(item, content=EncodedFile(data)))
        finally:
            permit.release()
