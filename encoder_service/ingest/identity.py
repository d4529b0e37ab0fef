"""Content digests and embedding keys of items.

The only place where the service computes digests. A caller's digest is authoritative within its namespace;
without one, the content is hashed with BLAKE3. There is no random digest and no fallback.
``vision_encoder.layout.keys``, which clients use as well, defines which bytes are hashed in which order.
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
    """The name of a dtype in keys and file metadata, such as ``float32`` or ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def check_digest(digest: bytes, what: str = "content_digest") -> bytes:
    """Returns the digest. Raises InvalidDigest unless it has exactly 32 bytes."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidDigest(
            f"{what} has {len(digest)} bytes, needs {DIGEST_BYTES}", found=len(digest), needed=DIGEST_BYTES
        )
    return digest


def _digest_tensor(header: bytes, tensor: torch.Tensor) -> bytes:
    """BLAKE3 of a tensor with its dtype, shape and grid: equal bytes in another shape give another digest."""
    hasher = blake3(header)
    hasher.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.digest()


def content_digest(item: Item) -> bytes:
    """The item's 32-byte digest: the caller's, after a check of its length, or BLAKE3 of the content.

    Raises InvalidDigest for a digest of another length, and for a digest-only item without a digest.
    """
    if item.content_digest is not None:
        return check_digest(item.content_digest)
    match item.content:
        case EncodedFile(data):
            return blake3(data).digest()
        case PixelValues(tensor, grid):
            return _digest_tensor(keys.pixels_header(dtype_name(tensor.dtype), tensor.shape, grid), tensor)
        case FrameArray(frames):  # rate and timestamps enter the key, not the digest
            return _digest_tensor(keys.frames_header(frames.shape), frames)
        case DigestOnly():
            raise InvalidDigest("a digest-only item needs a content_digest")


def content_bytes(item: Item) -> int:
    """Bytes of content that an item holds while it is queued."""
    match item.content:
        case EncodedFile(data):
            return len(data)
        case PixelValues(tensor) | FrameArray(tensor):
            return tensor.nbytes
        case DigestOnly():
            return 0


def source_text(content: Content) -> str:
    """The kind of pixel source in the key; see ``layout.keys``. Rows of pixels that a caller preprocessed
    never share a key with rows of pixels that the service preprocessed."""
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
    """The 32-byte key of an item's rows, from everything that determines them."""
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
