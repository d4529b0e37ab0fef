"""Content digests and embedding keys, as the service derives them.

Owns the adapter's copy of the service's identity rules, with the standard library alone for keys: an engine
can name rows before it holds a connection. Digests are BLAKE3, through the optional package ``blake3``; there
is no other hash and no fallback. A contract test holds this module equal to the service's.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Sequence
from typing import Any

from lm_adapter.errors import InvalidRequest, MissingDependency
from lm_adapter.types import (
    DIGEST_BYTES,
    ClipItem,
    DigestItem,
    FramesItem,
    Grid,
    ImageItem,
    Item,
    Modality,
    ModelInfo,
    PixelItem,
    PreprocessOptions,
    UrlItem,
)

__all__ = [
    "ItemKeys",
    "content_digest",
    "embedding_key",
    "frames_digest",
    "item_key",
    "packed_digest",
    "pixels_digest",
]

KEY_TAG = b"vision_encoder.key.v1"
MAX_KNOWN = 4096
FRAMES_TAG = b"vision_encoder.frames.v1"
PIXELS_TAG = b"vision_encoder.pixels.v1"


def content_digest(data: bytes) -> bytes:
    """BLAKE3 of a file's bytes, 32 bytes. Raises MissingDependency without the package ``blake3``."""
    return _blake3(data)


def pixels_digest(item: PixelItem) -> bytes:
    """BLAKE3 of a pixel tensor with its dtype, shape and grid: equal bytes in another shape differ.

    Raises MissingDependency as ``content_digest``, TypeError as ``PixelItem.packed``.
    """
    return packed_digest(*item.packed_in_place(), item.grid)


def frames_digest(item: FramesItem) -> bytes:
    """BLAKE3 of frames with their shape. Raises as ``content_digest`` and ``FramesItem.array``."""
    array = item.array()
    header = _length_prefixed([FRAMES_TAG, struct.pack(f"<{array.ndim}Q", *array.shape)])
    return _blake3(header, array.reshape(-1).data)


def packed_digest(dtype: str, shape: Sequence[int], data: bytes | memoryview, grid: Grid) -> bytes:
    """``pixels_digest`` of a tensor that is packed already. shape: in elements; data: little-endian."""
    header = _length_prefixed(
        [
            PIXELS_TAG,
            dtype.encode(),
            struct.pack(f"<{len(shape)}Q", *shape),
            struct.pack("<3Q", *grid),
        ]
    )
    return _blake3(header, data)


def embedding_key(
    digest: bytes,
    *,
    model_fingerprint: bytes,
    preprocess_fingerprint: bytes,
    dtype: str,
    namespace: str = "",
    modality: Modality = Modality.IMAGE,
    options: PreprocessOptions | None = None,
    pixels_grid: Grid | None = None,
    frames_source: str | None = None,
) -> bytes:
    """The 32-byte key of an item's rows: SHA-256 over a tagged, length-prefixed list of what decides them.

    dtype: of the rows, ``float32``, ``bfloat16`` or ``float16``; pixels_grid: the grid of an item that is
    sent as pixels, None for files and digests; frames_source: a FramesItem's ``source``. Raises
    InvalidRequest for a digest that has not 32 bytes.
    """
    source = frames_source or "encoded"
    if pixels_grid is not None:
        source = _source_of_pixels(pixels_grid)
    before, behind = _around_digest(
        namespace,
        modality.value,
        model_fingerprint,
        preprocess_fingerprint,
        _options_text(options or PreprocessOptions()),
        source,
        dtype,
    )
    return _key(before, digest, behind)


