"""Reads the items of calls: from messages to the pipeline's records.

Owns where the content of an item comes from, and how long its bytes are counted. Fetches URLs; copies
segments of shared memory and converts large tensors on a worker thread. ``convert`` owns the meaning of
messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from encoder_service.errors import UnknownKey
from encoder_service.ingest.pixel_segments import PixelSegments
from encoder_service.ingest.urls import NO_HOLDER, UrlFetcher
from encoder_service.ingest.workers import MAX_COPIED_ON_LOOP_BYTES
from encoder_service.ops.shares import Holder
from encoder_service.rpc import convert
from encoder_service.scheduler.admission import Admission, Permit
from encoder_service.types import DigestOnly, EncodedFile, Item
from vision_encoder.v1 import encoder_pb2 as pb

Result = TypeVar("Result")
Use: TypeAlias = Callable[[Item, Permit | None], Awaitable[Result]]


@dataclass(frozen=True)
class ItemReader:
    """admission: counts content that is not part of a message. segments, urls: None where such items are
    refused."""

    admission: Admission
    workers: Executor
    segments: PixelSegments | None = None
    urls: UrlFetcher | None = None

    async def use(
        self,
        message: pb.Item,
        function: Use[Result],
        holder: Holder = NO_HOLDER,
        permit: Permit | None = None,
    ) -> Result:
        """Calls ``function`` with the item and the permit that counts its content, and returns its result.
        holder: whose share of the bytes and of the URL fetches is taken. permit: counts the message. Raises
        as ``convert.item_from_proto``, ``PixelSegments.read``, ``UrlFetcher.fetch`` and ``function``;
        QueueFull.
        """
        if message.WhichOneof("content") == "url" and self.urls is not None:
            return await self._use_url(message, self.urls, function, holder)
        async with self._read(message, holder, permit) as (item, counted):
            return await function(item, counted)

    @contextlib.asynccontextmanager
    async def _read(
        self, message: pb.Item, holder: Holder, counted: Permit | None
    ) -> AsyncIterator[tuple[Item, Permit | None]]:
        """The item, with content in memory that the service owns, and what counts it."""
        loop, kind = asyncio.get_running_loop(), message.WhichOneof("content")
        segment = convert.segment_from_proto(message)
        if segment is not None and self.segments is not None:
            self.segments.check(segment)
            permit = self.admission.acquire(segment.num_bytes, holder)
            reading = self.workers.submit(self.segments.read, segment)
            try:
                tensor = await asyncio.wrap_future(reading)
                yield convert.item_from_proto(message, tensor), permit
            finally:
                if reading.done():
                    permit.release()
                else:  # the caller has left, and the worker still writes to the memory
                    reading.add_done_callback(lambda _: loop.call_soon_threadsafe(permit.release))
        elif kind in ("encoded", "pixels", "frames") and message.ByteSize() > MAX_COPIED_ON_LOOP_BYTES:
            yield await loop.run_in_executor(self.workers, convert.item_from_proto, message), counted
        else:
            yield convert.item_from_proto(message), counted

    async def _use_url(
        self,
        message: pb.Item,
        urls: UrlFetcher,
        function: Use[Result],
        holder: Holder,
    ) -> Result:
        item = convert.item_from_proto(message, fetched=b"")
        if item.content_digest is not None:
            # The digest finds stored rows without a fetch.
            with contextlib.suppress(UnknownKey):
                return await function(replace(item, content=DigestOnly()), None)
        permit = self.admission.acquire(0, holder)
        try:
            data = await urls.fetch(message.url, item.modality, permit.add_bytes, holder)
            return await function(replace(item, content=EncodedFile(data)), permit)
        finally:
            permit.release()
