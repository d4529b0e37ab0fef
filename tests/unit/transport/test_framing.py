"""Frames of both sides: any cut of the bytes, garbage, bounds, descriptors and the frames they belong to."""

from __future__ import annotations

import itertools
import os
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_service.transport import framing
from lm_adapter.transport import broker_frames
from lm_adapter.transport.broker_errors import BrokerViolation
from tests.unit.transport.broker_rig import num_descriptors
from vision_encoder.v1 import broker_pb2 as pb


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(min_value=0), max_size=40))
def test_the_service_reads_frames_cut_anywhere(payloads: list[bytes], places: list[int]) -> None:
    data = b"".join(framing.encode_frame(payload) for payload in payloads)
    reader = framing.FrameReader()
    found = []
    for piece in cut(data, places):
        reader.feed(piece)
        while (payload := reader.next_payload()) is not None:
            found.append(payload)
    assert found == payloads
    assert len(reader) == 0


@given(
    st.lists(st.integers(min_value=1, max_value=1 << 60), max_size=6),
    st.lists(st.integers(min_value=0), max_size=40),
)
def test_the_adapter_reads_replies_cut_anywhere(ids: list[int], places: list[int]) -> None:
    replies = [pb.BrokerReply(request_id=number, pong=pb.BrokerPong()) for number in ids]
    data = b"".join(broker_frames.encode_frame(reply.SerializeToString()) for reply in replies)
    reader = broker_frames.ReplyReader()
    found = []
    for piece in cut(data, places):
        reader.feed(piece)
        while (reply := reader.next_reply()) is not None:
            found.append(reply.message)
    assert found == replies


@given(st.binary(min_size=1, max_size=64))
def test_garbage_is_refused_at_its_first_wrong_byte(data: bytes) -> None:
    reader, replies = framing.FrameReader(), broker_frames.ReplyReader()
    reader.feed(data)
    replies.feed(data)
    if framing.MAGIC.startswith(data[:4]):
        return  # the start of a frame after all
    with pytest.raises(framing.FrameError, match="VEBR"):
        reader.next_payload()
    with pytest.raises(BrokerViolation, match="VEBR"):
        replies.next_reply()


def test_one_wrong_byte_is_enough() -> None:
    reader = framing.FrameReader()
    reader.feed(b"G")
    with pytest.raises(framing.FrameError):
        reader.next_payload()


@pytest.mark.parametrize("num_bytes", [65537, 1 << 31, (1 << 32) - 1])
def test_a_length_over_the_bound_is_refused_before_the_bytes_come(num_bytes: int) -> None:
    head = struct.pack(">4sI", b"VEBR", num_bytes)
    reader, replies = framing.FrameReader(), broker_frames.ReplyReader()
    reader.feed(head)
    replies.feed(head)
    with pytest.raises(framing.FrameError, match=rf"{num_bytes} bytes, at most 65536"):
        reader.next_payload()
    with pytest.raises(BrokerViolation, match=rf"{num_bytes} bytes, at most 65536"):
        replies.next_reply()


@pytest.mark.parametrize("encode", [framing.encode_frame, broker_frames.encode_frame])
def test_the_largest_frame_is_written_and_read_a_larger_one_is_not(encode: object) -> None:
    assert callable(encode)
    reader = framing.FrameReader()
    reader.feed(encode(bytes(65536)))
    assert reader.next_payload() == bytes(65536)
    with pytest.raises(ValueError, match="65537 bytes, at most 65536"):
        encode(bytes(65537))


# -- descriptors on a real socket ------------------------------------------------------------------------


def attached(number: int, num: int = 2) -> bytes:
    reply = pb.BrokerReply(request_id=number, num_descriptors=num, attached=pb.BrokerAttached())
    return broker_frames.encode_frame(reply.SerializeToString())


def plain(number: int) -> bytes:
    reply = pb.BrokerReply(request_id=number, pong=pb.BrokerPong())
    return broker_frames.encode_frame(reply.SerializeToString())


def read_all(reader: broker_frames.ReplyReader, end: socket.socket) -> list[broker_frames.ReceivedReply]:
    replies = []
    while reader.receive(end):
        while (reply := reader.next_reply()) is not None:
            replies.append(reply)
    return replies


def memfd(content: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


def test_each_reply_gets_its_own_descriptors_whatever_lies_between() -> None:
    before = num_descriptors()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fds = [memfd(content) for content in (b"a", b"b", b"c", b"d")]
        ours.sendall(plain(1))
        socket.send_fds(ours, [attached(2)], fds[:2])
        ours.sendall(plain(3) + plain(4))
        frame = attached(5)
        socket.send_fds(ours, [frame[:1]], fds[2:])  # the descriptors travel with the first byte
        ours.sendall(frame[1:])
        ours.shutdown(socket.SHUT_WR)
        for descriptor in fds:
            os.close(descriptor)
        replies = read_all(broker_frames.ReplyReader(), theirs)
        contents = [[os.pread(fd, 9, 0) for fd in reply.descriptors] for reply in replies]
        inheritable = [os.get_inheritable(fd) for reply in replies for fd in reply.descriptors]
        for reply in replies:
            broker_frames.close_descriptors(reply.descriptors)
    assert [reply.message.request_id for reply in replies] == [1, 2, 3, 4, 5]
    assert contents == [[], [b"a", b"b"], [], [], [b"c", b"d"]]
    assert inheritable == [False] * 4
    assert num_descriptors() == before


def test_descriptors_nobody_announced_are_closed_and_end_the_connection() -> None:
    before = num_descriptors()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = broker_frames.ReplyReader()
        fd = memfd(b"x")
        for _ in range(70):
            socket.send_fds(ours, [plain(1)], [fd])
        os.close(fd)
        for _ in range(64):
            assert reader.receive(theirs)
        with pytest.raises(BrokerViolation, match="65 arrivals of descriptors that no reply announced"):
            reader.receive(theirs)
    assert num_descriptors() == before


def test_more_descriptors_than_announced_are_refused_and_closed() -> None:
    before = num_descriptors()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fds = [memfd(b"x") for _ in range(3)]
        socket.send_fds(ours, [attached(1)], fds)
        broker_frames.close_descriptors(fds)
        reader = broker_frames.ReplyReader()
        reader.receive(theirs)
        with pytest.raises(BrokerViolation, match="2 descriptors announced, 3 came"):
            reader.next_reply()
    assert num_descriptors() == before


def test_announced_descriptors_that_did_not_come_end_the_connection() -> None:
    reader = broker_frames.ReplyReader()
    reader.feed(attached(1))
    with pytest.raises(BrokerViolation, match="2 descriptors announced, none came"):
        reader.next_reply()


def test_a_reader_that_closes_leaves_no_descriptor() -> None:
    before = num_descriptors()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fds = [memfd(b"x"), memfd(b"y")]
        socket.send_fds(ours, [attached(1)[:5]], fds)
        broker_frames.close_descriptors(fds)
        reader = broker_frames.ReplyReader()
        assert reader.receive(theirs)
        assert reader.next_reply() is None
        reader.close()
    assert num_descriptors() == before
