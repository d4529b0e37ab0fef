"""Content digests and embedding keys of items, as the service derives them.

Owns which bytes of an item are hashed; the byte layouts are ``vision_encoder.layout.keys``. Digests are
BLAKE3, from the optional package ``blake3``, and there is no other hash. Keys need the standard library
alone, so an engine can name rows before it has a connection."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from lm_adapter.errors import InvalidRequest, MissingDependency
from lm_adapter.items import ClipItem, DigestItem, FramesItem, Grid, ImageItem, Item, PixelItem, UrlItem
from lm_adapter.types import ModelInfo
from vision_encoder.layout import keys as layout
from vision_encoder.layout.keys import DIGEST_BYTES

__all__ = [
    "DIGEST_BYTES",
    "can_hash",
    "content_digest",
    "frames_digest",
    "item_digest",
    "item_key",
    "pixels_digest",
]


def content_digest(data: bytes) -> bytes:
    """BLAKE3 of a file's bytes, 32 bytes. Raises MissingDependency without the package ``blake3``."""
    return _blake3(data)


def pixels_digest(dtype: str, shape: Sequence[int], data: bytes | memoryview, grid: Grid) -> bytes:
    """BLAKE3 of a pixel tensor with its dtype, shape and grid. data: row-major, little-endian; see
    ``PixelItem.packed``. Raises MissingDependency."""
    return _blake3(layout.pixels_header(dtype, shape, grid), data)


def frames_digest(item: FramesItem) -> bytes:
    """BLAKE3 of frames with their shape. Raises MissingDependency, and as ``FramesItem.array``."""
    array = item.array()
    return _blake3(layout.frames_header(array.shape), array.reshape(-1).data)


def item_digest(item: Item) -> bytes:
    """The item's own digest, or else BLAKE3 of its content.

    Raises MissingDependency without ``blake3``, InvalidRequest for a DigestItem or UrlItem without a digest.
    """
    if item.digest:
        return item.digest
    match item:
        case ImageItem() | ClipItem():
            return content_digest(item.data)
        case FramesItem():
            return frames_digest(item)
        case PixelItem():
            return pixels_digest(*item.packed(), item.grid)
        case DigestItem():
            raise InvalidRequest(f"a digest has 0 bytes, needs {DIGEST_BYTES}", reason="INVALID_DIGEST")
        case UrlItem():
            raise InvalidRequest("only the service knows the content at a URL: give the item a digest")


def item_key(item: Item, model: ModelInfo, *, namespace: str = "") -> bytes:
    """The key that a service with this model gives to an item. An item without a digest is hashed.

    Raises as ``item_digest``, and InvalidRequest for a digest of another length than 32 bytes.
    """
    digest = item_digest(item)
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(
            f"a digest has {len(digest)} bytes, needs {DIGEST_BYTES}", reason="INVALID_DIGEST"
        )
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


def can_hash() -> bool:
    """Whether ``blake3`` is installed. It is not imported for this."""
    try:
        return importlib.util.find_spec("blake3") is not None
    except ImportError:  # an import hook that hides it
        return False


def _blake3(*pieces: bytes | memoryview) -> bytes:
    try:
        import blake3
    except ImportError as error:
        raise MissingDependency("blake3", "hashing content") from error
    hasher = blake3.blake3(pieces[0])
    for piece in pieces[1:]:
        hasher.update(piece)
    digest: bytes = hasher.digest()
    return digest
