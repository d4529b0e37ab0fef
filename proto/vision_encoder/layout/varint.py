"""Varints of the protobuf encoding (protobuf.dev/programming-guides/encoding), for messages that are written
or read without the protobuf library."""

from __future__ import annotations

MAX_BYTES = 10


def encode_varint(value: int) -> bytes:
    """value: not negative."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(data: bytes, position: int, max_bytes: int = MAX_BYTES) -> tuple[int, int]:
    """The integer at a position, and the position behind it. Raises IndexError if the data ends inside it,
    ValueError if it has more than ``max_bytes``."""
    value = 0
    for shift in range(0, 7 * max_bytes, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"a varint has more than {max_bytes} bytes")
