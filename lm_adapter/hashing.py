"""Items that a client hashes itself, to find their rows where it can look by itself.

Owns which items are hashed and where that runs; what a digest is, is ``keys``'. It is the digest that the
service would compute, so that the key is the same. What was found out is kept beside the items: they are the
caller's and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from lm_adapter.keys import content_digest, frames_digest, pixels_digest
from lm_adapter.transport.off_loop import LARGE_COPY_BYTES, CallerStreams
from lm_adapter.transport.settings import blake3_is_installed
from lm_adapter.types import ClipItem, FramesItem, ImageItem, Item, PixelItem

__all__ = ["HashedItems", "ItemHasher"]

MAX_HASHED_BYTES = 16 << 20
"""Of one item, unless hashing was asked for in so many words: up to here it takes less than a fifth of what a
hit takes by gRPC, which has the bytes to send. docs/transports.md has the figures."""
HASHED_ON_LOOP_BYTES = 512 << 10
"""Of one call's items, a tenth of a millisecond: what is more is worth the way to a thread and back."""
MESSAGE_MARGIN_BYTES = 64 << 10
"""For what stands around an item's content in a message, generously."""

_FILES = (ImageItem, ClipItem)


class HashedItems(list[Item]):
    """A call's items. computed: digests of some of those that carry none, by index."""

    def __init__(self, items: Iterable[Item], computed: Mapping[int, bytes]) -> None:
        super().__init__(items)
        self.computed = computed

    def to_send(self, indices: Iterable[int]) -> list[Item]:
        """Those that are to be asked for in the ordinary way. A file goes with its digest, which saves the
        service the hashing: bytes are what they were. A tensor is its owner's to write to, and goes without:
        the service hashes what it was sent, so that no digest ever stands for other content."""
        return [
            _with_digest(item, self.computed[index])
            if index in self.computed and isinstance(item := self[index], _FILES)
            else self[index]
            for index in indices
        ]


class ItemHasher:
    """Of one client. Thread-safe: it keeps nothing."""

    def __init__(self, mode: str) -> None:
        """mode: one of ``settings.HASHING``."""
        self.takes_all = mode == "on"
        self.is_on = mode != "off" and blake3_is_installed()

    def hashed(self, items: Sequence[Item], max_message_bytes: int) -> Sequence[Item]:
        """The items, as HashedItems where digests are known that they do not carry: known from before, or
        computed now. max_message_bytes: an item that is above it cannot be sent, and fails whether its rows
        are there or not; 0 for no limit."""
        known = _known(items)
        return self._hashed(items, known, self._to_hash(items, known, max_message_bytes))

    async def hashed_on_loop(
        self, items: Sequence[Item], max_message_bytes: int, streams: CallerStreams
    ) -> Sequence[Item]:
        """``hashed``; on a thread where that takes a while."""
        known = _known(items)
        to_hash = self._to_hash(items, known, max_message_bytes)
        num_bytes = LARGE_COPY_BYTES if sum(to_hash.values()) > HASHED_ON_LOOP_BYTES else 0
        if streams.are_here(num_bytes):
            return self._hashed(items, known, to_hash)
        return await streams.run(num_bytes, partial(self._hashed, items, known, to_hash))

    def _hashed(
        self, items: Sequence[Item], known: Mapping[int, bytes], to_hash: Mapping[int, int]
    ) -> Sequence[Item]:
        computed: dict[int, bytes] = {}
        for index in to_hash:
            digest = known.get(index) or _digest(items[index])
            if digest is not None:
                computed[index] = digest
        return HashedItems(items, computed) if computed or known else items

    def _to_hash(
        self, items: Sequence[Item], known: Mapping[int, bytes], max_message_bytes: int
    ) -> dict[int, int]:
        """Bytes to hash of each item whose digest is to be known, by index; 0 where it is known already."""
        found: dict[int, int] = {}
        for index, item in enumerate(items if self.is_on else ()):
            num_bytes = None if item.digest else _content_bytes(item)
            if num_bytes is None:
                continue
            if max_message_bytes and num_bytes > max_message_bytes - MESSAGE_MARGIN_BYTES:
                continue
            if index in known:
                found[index] = 0
            elif self.takes_all or (
                num_bytes <= MAX_HASHED_BYTES and (isinstance(item, _FILES) or not _is_on_gpu(item))
            ):
                found[index] = num_bytes
        return found


def _with_digest(item: Item, digest: bytes) -> Item:
    """What ``dataclasses.replace`` gives, in a fifth of the time."""
    made: Item = object.__new__(type(item))
    made.__dict__.update(item.__dict__, digest=digest)
    return made


def _known(items: Sequence[Item]) -> Mapping[int, bytes]:
    return items.computed if isinstance(items, HashedItems) else {}


def _content_bytes(item: Item) -> int | None:
    """None for what has no content here, or not of a type that content has."""
    if isinstance(item, _FILES):
        return len(item.data) if isinstance(item.data, bytes) else None
    content = _tensor(item)
    return None if content is None else getattr(content, "nbytes", None)


def _tensor(item: Item) -> object:
    if isinstance(item, PixelItem):
        return item.pixel_values
    return item.frames if isinstance(item, FramesItem) else None


def _is_on_gpu(item: Item) -> bool:
    """Such a tensor would be copied to the host only to be hashed."""
    content = _tensor(item)
    if content is None or isinstance(content, np.ndarray):
        return False
    return getattr(getattr(content, "device", None), "type", "cpu") != "cpu"


def _digest(item: Item) -> bytes | None:
    """None for what cannot be hashed; what is wrong with it is said when it is sent."""
    try:
        if isinstance(item, _FILES):
            return content_digest(item.data)
        if isinstance(item, PixelItem):
            return pixels_digest(item)
        return frames_digest(item) if isinstance(item, FramesItem) else None
    except Exception:
        return None
