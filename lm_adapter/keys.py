"""Content digests and embedding keys of items, as the service derives them.

Owns which bytes of an item are hashed; ``vision_encoder.layout.keys`` owns the byte layouts. Digests are
BLAKE3; no other hash is used. An engine can compute keys before it has a connection."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import TypeGuard

from blake3 import blake3

from lm_adapter.errors import EncoderError, InvalidRequest
from lm_adapter.items import ClipItem, DigestItem, FramesItem, Grid, ImageItem, Item, PixelItem, UrlItem
from lm_adapter.types import ModelInfo
from vision_encoder.layout import keys as layout
from vision_encoder.layout.keys import DIGEST_BYTES

__all__ = [
    "DIGEST_BYTES",
    "content_digest",
    "frames_digest",
    "item_digest",
    "item_key",
    "pixels_digest",
    "routing_digest",
]


def content_digest(data: bytes) -> bytes:
    """BLAKE3 of a file's bytes, 32 bytes."""
    return _blake3(data)


def pixels_digest(dtype: str, shape: Sequence[int], data: bytes | memoryview, grid: Grid) -> bytes:
    """BLAKE3 of a pixel tensor including its dtype, shape and grid. data: row-major, little-endian; see
    ``PixelItem.packed``."""
    return _blake3(layout.pixels_header(dtype, shape, grid), data)


def frames_digest(item: FramesItem) -> bytes:
    """BLAKE3 of frames including their shape. Raises the errors of ``FramesItem.array``."""
    return _blake3(*_content(item))


def item_digest(item: Item) -> bytes:
    """The item's own digest, or else BLAKE3 of its content. Raises InvalidRequest for a DigestItem or UrlItem
    without a digest."""
    return item.digest or _blake3(*_content(item))


def routing_digest(item: Item) -> bytes:
    """The 32 bytes by which a gateway routes each content to one replica.

    This is ``item_digest``. For a URL without a digest it is SHA-256 of the URL. For an item that cannot be
    hashed it is an arbitrary value; encoding that item reports the error. It does not enter the embedding
    key, which the service derives from the item alone.
    """
    if item.digest:
        return item.digest if len(item.digest) == DIGEST_BYTES else hashlib.sha256(item.digest).digest()
    if isinstance(item, UrlItem):
        return hashlib.sha256(item.url.encode()).digest()
    try:
        return item_digest(item)
    except (InvalidRequest, TypeError):
        return hashlib.sha256().digest()


def _content(item: Item) -> tuple[bytes | memoryview, ...]:
    """What is hashed of an item without a digest. Raises InvalidRequest, and the errors of its content."""
    match item:
        case ImageItem() | ClipItem():
            return (item.data,)
        case FramesItem():
            array = item.array()
            return layout.frames_header(array.shape), array.reshape(-1).data
        case PixelItem():
            dtype, shape, data = item.packed()
            return layout.pixels_header(dtype, shape, item.grid), data
        case DigestItem():
            raise InvalidRequest(f"digest has 0 bytes, needs {DIGEST_BYTES}", reason="INVALID_DIGEST")
        case UrlItem():
            raise InvalidRequest("only the service knows the content at a URL: give the item a digest")


def item_key(item: Item, model: ModelInfo, *, namespace: str = "") -> bytes:
    """The embedding key that a service with this model assigns to an item. Hashes an item without a digest.

    Raises the errors of ``item_digest``, and InvalidRequest for a digest whose length is not 32 bytes.
    """
    digest = item_digest(item)
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(f"digest has {len(digest)} bytes, needs {DIGEST_BYTES}", reason="INVALID_DIGEST")
    source = layout.ENCODED_SOURCE
    if isinstance(item, PixelItem):
        source = layout.pixels_source(item.grid)
    elif isinstance(item, FramesItem):
        source = item.source
    return layout.embedding_key(
        digest,
        namespace=namespace,
        modality=item.modality.value,
        model_fingerprint=model.model_fingerprint,
        preprocess_fingerprint=model.preprocess_fingerprint,
        options={} if isinstance(item, PixelItem) else item.options.given(),
        source=source,
        dtype=model.dtype,
    )


def lacks_digest(item: Item, max_bytes: float = math.inf) -> TypeGuard[ImageItem | ClipItem]:
    """Whether ``with_digests`` adds one: to files of at most max_bytes. The service hashes the rest."""
    return isinstance(item, ImageItem | ClipItem) and not item.digest and len(item.data) <= max_bytes


def with_digests(items: Sequence[Item], max_bytes: float = math.inf) -> list[Item]:
    """The items, with BLAKE3 digests of their files."""
    return [
        dataclasses.replace(item, digest=content_digest(item.data)) if lacks_digest(item, max_bytes) else item
        for item in items
    ]


def known_keys(items: Sequence[Item], models: Sequence[ModelInfo], namespace: str) -> dict[int, bytes]:
    """Keys of the items that have a digest, by index. models: that may encode them; only a single one has
    keys."""
    keys: dict[int, bytes] = {}
    for index, item in enumerate(items if len(models) == 1 else ()):
        if item.digest:
            # An item that has no key is sent, and the service's failure states what is wrong with it.
            with contextlib.suppress(EncoderError):
                keys[index] = item_key(item, models[0], namespace=namespace)
    return keys


def _blake3(*pieces: bytes | memoryview) -> bytes:
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    digest: bytes = hasher.digest()
    return digest
