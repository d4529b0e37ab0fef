"""Which pixel items of a call travel in shared memory, from publishing to the service's word on each.

Owns the choice (inline, a named segment, a memfd through the broker), the segments of a call, and how long
the choice is inline after the service refused another. A segment is ended when its item has an outcome, or
with its call; an item whose segment was refused is sent inline.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from lm_adapter import convert
from lm_adapter.errors import EncoderError, ItemFailed
from lm_adapter.transport.broker_client import BrokerClient
from lm_adapter.transport.probe import host_id
from lm_adapter.transport.publish import PublishedPixels, PublishFailed, publish_pixels
from lm_adapter.transport.reading import TRANSPORT_UNAVAILABLE
from lm_adapter.transport.settings import TransportSettings
from lm_adapter.transport.shared_transport import SharedTransport
from lm_adapter.types import Item, PixelItem, ServerInfo
from vision_encoder.v1 import encoder_pb2 as pb

__all__ = ["NO_PIXELS", "CallPixels", "PixelChoice"]

MIN_SHARED_BYTES = 1 << 20
"""A smaller tensor goes inline, unless shared memory was asked for by name."""
PAUSE_S = 30.0
"""Inline after a refusal."""
_MESSAGE_OVERHEAD_BYTES = 64 * 1024

_log = logging.getLogger(__name__)


class PixelChoice:
    """Of one client. Thread-safe."""

    def __init__(self, settings: TransportSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._inline_until_s = float("-inf")

    def call(
        self, info: ServerInfo, items: Sequence[Item], transport: Callable[[], SharedTransport | None]
    ) -> CallPixels:
        """Not published yet. transport: asked where a memfd may go out, for the connection to the broker."""
        wanted, offered = self._settings.pixels, info.pixel_input
        for item in items:
            if isinstance(item, PixelItem):
                break
        else:
            return NO_PIXELS
        if wanted == "inline" or offered is None or self._clock() < self._inline_until_s:
            return NO_PIXELS
        prefix, broker = "", None
        if wanted == "shm":
            if offered.name_prefixes and offered.host_id == host_id():
                prefix = offered.name_prefixes[0]
        elif offered.published:
            shared = transport()
            broker = None if shared is None else shared.broker
        if not prefix and broker is None:
            return NO_PIXELS
        least, most = MIN_SHARED_BYTES if wanted == "auto" else 1, offered.max_tensor_bytes
        if info.limits.max_message_bytes:  # what is refused has to fit inline
            most = min(most, info.limits.max_message_bytes - _MESSAGE_OVERHEAD_BYTES)
        planned = {
            index: item
            for index, item in enumerate(items)
            if isinstance(item, PixelItem) and least <= _num_bytes(item) <= most
        }
        return CallPixels(
            planned, self, prefix, self._settings.shm_dir, broker, info.limits.max_message_bytes
        )

    def pause(self, why: str) -> None:
        """Pixels go inline for a while."""
        now_s = self._clock()
        if now_s >= self._inline_until_s:
            _log.info("pixels go inline for %g s: %s", PAUSE_S, why)
        self._inline_until_s = now_s + PAUSE_S


class CallPixels:
    """The segments of one call, by the caller's index; a context manager that lasts as long as the call."""

    def __init__(
        self,
        planned: Mapping[int, PixelItem],
        choice: PixelChoice | None = None,
        prefix: str = "",
        folder: str = "",
        broker: BrokerClient | None = None,
        max_message_bytes: int = 0,
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self._planned = planned
        self._choice = choice
        self._prefix = prefix
        self._folder = folder
        self._broker = broker
        self._lock = threading.Lock()
        self._published: dict[int, PublishedPixels] = {}
        self._messages: dict[int, pb.Item] = {}
        self._closed = False

    def publish(self) -> Self:
        """Copies what is planned into segments; what cannot be published goes inline."""
        for index, item in self._planned.items():
            try:
                published = publish_pixels(
                    item.pixel_values, prefix=self._prefix, folder=self._folder, broker=self._broker
                )
            except PublishFailed as error:
                _log.debug("item %d goes inline: %s", index, error.message)
                continue
            except (EncoderError, TypeError):
                continue  # what does not travel is refused where its message is made
            with self._lock:
                if self._closed:
                    published.close()
                    return self
                self._published[index] = published
                self._messages[index] = convert.item_message(item, published.message())
        return self

    async def publish_off_loop(self) -> Self:
        """``publish`` on a thread; a cancelled caller leaves nothing behind."""
        if self._planned:
            try:
                await asyncio.to_thread(self.publish)
            except BaseException:
                self.close()
                raise
        return self

    @property
    def messages(self) -> Mapping[int, pb.Item]:
        """Items that go out by shared memory."""
        return self._messages

    def refused(self, index: int, outcome: object) -> bool:
        """Whether this outcome is of the way alone, and the item is to be sent inline."""
        if (
            index not in self._messages
            or not isinstance(outcome, ItemFailed)
            or outcome.reason != TRANSPORT_UNAVAILABLE
            or "pixels" not in outcome.details
        ):
            return False
        self.done(index, consumed=False)
        if self._choice is not None and outcome.details["pixels"] != "NOT_PUBLISHED":
            # A connection that was lost takes its segments along: the next one's are good.
            self._choice.pause(outcome.message)
        return True

    def done(self, index: int, *, consumed: bool) -> None:
        """The item has its outcome."""
        if index not in self._messages:
            return
        with self._lock:
            published = self._published.pop(index, None)
        if published is not None:
            published.close(consumed=consumed)

    def inlined(self, index: int, message: pb.Item) -> pb.Item:
        """The item's message for another attempt: its segment is gone."""
        if index not in self._messages:
            return message
        self.done(index, consumed=False)
        return convert.item_message(self._planned[index])

    def close(self) -> None:
        """Ends every segment that is left. Twice is once."""
        with self._lock:
            self._closed = True
            left, self._published = list(self._published.values()), {}
        for published in left:
            published.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._planned:
            self.close()


NO_PIXELS = CallPixels({})
"""A call whose pixels, if it has any, go inline."""


def _num_bytes(item: PixelItem) -> int:
    return int(getattr(item.pixel_values, "nbytes", 0))
