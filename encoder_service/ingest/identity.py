"""Content digests and embedding keys of items.

Owns the one hash authority of the service. A caller's digest is authoritative inside its namespace; without
one the content is hashed with BLAKE3. There is no other way to get a digest: nothing random, no fallback.
Which bytes are hashed, in which order, is ``vision_encoder.layout.keys``', which clients use as well.
"""

from __future__ import annotations

import torch
from blake3 import blake3

from encoder_service.errors import InvalidDigest
from encoder_service.types import (
    DIGEST_BYTES,
    Content,
    DigestOnly,
    EncodedFile,
    FrameArray,
    Item,
    PixelValues,
)
from vision_encoder.layout import keys


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``, ``bfloat16``, ...: the name in keys and file metadata."""
    return str(dtype).removeprefix("torch.")


def check_digest(digest: bytes, what: str = "content_digest") -> bytes:
    """The digest itself. Raises InvalidDigest unless it has exactly 32 bytes."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidDigest(
            f"{what} has {len(digest)} bytes, needs {DIGEST_BYTES}", found=len(digest), needed=DIGEST_BYTES
        )
    return digest


def digest_pixels(pixels: PixelValues) -> bytes:
    """BLAKE3 of a pixel tensor with its dtype, shape and grid: equal bytes in another shape differ."""
    tensor = pixels.pixel_values
    return _digest_tensor(keys.pixels_header(dtype_name(tensor.dtype), tensor.shape, pixels.grid), tensor)


def digest_frames(frames: FrameArray) -> bytes:
    """BLAKE3 of frames [T, H, W, 3] with their shape. Their rate and timestamps enter the key, not the
    digest."""
    return _digest_tensor(keys.frames_header(frames.frames_THWC.shape), frames.frames_THWC)


def _digest_tensor(header: bytes, tensor: torch.Tensor) -> bytes:
    hasher = blake3(header)
    hasher.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.digest()


def content_digest(item: Item) -> bytes:
    """The item's 32-byte digest: the caller's, checked, or BLAKE3 of the content.

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


def source_text(content: Content) -> str:
    """See ``layout.keys``: rows of pixels that a caller made never share a key with rows of our own."""
    if isinstance(content, FrameArray):
        return keys.frames_source(content.fps, content.timestamps_s)
    if isinstance(content, PixelValues):
        return keys.pixels_source(content.grid)
    return keys.ENCODED_SOURCE


def embedding_key(
    item: Item,
    digest: bytes,
    *,
    namespace: str,
    model_fingerprint: bytes,
    preprocess_fingerprint: bytes,
    dtype: torch.dtype,
) -> bytes:
    """The 32-byte key of an item's rows, from everything that decides them."""
    return keys.embedding_key(
        digest,
        namespace=namespace,
        modality=item.modality.value,
        model_fingerprint=model_fingerprint,
        preprocess_fingerprint=preprocess_fingerprint,
        options=item.options.given(),
        source=source_text(item.content),
        dtype=dtype_name(dtype),
    )
