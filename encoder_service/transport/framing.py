"""Frames of the broker's socket, as the service reads and writes them.

Owns the four bytes of magic, the length and its bound (broker.proto's head says the format). What is inside
a frame, and the descriptors beside it, belong to the connection.
"""

from __future__ import annotations

import struct

MAGIC = b"VEBR"
HEADER = struct.Struct(">4sI")
MAX_PAYLOAD_BYTES = 64 * 1024


class FrameError(Exception):
    """These bytes are not a frame; nothing after them can be read either."""


def encode_frame(payload: bytes) -> bytes:
    """One frame. Raises ValueError when the payload is over the bound."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are allowed")
    return HEADER.pack(MAGIC, len(payload)) + payload


class FrameReader:
    """Puts frames together from bytes that arrive in any pieces. Holds at most what was fed and not taken."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __len__(self) -> int:
        """Bytes that are in no finished frame yet, or in one not taken."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_payload(self) -> bytes | None:
        """The next whole frame's payload, or None until more bytes come. Raises FrameError at the first byte
        that cannot be a frame's."""
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
