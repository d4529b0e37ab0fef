"""Varints, against the protobuf library."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vision_encoder.layout.varint import MAX_BYTES, encode_varint, read_varint
from vision_encoder.v1 import encoder_pb2 as pb


@given(st.integers(0, 2**64 - 1), st.binary(max_size=3), st.binary(max_size=3))
def test_a_varint_is_that_of_protobuf_and_is_read_where_it_is(
    value: int, before: bytes, after: bytes
) -> None:
    encoded = encode_varint(value)
    assert pb.RowsChunk(offset_bytes=value).SerializeToString() == (b"\x08" + encoded if value else b"")
    assert read_varint(before + encoded + after, len(before)) == (value, len(before) + len(encoded))


@given(st.integers(0, 2**64 - 1))
def test_a_varint_that_is_cut_ends_the_data(value: int) -> None:
    with pytest.raises(IndexError):
        read_varint(encode_varint(value)[:-1], 0)


@pytest.mark.parametrize("max_bytes", [5, MAX_BYTES])
def test_a_varint_of_too_many_bytes_is_refused(max_bytes: int) -> None:
    data = b"\xff" * max_bytes + b"\x01"
    with pytest.raises(ValueError, match=f"more than {max_bytes} bytes"):
        read_varint(data, 0, max_bytes)
    assert read_varint(data[1:], 0, max_bytes)[1] == max_bytes
