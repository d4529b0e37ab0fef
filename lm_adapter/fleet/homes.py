"""By what an item is given its home.

Owns routing keys. They decide where an item goes and never what it is: its embedding key is the service's,
from the digest that the caller gave or the service computed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lm_adapter.errors import EncoderError
from lm_adapter.hashing import HashedItems
from lm_adapter.keys import content_digest, frames_digest, pixels_digest
from lm_adapter.types import ClipItem, DigestItem, FramesItem, ImageItem, Item, PixelItem, UrlItem

__all__ = ["routed_items", "routing_key", "routing_keys"]

HASH_OFF_LOOP_BYTES = 1 << 18


def routing_key(item: Item) -> bytes | None:
    """The content digest, hashed here where it is not given; a URL stands for what lies there. None where
    there is no hash to be had (the package ``blake3`` is not installed): the item has no home then."""
    if item.digest:
        return item.digest
    try:
        match item:
            case ImageItem() | ClipItem():
                return content_digest(item.data)
            case PixelItem():
                return pixels_digest(item)
            case FramesItem():
                return frames_digest(item)
            case UrlItem():
                return b"url:" + item.url.encode(errors="replace")
            case DigestItem():
                return None
    except (EncoderError, TypeError):
        # What is wrong with the item itself is said when it is sent.
        return None


async def routing_keys(items: Sequence[Item]) -> list[bytes | None]:
    """Of each item; much content is hashed beside the loop."""
    if sum(map(_hashed_bytes, items)) < HASH_OFF_LOOP_BYTES:
        return [routing_key(item) for item in items]
    return await asyncio.to_thread(lambda: [routing_key(item) for item in items])


def routed_items(
    items: Sequence[Item], keys: Sequence[bytes | None], indices: Sequence[int]
) -> Sequence[Item]:
    """Some of the items, for one replica's client: what was hashed for its routing key is not hashed again
    there. keys: of all of them, as ``routing_keys`` gives them."""
    chosen = [items[index] for index in indices]
    computed: dict[int, bytes] = {}
    for position, index in enumerate(indices):
        key = keys[index]
        if key is not None and not items[index].digest and not isinstance(items[index], DigestItem | UrlItem):
            computed[position] = key
    return HashedItems(chosen, computed)


def _hashed_bytes(item: Item) -> int:
    if item.digest or isinstance(item, DigestItem | UrlItem):
        return 0
    if isinstance(item, ImageItem | ClipItem):
        return len(item.data)
    return int(getattr(item.frames if isinstance(item, FramesItem) else item.pixel_values, "nbytes", 0))
