"""Content digests and embedding keys.

Owns every hash of content in the service. A caller's digest is authoritative inside its namespace; without
one the content is hashed with BLAKE3. There is no random or fallback digest.

The key is SHA-256 over a tagged, length-prefixed list of everything that decides the rows, so that an
adapter can derive it with the standard library alone (``lm_adapter.keys`` does; a contract test holds the
two equal).
"""

from __future__ import annotations

import functools
import hashlib
import struct

import torch
from blake3 import blake3

from encoder_service.errors import InvalidDigest
from encoder_service.ingest.video.source import DEFAULT_SOURCE_FPS
from encoder_service.types import (
    DIGEST_BYTES,
    Content,
    DigestOnly,
    EncodedFile,
    FrameArray,
    Grid,
    Item,
    Modality,
    PixelValues,
    PreprocessOptions,
)

KEY_TAG = b"vision_encoder.key.v1"
PIXELS_TAG = b"vision_encoder.pixels.v1"
FRAMES_TAG = b"vision_encoder.frames.v1"


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``, ``bfloat16``, ...: the name that enters keys and file metadata."""
    return str(dtype).removeprefix("torch.")


def length_prefixed(fields: list[bytes]) -> bytes:
    """Each field behind its length as a little-endian uint32: no two lists give the same bytes."""
    return b"".join(struct.pack("<I", len(field)) + field for field in fields)


def check_digest(digest: bytes, what: str = "content_digest") -> bytes:
    """The digest itself. Raises InvalidDigest unless it has exactly 32 bytes."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidDigest(
            f"{what} has {len(digest)} bytes, needs {DIGEST_BYTES}", found=len(digest), needed=DIGEST_BYTES
        )
    return digest


def digest_pixels(pixels: PixelValues) -> bytes:
    """BLAKE3 of a pixel tensor with its dtype, shape and grid: equal bytes in another shape differ."""
    tensor = pixels.pixel_values.contiguous()
    header = length_prefixed(
        [
            PIXELS_TAG,
            dtype_name(tensor.dtype).encode(),
            struct.pack(f"<{tensor.dim()}Q", *tensor.shape),
            struct.pack("<3Q", *pixels.grid),
        ]
    )
    hasher = blake3(header)
    hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.digest()


def digest_frames(frames: FrameArray) -> bytes:
    """BLAKE3 of frames [T, H, W, 3] with their shape. Their rate and timestamps enter the key instead."""
    tensor = frames.frames_THWC.contiguous()
    hasher = blake3(length_prefixed([FRAMES_TAG, struct.pack(f"<{tensor.dim()}Q", *tensor.shape)]))
    hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.digest()


def content_digest(item: Item) -> bytes:
    """The 32-byte digest of the item's content: the caller's, checked, or BLAKE3 of the content.

    Raises InvalidDigest for a given digest of another length, or for a digest-only item without one.
    """
    if item.content_digest is not None:
        return check_digest(item.content_digest)
    match item.content:
        case EncodedFile(data):
            return blake3(data).digest()
        case PixelValues():
            return digest_pixels(item.content)
        case FrameArray():
            return digest_frames(item.content)
        case DigestOnly():
            raise InvalidDigest(
                "a digest-only item needs a content_digest, found 0 bytes", found=0, needed=32
            )


def content_bytes(item: Item) -> int:
    """Bytes of content that an item holds while it waits."""
    match item.content:
        case EncodedFile(data):
            return len(data)
        case PixelValues(tensor) | FrameArray(tensor):
            return tensor.nbytes
        case DigestOnly():
            return 0


def options_text(options: PreprocessOptions) -> str:
    """Canonical text of the given options: ``name=value`` sorted by name, joined by ``;``. Integers in
    decimal, floats as the hexadecimal of their eight little-endian IEEE bytes."""

    def value_text(value: int | float) -> str:
        return struct.pack("<d", value).hex() if isinstance(value, float) else str(value)

    return ";".join(f"{name}={value_text(value)}" for name, value in sorted(options.given().items()))


def source_text(content: Content) -> str:
    """How the content came, for the key: a caller's own pixels never share a key with the service's.

    ``encoded`` for files and digests, ``pixels:t,h,w`` for pixel tensors. For arrays of frames
    ``frames:fps=`` and the rate in hexadecimal, as of an option, 24 where none is given; or ``frames:at=``
    and the SHA-256 of the timestamps as little-endian doubles."""
    if isinstance(content, FrameArray):
        if content.timestamps_s is not None:
            packed = struct.pack(f"<{len(content.timestamps_s)}d", *content.timestamps_s)
            return f"frames:at={hashlib.sha256(packed).hexdigest()}"
        fps = DEFAULT_SOURCE_FPS if content.fps is None else content.fps
        return f"frames:fps={struct.pack('<d', fps).hex()}"
    if isinstance(content, PixelValues):
        grid: Grid = content.grid
        return f"pixels:{grid.t},{grid.h},{grid.w}"
    return "encoded"


def embedding_key(
    item: Item,
    digest: bytes,
    *,
    namespace: str,
    model_fingerprint: bytes,
    preprocess_fingerprint: bytes,
    dtype: torch.dtype,
) -> bytes:
    """The 32-byte key of an item's rows: SHA-256 of everything that determines them."""
    before = _key_before(namespace)
    after = _key_after(
        item.modality,
        model_fingerprint,
        preprocess_fingerprint,
        options_text(item.options),
        source_text(item.content),
        dtype,
    )
    return hashlib.sha256(b"".join((before, length_prefixed([digest]), after))).digest()


@functools.lru_cache(maxsize=256)
def _key_before(namespace: str) -> bytes:
    """The fields of a key before the digest."""
    return length_prefixed([KEY_TAG, namespace.encode()])


@functools.lru_cache(maxsize=256)
def _key_after(
    modality: Modality,
    model_fingerprint: bytes,
    preprocess_fingerprint: bytes,
    options: str,
    source: str,
    dtype: torch.dtype,
) -> bytes:
    """The fields behind the digest, the same for most items."""
    return length_prefixed(
        [
            modality.value.encode(),
            model_fingerprint,
            preprocess_fingerprint,
            options.encode(),
            source.encode(),
            dtype_name(dtype).encode(),
        ]
    )
