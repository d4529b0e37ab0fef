"""Bounds the memory of a message before it is parsed.

The size of a message does not bound the memory that it takes when it is parsed: an empty message of two bytes
takes sixty, and a packed number of one byte takes eight. So this module walks over the bytes of a message
with its descriptor and counts its parts.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from encoder_service.errors import InvalidRequest
from vision_encoder.layout.varint import read_varint

Request = TypeVar("Request", bound=Message)

# Limits on a message: fields at its top level; parts, which are its fields and packed numbers and those of
# all messages inside it.
MAX_FIELDS = 4096
MAX_PARTS = 1 << 18
# Upper bound of the memory of a parsed part, in addition to its bytes in the message.
PART_BYTES = 128

_VARINT, _I64, _LENGTH, _I32 = 0, 1, 2, 5
_FIXED_BYTES = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}
_TEXT = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_GROUP)
# The highest bit is set in all bytes of a varint but the last.
_MORE = 0x80
_NOT_LAST = bytes(range(_MORE, 256))


def num_parts(data: bytes, request_type: type[Message], max_parts: int = MAX_PARTS) -> int:
    """The number of parts of a message. Stops above ``max_parts``, so a larger result is a lower bound.
    Raises InvalidRequest for more than MAX_FIELDS fields at the top level, and for malformed bytes."""
    try:
        return _walk(data, request_type.DESCRIPTOR, max_parts)
    except (DecodeError, IndexError, ValueError):
        raise not_a_message(data, request_type.DESCRIPTOR.full_name) from None


def check_parts(num_parts: int) -> None:
    """Raises InvalidRequest above MAX_PARTS."""
    if num_parts > MAX_PARTS:
        raise InvalidRequest(
            f"the message has {num_parts} or more fields and numbers, at most {MAX_PARTS} are taken"
        )


def parsed(data: bytes, request_type: type[Request]) -> Request:
    """Parses a message whose parts were counted. Raises InvalidRequest."""
    try:
        return request_type.FromString(data)
    except DecodeError:
        raise not_a_message(data, request_type.DESCRIPTOR.full_name) from None


def not_a_message(data: bytes, name: str) -> InvalidRequest:
    return InvalidRequest(f"the {len(data)} bytes are not a valid {name}", found_bytes=len(data))


@cache
def _inner(descriptor: Descriptor) -> dict[int, Descriptor | int]:
    """The fields that can contain more than one part, by number: the descriptor of a message, or the size of
    a packed number in bytes, 0 for a varint."""
    inner: dict[int, Descriptor | int] = {}
    for field in descriptor.fields:
        if field.message_type is not None and field.type != FieldDescriptor.TYPE_GROUP:
            inner[field.number] = field.message_type
        elif field.is_repeated and field.type not in _TEXT:
            inner[field.number] = _FIXED_BYTES.get(field.type, 0)
    return inner


def _walk(data: bytes, descriptor: Any, max_parts: int) -> int:
    """The number of parts. Raises IndexError if the data end inside a tag or a number, and DecodeError if a
    field is longer than its message or has an unknown wire type. Groups are not supported."""
    outer: list[tuple[int, dict[int, Descriptor | int]]] = []
    end, inner = len(data), _inner(descriptor)
    position = num_parts = num_fields = 0
    while True:
        while position == end:
            if not outer:
                return num_parts
            end, inner = outer.pop()
        tag = data[position]
        position += 1
        if tag >= _MORE:
            tag, position = read_varint(data, position - 1)
        num_parts += 1
        if not outer:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise InvalidRequest(
                    f"the message has {num_fields} or more fields, at most {MAX_FIELDS} are taken"
                )
        kind = tag & 7
        if kind == _LENGTH:
            length = data[position]
            position += 1
            if length >= _MORE:
                length, position = read_varint(data, position - 1)
            stop = position + length
            if stop > end:
                raise DecodeError("a field is longer than its message")
            content = inner.get(tag >> 3)
            if content is None:
                position = stop
            elif isinstance(content, int):
                num_parts += length // content if content else _num_varints(data, position, length, max_parts)
                position = stop
            else:
                outer.append((end, inner))
                end, inner = stop, _inner(content)
        elif kind == _VARINT:
            position += 1
            if data[position - 1] >= _MORE:
                _, position = read_varint(data, position - 1)
        elif kind in (_I64, _I32):
            position += 8 if kind == _I64 else 4
        else:
            raise DecodeError(f"a field has wire type {kind}")
        if position > end:
            raise DecodeError("a field is longer than its message")
        if num_parts > max_parts:
            return num_parts


def _num_varints(data: bytes, position: int, length: int, max_parts: int) -> int:
    """The number of varints in ``length`` bytes, or a lower bound above ``max_parts``."""
    if length > 10 * max_parts:  # a varint has at most ten bytes
        return length // 10
    return len(data[position : position + length].translate(None, _NOT_LAST))
