"""The chunk finder against the protobuf parser: never a different answer, on anything."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lm_adapter.errors import InvalidRows
from lm_adapter.transport.inline import InlineRowsBuffer
from lm_adapter.transport.wire import find_chunk
from vision_encoder.v1 import encoder_pb2 as pb


def parsed(message: bytes) -> pb.ItemEvent | None:
    try:
        return pb.ItemEvent.FromString(message)
    except DecodeError:
        return None


def assert_agrees(message: bytes) -> bool:
    """Whether the finder took the message; then the parser must say the same of it."""
    found = find_chunk(message)
    if found is None:
        return False
    event = parsed(message)
    assert event is not None, message.hex()
    assert event.WhichOneof("event") == "chunk"
    assert found.item_index == event.item_index
    assert found.offset_bytes == event.chunk.offset_bytes
    assert bytes(found.data) == event.chunk.data
    return True


def varint(value: int, *, padded_to: int = 0) -> bytes:
    """An encoding of the value; with padding, a longer one than needed, which parsers take too."""
    out = bytearray()
    while value > 0x7F or len(out) + 1 < padded_to:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@st.composite
def field(draw: st.DrawFn, payload: st.SearchStrategy[bytes] | None = None) -> bytes:
    """One field of any number, wire type and (mostly well-formed) value."""
    number = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 15, 16, 2000, 2**28]))
    wire_type = draw(st.sampled_from([0, 1, 2, 2, 2, 3, 4, 5, 6, 7]))
    tag = varint(number << 3 | wire_type, padded_to=draw(st.sampled_from([0, 0, 0, 2, 3, 5])))
    match wire_type:
        case 0:
            value = draw(st.sampled_from([0, 1, 127, 128, 2**28, 2**32 - 1, 2**32, 2**63, 2**64 - 1]))
            return tag + varint(value, padded_to=draw(st.sampled_from([0, 0, 2, 4, 9, 10, 11])))
        case 1:
            return tag + draw(st.binary(min_size=8, max_size=8))
        case 5:
            return tag + draw(st.binary(min_size=4, max_size=4))
        case 2:
            data = draw(payload if payload is not None else st.binary(max_size=20))
            wrong_by = draw(st.sampled_from([0, 0, 0, 0, 1, -1, 2**31]))
            length = max(0, len(data) + wrong_by)
            return tag + varint(length, padded_to=draw(st.sampled_from([0, 0, 0, 3, 5]))) + data
        case _:
            return tag


def fields(payload: st.SearchStrategy[bytes] | None = None) -> st.SearchStrategy[bytes]:
    return st.lists(field(payload), max_size=5).map(b"".join)


@st.composite
def around_a_chunk(draw: st.DrawFn) -> bytes:
    """A well-formed chunk with other fields before, inside and behind it."""
    inside = draw(fields()) + b"\x08\x05" * draw(st.integers(0, 1)) + b"\x12\x03abc" + draw(fields())
    return draw(fields()) + b"\x1a" + varint(len(inside)) + inside + draw(fields())


@settings(deadline=None, max_examples=1500)
@given(fields(fields()) | around_a_chunk())
@example(b"")
@example(b"\x1a\x00")
@example(b"\x1a\x03\x12\x01a\x1a\x02\x08\x01")  # two chunks merge
@example(b"\x1a\x00\x22\x00")  # the failure wins
@example(b"\x08\xff\xff\xff\xff\x7f\x1a\x00")  # an index of 35 bits loses its upper ones
@example(b"\x1a\x0b\x08" + b"\xff" * 9 + b"\x7f")  # an offset of 70 bits
@example(b"\x1a\x0c\x08" + b"\x80" * 10 + b"\x00")  # an offset of eleven bytes
@example(b"\x1a\x08\x12\x81\x80\x80\x80\x80\x00a")  # a length of six bytes
def test_p33_random_field_sequences_agree_with_protobuf(message: bytes) -> None:
    assert_agrees(message)


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=64))
def test_random_bytes_agree_with_protobuf(message: bytes) -> None:
    assert_agrees(message)


chunks = st.builds(
    lambda index, offset, data: pb.ItemEvent(
        item_index=index, chunk=pb.RowsChunk(offset_bytes=offset, data=data)
    ),
    st.integers(0, 2**28 - 1),
    st.integers(0, 2**63 - 1),
    st.binary(max_size=300),
)


@settings(deadline=None, max_examples=300)
@given(chunks)
def test_every_ordinary_chunk_is_found_without_the_parser(event: pb.ItemEvent) -> None:
    assert assert_agrees(event.SerializeToString())


@settings(deadline=None, max_examples=500)
@given(chunks, st.data())
def test_p33_cut_and_flipped_chunks_agree_with_protobuf(event: pb.ItemEvent, data: st.DataObject) -> None:
    message = bytearray(event.SerializeToString())
    if not message:
        return
    position = data.draw(st.integers(0, len(message) - 1))
    if data.draw(st.booleans()):
        del message[position:]
    else:
        message[position] ^= data.draw(st.integers(1, 255))
    assert_agrees(bytes(message))


def test_unknown_fields_are_skipped_and_order_does_not_matter() -> None:
    data_first = b"\x12\x03abc" + b"\x08\x07"
    message = b"\x7a\x02hi" + b"\x1a" + bytes([len(data_first)]) + data_first + b"\x90\x01\x05" + b"\x08\x09"
    found = find_chunk(message)
    assert found is not None
    assert (found.item_index, found.offset_bytes, bytes(found.data)) == (9, 7, b"abc")


@pytest.mark.parametrize(
    "event",
    [
        pb.ItemEvent(item_index=3, result=pb.ItemResult(num_rows=4)),
        pb.ItemEvent(failure=pb.ItemFailure(reason="QUEUE_FULL")),
        pb.ItemEvent(item_index=3),
    ],
)
def test_other_events_are_left_to_the_parser(event: pb.ItemEvent) -> None:
    assert find_chunk(event.SerializeToString()) is None


def test_the_data_is_a_view_of_the_message() -> None:
    message = pb.ItemEvent(chunk=pb.RowsChunk(data=b"x" * 1000)).SerializeToString()
    found = find_chunk(message)
    assert found is not None
    assert found.data.obj is message


def test_the_buffer_takes_chunks_in_order_and_completes() -> None:
    buffer = InlineRowsBuffer(10, 2)
    buffer.write(0, memoryview(b"abcdef"))
    assert not buffer.complete
    buffer.write(6, memoryview(b"ghij"))
    assert buffer.complete
    assert buffer.payload.tobytes() == b"abcdefghij"
    assert buffer.payload.dtype == np.uint8


@pytest.mark.parametrize(
    ("chunk_writes", "field_name", "figures"),
    [
        ([(1, b"a")], "chunk_offset", ("1", "0")),
        ([(0, b"abc"), (0, b"abc")], "chunk_offset", ("0", "3")),
        ([(0, b"abc"), (4, b"abc")], "chunk_offset", ("4", "3")),
        ([(0, b"abcdefghijk")], "chunk_range", ("11", "10")),
        ([(0, b"abc"), (3, b"")], "rows_bytes", ("3", "10")),
        ([(0, b"abcdefghi"), (9, b"j"), (10, b"")], "num_chunks", ("3", "2")),
    ],
)
def test_p22_chunks_that_do_not_fit_are_refused_with_both_figures(
    chunk_writes: list[tuple[int, bytes]], field_name: str, figures: tuple[str, str]
) -> None:
    buffer = InlineRowsBuffer(10, 2)
    *fitting, (offset, data) = chunk_writes
    for fitting_offset, fitting_data in fitting:
        buffer.write(fitting_offset, memoryview(fitting_data))
    with pytest.raises(InvalidRows) as caught:
        buffer.write(offset, memoryview(data))
    assert caught.value.field == field_name
    assert (caught.value.details["found"], caught.value.details["expected"]) == figures