class ItemKeys:
    """Keys of one model's items in one namespace. What decides them beside digests is the same for most
    items, and is put together once for as long as it is remembered. Thread-safe."""

    def __init__(self, model: ModelInfo, namespace: str = "") -> None:
        self._model = model
        self._namespace = namespace
        self._known: dict[tuple[object, ...], tuple[bytes, bytes]] = {}

    def of(self, item: Item, computed: bytes | None = None) -> bytes:
        """``item_key``. computed: the digest of an item that carries none, where its caller has hashed it.
        Raises as ``item_key``."""
        named: tuple[object, ...]
        if isinstance(item, PixelItem):
            named = (item.modality._value_, *item.grid)
        elif item.options is PreprocessOptions.NONE and not isinstance(item, FramesItem):
            named = (item.modality._value_,)
        else:
            named = (item.modality, item.options, item.source if isinstance(item, FramesItem) else None)
        around = self._known.get(named)
        if around is None:
            around = _around_item(item, self._model, self._namespace)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[named] = around
        before, behind = around
        return _key(before, item.digest or computed or _digest_of(item), behind)


def item_key(item: Item, model: ModelInfo, *, namespace: str = "") -> bytes:
    """The key that a service with this model gives to an item. An item without a digest is hashed.

    Raises MissingDependency when hashing is needed and ``blake3`` is absent, InvalidRequest for a digest of
    another length and for a URL without one.
    """
    before, behind = _around_item(item, model, namespace)
    return _key(before, item.digest or _digest_of(item), behind)


def _around_item(item: Item, model: ModelInfo, namespace: str) -> tuple[bytes, bytes]:
    source, options_text = "encoded", ""
    if isinstance(item, PixelItem):
        source = _source_of_pixels(item.grid)
    else:
        options_text = _options_text(item.options)
        if isinstance(item, FramesItem):
            source = item.source
    return _around_digest(
        namespace,
        item.modality.value,
        model.model_fingerprint,
        model.preprocess_fingerprint,
        options_text,
        source,
        model.dtype,
    )


def _around_digest(
    namespace: str,
    modality: str,
    model_fingerprint: bytes,
    preprocess_fingerprint: bytes,
    options_text: str,
    source: str,
    dtype: str,
) -> tuple[bytes, bytes]:
    """What is hashed for a key before the digest, its length included, and behind it."""
    behind = [modality.encode(), model_fingerprint, preprocess_fingerprint, options_text.encode()]
    before = _length_prefixed([KEY_TAG, namespace.encode()]) + struct.pack("<I", DIGEST_BYTES)
    return before, _length_prefixed([*behind, source.encode(), dtype.encode()])


def _key(before: bytes, digest: bytes, behind: bytes) -> bytes:
    """Raises InvalidRequest."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(
            f"a digest has {len(digest)} bytes, needs {DIGEST_BYTES}", reason="INVALID_DIGEST"
        )
    return hashlib.sha256(before + digest + behind).digest()


def _source_of_pixels(grid: Grid) -> str:
    return "pixels:{},{},{}".format(*grid)


def _digest_of(item: Item) -> bytes:
    match item:
        case ImageItem() | ClipItem():
            return content_digest(item.data)
        case FramesItem():
            return frames_digest(item)
        case PixelItem():
            return pixels_digest(item)
        case DigestItem():
            raise InvalidRequest(f"a digest has 0 bytes, needs {DIGEST_BYTES}", reason="INVALID_DIGEST")
        case UrlItem():
            raise InvalidRequest("what lies at a URL is known to the service alone: give the item's digest")


def _options_text(options: PreprocessOptions) -> str:
    """``name=value`` sorted by name, joined by ``;``. Integers in decimal, floats as the hexadecimal of
    their eight little-endian IEEE bytes."""

    def value_text(value: int | float) -> str:
        return struct.pack("<d", value).hex() if isinstance(value, float) else str(value)

    return ";".join(f"{name}={value_text(value)}" for name, value in sorted(options.given().items()))


def _length_prefixed(fields: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(field)) + field for field in fields)


def _blake3(*pieces: bytes | memoryview) -> bytes:
    module: Any = sys.modules.get("blake3")  # a statement that finds it there takes as long as a small file
    if module is None:
        try:
            import blake3 as module
        except ImportError as error:
            raise MissingDependency("blake3", "hashing content") from error
    hasher = module.blake3(pieces[0])
    for piece in pieces[1:]:
        hasher.update(piece)
    digest: bytes = hasher.digest()
    return digest
