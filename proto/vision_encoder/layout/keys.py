"""Content digests and embedding keys: which bytes are hashed, in which order.

Content is hashed with BLAKE3 by the caller of these functions (the package is optional for clients); keys
are SHA-256 and need the standard library only. Every field of a hash is preceded by its length as a
little-endian uint32.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

DIGEST_BYTES = 32
KEY_TAG = b"vision_encoder.key.v1"
FRAMES_TAG = b"vision_encoder.frames.v1"
PIXELS_TAG = b"vision_encoder.pixels.v1"
DEFAULT_SOURCE_FPS = 24.0
"""Of an array of frames whose sender names no rate."""

ENCODED_SOURCE = "encoded"
"""``source`` of files and of digests alone."""


def pixels_header(dtype: str, shape: Sequence[int], grid: Sequence[int]) -> bytes:
    """What is hashed before the bytes of a pixel tensor. dtype: ``float32``, ...; grid: t, h, w."""
    return length_prefixed(
        [PIXELS_TAG, dtype.encode(), struct.pack(f"<{len(shape)}Q", *shape), struct.pack("<3Q", *grid)]
    )


def frames_header(shape: Sequence[int]) -> bytes:
    """What is hashed before the bytes of uint8 frames [T, H, W, 3]."""
    return length_prefixed([FRAMES_TAG, struct.pack(f"<{len(shape)}Q", *shape)])


def pixels_source(grid: Sequence[int]) -> str:
    """``source`` of a pixel tensor: rows of pixels that a caller made never share a key with rows of ours."""
    t, h, w = grid
    return f"pixels:{t},{h},{w}"


def frames_source(fps: float | None, timestamps_s: Sequence[float] | None) -> str:
    """``source`` of an array of frames: its rate, or the SHA-256 of its timestamps as doubles."""
    if timestamps_s is not None:
        packed = struct.pack(f"<{len(timestamps_s)}d", *timestamps_s)
        return f"frames:at={hashlib.sha256(packed).hexdigest()}"
    return f"frames:fps={struct.pack('<d', DEFAULT_SOURCE_FPS if fps is None else fps).hex()}"


def options_text(options: Mapping[str, int | float]) -> str:
    """``name=value`` sorted by name, joined by ``;``. Integers in decimal, floats as the hexadecimal of
    their eight little-endian IEEE bytes."""

    def value_text(value: int | float) -> str:
        return struct.pack("<d", value).hex() if isinstance(value, float) else str(value)

    return ";".join(f"{name}={value_text(value)}" for name, value in sorted(options.items()))


def embedding_key(
    digest: bytes,
    *,
    namespace: str,
    modality: str,
    model_fingerprint: bytes,
    preprocess_fingerprint: bytes,
    options: Mapping[str, int | float],
    source: str,
    dtype: str,
) -> bytes:
    """The 32-byte key of an item's rows: SHA-256 over the tagged list of everything that decides them.

    digest: 32 bytes; modality: ``image`` or ``video``; options: the per-item overrides that were given;
    source: ``ENCODED_SOURCE``, ``pixels_source`` or ``frames_source``; dtype: of the rows. Raises ValueError
    for a digest of another length.
    """
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"a digest has {len(digest)} bytes, needs {DIGEST_BYTES}")
    fields = [
        KEY_TAG,
        namespace.encode(),
        digest,
        modality.encode(),
        model_fingerprint,
        preprocess_fingerprint,
        options_text(options).encode(),
        source.encode(),
        dtype.encode(),
    ]
    return hashlib.sha256(length_prefixed(fields)).digest()


def length_prefixed(fields: Sequence[bytes]) -> bytes:
    """The fields, each behind its length."""
    return b"".join(struct.pack("<I", len(field)) + field for field in fields)
