"""Frames of the broker's socket: four magic bytes, the payload's length as a big-endian uint32, the payload.

Client and broker both use this module. ``broker.proto`` defines the payloads. File descriptors of a frame are
sent as SCM_RIGHTS with its first byte.
"""

from __future__ import annotations

import struct

MAGIC = b"VEBR"
HEADER = struct.Struct(">4sI")
MAX_PAYLOAD_BYTES = 64 * 1024


class FrameError(Exception):
    """The bytes are not a frame. Nothing more can be read from the connection."""


def encode_frame(payload: bytes) -> bytes:
    """Encodes one frame. Raises ValueError for a payload larger than MAX_PAYLOAD_BYTES."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are allowed")
    return HEADER.pack(MAGIC, len(payload)) + payload


class FrameReader:
    """Assembles frames from bytes that arrive in pieces of any size. Holds only bytes that were fed and not
    yet taken."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_payload(self) -> bytes | None:
        """The payload of the next complete frame, or None. Raises FrameError at the first byte that cannot
        belong to a frame."""
        head = bytes(self._buffer[: len(MAGIC)])
        if not MAGIC.startswith(head):
            raise FrameError(f"a frame starts with {MAGIC!r}, found {head!r}")
        if len(self._buffer) < HEADER.size:
            return None
        _, num_bytes = HEADER.unpack_from(self._buffer)
        if num_bytes > MAX_PAYLOAD_BYTES:
            raise FrameError(f"a frame of {num_bytes} bytes, at most {MAX_PAYLOAD_BYTES} are allowed")
        end = HEADER.size + num_bytes
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return payload
