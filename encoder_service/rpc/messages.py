"""What a message would take in memory, found out before it is parsed.

Owns the walk over a message's bytes by its descriptor. Parsed, an empty message of two bytes takes sixty, and
a packed number of one byte takes eight, so the size of a message does not bound what it becomes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from encoder_service.errors import InvalidRequest
from vision_encoder.layout.varint import read_varint

Request = TypeVar("Request", bound=Message)

# Of a message. The parts are its fields and packed numbers, and those of all messages inside it.
MAX_FIELDS = 4096
MAX_PARTS = 1 << 18
# Upper bound of what a part takes when it is parsed, besides its bytes.
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
# All bytes of a varint but the last have the highest bit.
_MORE = 0x80
_NOT_LAST = bytes(range(_MORE, 256))


def num_parts(data: bytes, request_type: type[Message], max_parts: int = MAX_PARTS) -> int:
    """How many parts a message has; more than ``max_parts`` if it has more. Raises InvalidRequest for more
    than MAX_FIELDS fields at the top, and for bytes that are no message."""
    try:
        return _walk(data, request_type.DESCRIPTOR, max_parts)
    except (DecodeError, IndexError, ValueError):
        raise not_a_message(data, request_type.DESCRIPTOR.full_name) from None


def check_parts(found: int) -> None:
    """Raises InvalidRequest with both numbers."""
    if found > MAX_PARTS:
        raise InvalidRequest(
            f"the message has {found} or more fields and numbers, at most {MAX_PARTS} are read"
        )


def parsed(data: bytes, request_type: type[Request]) -> Request:
    """Parses a message whose parts were counted. Raises InvalidRequest."""
    try:
        return request_type.FromString(data)
    except DecodeError:
        raise not_a_message(data, request_type.DESCRIPTOR.full_name) from None


def not_a_message(data: bytes, name: str) -> InvalidRequest:
    return InvalidRequest(f"{len(data)} bytes are no {name}", found_bytes=len(data))


@cache
def _inner(descriptor: Descriptor) -> dict[int, Descriptor | int]:
    """By number of a field: the message in it, or the bytes of a packed number, 0 for a varint. Other fields,
    and unknown ones, are kept as bytes."""
    found: dict[int, Descriptor | int] = {}
    for field in descriptor.fields:
        if field.message_type is not None and field.type != FieldDescriptor.TYPE_GROUP:
            found[field.number] = field.message_type
        elif field.is_repeated and field.type not in _TEXT:
            found[field.number] = _FIXED_BYTES.get(field.type, 0)
    return found


def _walk(data: bytes, descriptor: Any, max_parts: int) -> int:
    """Raises IndexError where the message is cut, DecodeError for a message that ends inside a field and for
    fields of unknown kinds, groups among them."""
    outer: list[tuple[int, dict[int, Descriptor | int]]] = []
    end, inner = len(data), _inner(descriptor)
    position = found = num_fields = 0
    while True:
        while position == end:
            if not outer:
                return found
            end, inner = outer.pop()
        tag = data[position]
        position += 1
        if tag >= _MORE:
            tag, position = read_varint(data, position - 1)
        found += 1
        if not outer:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise InvalidRequest(
                    f"the message has {num_fields} or more fields, at most {MAX_FIELDS} are read"
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
            into = inner.get(tag >> 3)
            if into is None:
                position = stop
            elif isinstance(into, int):
                found += length // into if into else _num_varints(data, position, length, max_parts)
                position = stop
            else:
                outer.append((end, inner))
                end, inner = stop, _inner(into)
        elif kind == _VARINT:
            position += 1
            if data[position - 1] >= _MORE:
                _, position = read_varint(data, position - 1)
        elif kind in (_I64, _I32):
            position += 8 if kind == _I64 else 4
        else:
            raise DecodeError(f"a field has kind {kind}")
        if position > end:
            raise DecodeError("a field is longer than its message")
        if found > max_parts:
            return found


def _num_varints(data: bytes, position: int, length: int, max_parts: int) -> int:
    if length > 10 * max_parts:  # each has at most ten bytes
        return length // 10
    return len(data[position : position + length].translate(None, _NOT_LAST))
