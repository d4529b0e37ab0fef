"""The walk over a message before it is parsed: what it counts and refuses, and protobuf reads the same."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from encoder_service.errors import InvalidRequest
from encoder_service.rpc.messages import MAX_FIELDS, MAX_PARTS, check_parts, num_parts, parsed
from vision_encoder.layout.varint import encode_varint
from vision_encoder.tokenspeed import tokenspeed_encoder_pb2 as tokenspeed
from vision_encoder.v1 import encoder_pb2 as pb


def field(number: int, data: bytes) -> bytes:
    return encode_varint(number << 3 | 2) + encode_varint(len(data)) + data


def shape(numbers: bytes) -> bytes:
    """An EncodeRequest with these bytes as the packed shape of a tensor."""
    return field(1, field(6, field(2, field(2, numbers))))


def test_the_parts_of_ordinary_messages() -> None:
    file = pb.Item(modality=pb.MODALITY_IMAGE, content_digest=bytes(32), encoded=bytes(100_000))
    assert num_parts(pb.EncodeRequest(items=[file], namespace="a").SerializeToString(), pb.EncodeRequest) == 5
    clip = pb.Item(
        frames=pb.FrameArray(timestamps_s=[0.5] * 768, inline=pb.InlineTensor(shape=[768, 2, 2, 3]))
    )
    assert num_parts(pb.EncodeRequest(items=[clip]).SerializeToString(), pb.EncodeRequest) == 5 + 768 + 4
    rows = [pb.TouchedRows(key=bytes(32), generation=1 << 40)] * 256
    assert num_parts(pb.TouchRequest(rows=rows).SerializeToString(), pb.TouchRequest) == 3 * 256
    assert num_parts(b"", pb.EncodeRequest) == 0


@pytest.mark.parametrize(
    ("data", "least"),
    [
        (shape(b"\1" * (MAX_PARTS + 1)), MAX_PARTS + 1),  # eight times its size when it is parsed
        (shape(b"\xff" * 9 * (MAX_PARTS + 1)), 0),  # cut numbers
        (shape(b"\1" * (11 * MAX_PARTS)), MAX_PARTS + 1),
        (field(1, field(8, field(4, bytes(8 * (MAX_PARTS + 1))))), MAX_PARTS + 1),
        (field(1, field(6, field(2, b"\x10\1" * (MAX_PARTS + 1)))), MAX_PARTS + 1),  # numbers, each a field
        (field(1, b"\xf8\x3f\1" * (MAX_PARTS + 1)), MAX_PARTS + 1),  # unknown fields
    ],
    ids=["packed", "cut", "long", "doubles", "unpacked", "unknown"],
)
def test_p67_nested_parts_are_counted(data: bytes, least: int) -> None:
    found = num_parts(data, pb.EncodeRequest)
    assert found >= least
    if least:
        with pytest.raises(InvalidRequest, match=rf"{found} or more fields and numbers, at most {MAX_PARTS}"):
            check_parts(found)


@pytest.mark.parametrize("empty", [b"\x0a\0", b"\xf8\x3f\1"], ids=["items", "unknown"])
def test_p67_fields_at_the_top_have_a_bound(empty: bytes) -> None:
    assert num_parts(empty * MAX_FIELDS, pb.EncodeRequest) == MAX_FIELDS
    with pytest.raises(InvalidRequest, match=f"{MAX_FIELDS + 1} or more fields, at most {MAX_FIELDS}"):
        num_parts(empty * (MAX_FIELDS + 1), pb.EncodeRequest)


@pytest.mark.parametrize("kind", [3, 4, 6, 7])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_p67_groups_and_unknown_kinds_are_refused_everywhere(kind: int, depth: int) -> None:
    data = encode_varint(99 << 3 | kind)
    for number in (2, 6, 1)[3 - depth :]:
        data = field(number, data)
    with pytest.raises(InvalidRequest, match="are not a valid vision_encoder"):
        num_parts(data, pb.EncodeRequest)


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\5abc",
        field(1, b"\x0a\5abc") + b"abc",
        b"\x80" * 11,
        field(1, b"\x0d\1"),
        b"\x0a\xff\xff\xff",
    ],
)
def test_what_is_cut_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"{len(data)} bytes are not a valid"):
        num_parts(data, pb.EncodeRequest)


@given(st.binary(max_size=200))
def test_what_protobuf_reads_is_counted(data: bytes) -> None:
    """Random bytes are walked as protobuf reads them, except for groups."""
    for request_type in (pb.EncodeRequest, pb.TouchRequest, tokenspeed.EncodeRequest):
        message: Any = request_type
        try:
            found = num_parts(data, message)
        except InvalidRequest:
            continue
        assert found <= len(data)
        try:
            assert num_parts(parsed(data, message).SerializeToString(), message) <= 2 * found
        except InvalidRequest:  # such as text that is not UTF-8
            with pytest.raises(DecodeError):
                message.FromString(data)


def test_fixed_numbers_have_their_width() -> None:
    data = field(1, field(8, field(4, struct.pack("<3d", 1, 2, 3))))
    assert num_parts(data, pb.EncodeRequest) == 3 + 3
