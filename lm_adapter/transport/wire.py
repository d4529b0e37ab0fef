"""Finds a rows chunk inside a raw ItemEvent, without the copies that a protobuf parser makes.

Owns the fast path only: whatever is not plainly one chunk, malformed bytes included, is answered with None
and left to the protobuf parser, so that the two can never disagree. The wire format is that of protobuf
(protobuf.dev/programming-guides/encoding): ``ItemEvent{item_index=1 varint, chunk=3 RowsChunk}``,
``RowsChunk{offset_bytes=1 varint, data=2 bytes}``, any field order, unknown fields skipped.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ChunkView", "find_chunk"]

_VARINT, _LENGTH = 0, 2
_INDEX_TAG = 1 << 3 | _VARINT
_CHUNK_TAG = 3 << 3 | _LENGTH
_OFFSET_TAG = 1 << 3 | _VARINT
_DATA_TAG = 2 << 3 | _LENGTH
# The tags of the other arms of ItemEvent.event: with one of them present the last arm wins, which is the
# protobuf parser's to decide.
_OTHER_EVENT_FIELDS = (2, 4)
_RESULT_FIRST = bytes([2 << 3 | _LENGTH])
"""How the result of a call's first item begins, which is not looked at any further."""
_MAX_TAG_BYTES = 4
_MAX_LENGTH_BYTES = 4
_MAX_VARINT_BYTES = 9


class ChunkView(NamedTuple):
    """One RowsChunk. data is a view of the message it was found in."""

    item_index: int
    offset_bytes: int
    data: memoryview


class _NotPlain(Exception):
    """This message is for the protobuf parser."""


def find_chunk(message: bytes) -> ChunkView | None:
    """The chunk that a serialised ItemEvent holds, or None when only the protobuf parser can tell."""
    if message[:1] == _RESULT_FIRST:
        return None
    try:
        return _find_chunk(message)
    except (_NotPlain, IndexError):
        return None


def _find_chunk(message: bytes) -> ChunkView | None:
    item_index = 0
    chunk: tuple[int, int] | None = None
    position, end = 0, len(message)
    while position < end:
        tag, position = _varint(message, position, _MAX_TAG_BYTES)
        if tag == _INDEX_TAG:
            item_index, position = _varint(message, position, _MAX_LENGTH_BYTES)
        elif tag == _CHUNK_TAG:
            if chunk is not None:
                raise _NotPlain  # two chunk fields merge
            length, position = _varint(message, position, _MAX_LENGTH_BYTES)
            chunk = (position, position + length)
            position += length
        else:
            if tag >> 3 in (1, 3, *_OTHER_EVENT_FIELDS):
                raise _NotPlain
            position = _skip(message, position, tag)
    if position != end or chunk is None:
        return None
    return _read_chunk(message, item_index, *chunk)


def _read_chunk(message: bytes, item_index: int, position: int, end: int) -> ChunkView:
    offset_bytes = 0
    data = (end, end)
    while position < end:
        tag, position = _varint(message, position, _MAX_TAG_BYTES)
        if tag == _OFFSET_TAG:
            offset_bytes, position = _varint(message, position, _MAX_VARINT_BYTES)
        elif tag == _DATA_TAG:
            length, position = _varint(message, position, _MAX_LENGTH_BYTES)
            data = (position, position + length)
            position += length
        else:
            if tag >> 3 in (1, 2):
                raise _NotPlain
            position = _skip(message, position, tag)
    if position != end:
        raise _NotPlain
    return ChunkView(item_index, offset_bytes, memoryview(message)[data[0] : data[1]])


def _varint(message: bytes, position: int, max_bytes: int) -> tuple[int, int]:
    """The value and the position behind it; a longer one than usual is the protobuf parser's."""
    value = 0
    for shift in range(0, 7 * max_bytes, 7):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise _NotPlain


def _skip(message: bytes, position: int, tag: int) -> int:
    """The position behind an unknown field's value. Groups and field number 0 are the protobuf parser's."""
    if tag >> 3 == 0:
        raise _NotPlain
    match tag & 7:
        case 0:
            return _varint(message, position, _MAX_VARINT_BYTES)[1]
        case 1:
            return position + 8
        case 2:
            length, position = _varint(message, position, _MAX_LENGTH_BYTES)
            return position + length
        case 5:
            return position + 4
        case _:
            raise _NotPlain
