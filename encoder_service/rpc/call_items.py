"""The items of one call, from messages to the pipeline's records.

Owns where the reading of an item runs and how long what it read is counted; what messages mean is
``convert``'s, segments of shared memory are ``transport.pixel_input``'s, URLs are ``urls``'s. Segments that a
call names end with it at the latest, also where the call is refused, aborted or out of time before they were
looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar, overload

from encoder_service.errors import UnknownKey, UnsupportedContent
from encoder_service.ingest.urls import UrlFetcher
from encoder_service.rpc import convert
from encoder_service.scheduler.admission import Admission
from encoder_service.transport.pixel_input import ItemPixels, PixelInput
from encoder_service.types import DigestOnly, EncodedFile, Item, Modality
from vision_encoder.v1 import encoder_pb2 as pb

# A converted tensor below this is copied on the event loop.
CONVERT_INLINE_BYTES = 1 << 20

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class CallItem:
    """One item. admission: of the call's content; what the message itself holds is counted by the call."""

    message: pb.Item
    pixels: ItemPixels | None
    admission: Admission
    workers: Executor
    urls: UrlFetcher | None = None

    async def ask(self, question: Callable[[Item], Awaitable[Answer]]) -> Answer:
        """What the question has for an answer to the item, which is read for as long as that takes. Raises as
        ``read``, as the question, and as ``UrlFetcher.fetch``."""
        kind = self.message.WhichOneof("content")
        if kind not in ("url", "pixels", "frames"):
            return await question(convert.item_from_proto(self.message))
        if self.urls is None or kind != "url":
            async with self.read() as item:
                return await question(item)
        item = convert.item_from_proto(self.message, fetched=b"")
        if item.modality is not Modality.IMAGE:
            raise UnsupportedContent("URLs of clips are not taken; send a clip as pixel tensors")
        if item.content_digest is not None:
            # Whoever knows what lies at the URL has it fetched only where it is not held.
            with contextlib.suppress(UnknownKey):
                return await question(replace(item, content=DigestOnly()))
        permit = self.admission.acquire(0)
        try:
            data = await self.urls.fetch(self.message.url, permit.add_bytes)
            return await question(replace(item, content=EncodedFile(data)))
        finally:
            permit.release()

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[Item]:
        """An item of pixels, in memory of our own; those out of shared memory are counted as content for as
        long as the block lasts. A large tensor is copied off the event loop. Raises as
        ``convert.item_from_proto``, and QueueFull."""
        message = self.message
        if self.pixels is None:
            if message.ByteSize() > CONVERT_INLINE_BYTES:
                loop = asyncio.get_running_loop()
                item = await loop.run_in_executor(self.workers, convert.item_from_proto, message)
            else:
                item = convert.item_from_proto(message)
            yield item
            return
        with self.pixels:
            layout = convert.layout_from_proto(convert.shm_of(message) or pb.ShmTensor())
            async with self.pixels.tensor(layout, self.admission, self.workers) as tensor:
                yield convert.item_from_proto(message, tensor)


class CallItems(Sequence[CallItem]):
    """All of them; a context manager that lasts as long as the call."""

    def __init__(
        self,
        messages: Sequence[pb.Item],
        namespace: str,
        *,
        source: PixelInput,
        admission: Admission,
        workers: Executor,
        urls: UrlFetcher | None = None,
    ) -> None:
        """urls: without, items that are URLs are refused."""
        self._items = [
            CallItem(
                message,
                source.item(convert.segment_from_proto(message), namespace),
                admission,
                workers,
                urls,
            )
            for message in messages
        ]

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> CallItem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CallItem]: ...
    def __getitem__(self, index: int | slice) -> CallItem | Sequence[CallItem]:
        return self._items[index]

    def __enter__(self) -> CallItems:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for item in self._items:
            if item.pixels is not None:
                item.pixels.end()
