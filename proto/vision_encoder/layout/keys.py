"""Content digests and embedding keys: which bytes are hashed, in which order.

The caller of these functions hashes content with BLAKE3. Keys are SHA-256 and need only the standard library.
In the input of a hash, every field follows its length as a little-endian uint32.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

ROUTING_KEY = "x-content-digest"
"""Metadata of a call through a gateway: the routing digest in hexadecimal, by which calls with the same
content reach the same replica. It is not part of an embedding key."""
GATEWAY_KEY = "x-vision-encoder-gateway"
"""Metadata that a gateway adds to every answer."""
DIGEST_BYTES = 32
KEY_TAG = b"vision_encoder.key.v1"
FRAMES_TAG = b"vision_encoder.frames.v1"
PIXELS_TAG = b"vision_encoder.pixels.v1"
DEFAULT_SOURCE_FPS = 24.0
"""The rate of an array of frames if the sender gives none."""

ENCODED_SOURCE = "encoded"
"""``source`` of files, and of items with only a digest."""


def pixels_header(dtype: str, shape: Sequence[int], grid: Sequence[int]) -> bytes:
    """The bytes hashed before those of a pixel tensor. dtype: ``float32``, ...; grid: t, h, w."""
    return length_prefixed(
        [PIXELS_TAG, dtype.encode(), struct.pack(f"<{len(shape)}Q", *shape), struct.pack("<3Q", *grid)]
    )


def frames_header(shape: Sequence[int]) -> bytes:
    """The bytes hashed before those of uint8 frames [T, H, W, 3]."""
    return length_prefixed([FRAMES_TAG, struct.pack(f"<{len(shape)}Q", *shape)])


def pixels_source(grid: Sequence[int]) -> str:
    """``source`` of a pixel tensor. It gives pixels that a caller preprocessed another key than pixels that
    the service preprocessed."""
    t, h, w = grid
    return f"pixels:{t},{h},{w}"


def frames_source(fps: float | None, timestamps_s: Sequence[float] | None) -> str:
    """``source`` of an array of frames: its rate, or SHA-256 of its timestamps as little-endian doubles."""
    if timestamps_s is not None:
        packed = struct.pack(f"<{len(timestamps_s)}d", *timestamps_s)
        return f"frames:at={hashlib.sha256(packed).hexdigest()}"
    return f"frames:fps={struct.pack('<d', DEFAULT_SOURCE_FPS if fps is None else fps).hex()}"


def options_text(options: Mapping[str, int | float]) -> str:
    """``name=value`` pairs sorted by name and joined by ``;``. Integers are decimal. Floats are the
    hexadecimal of their eight little-endian IEEE 754 bytes."""

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
    """The 32-byte key of an item's rows: SHA-256 over a tag and everything that the rows depend on.

    digest: 32 bytes; modality: ``image`` or ``video``; options: the per-item overrides that were given;
    source: ``ENCODED_SOURCE``, or from ``pixels_source`` or ``frames_source``; dtype: of the rows. Raises
    ValueError for a digest of another length.
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
    """The fields concatenated, each after its length."""
    return b"".join(struct.pack("<I", len(field)) + field for field in fields)
