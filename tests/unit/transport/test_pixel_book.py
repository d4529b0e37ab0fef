"""Segments published to a real broker: sealed, bounded, the publisher's alone, closed once."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import resource
import socket
from collections.abc import Iterator, Sequence

import pytest

from encoder_service.transport import pixel_book
from encoder_service.transport.broker_options import ConnectionLimits
from encoder_service.transport.pixel_book import SegmentBook
from encoder_service.transport.pixel_segments import PixelCounters, SegmentRef
from tests.unit.transport.broker_rig import RawClient, Rig, num_descriptors, running_broker, wait_until
from tests.unit.transport.pixel_rig import SIZE_SEALS, memfd
from vision_encoder.v1 import broker_pb2 as pb

MAX_BYTES = 4096
UNLIMITED = ConnectionLimits(requests_per_s=1e6, request_burst=1000)


class Publishing:
    def __init__(self, rig: Rig, book: SegmentBook, counters: PixelCounters) -> None:
        self.rig, self.book, self.counters = rig, book, counters

    def client(self, **given: str) -> Publisher:
        return Publisher(self.rig.path, **given)


class Publisher(RawClient):
    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        rights = array.array("i", descriptors).tobytes()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        self.socket.sendmsg([data], ancillary)

    def publish(self, descriptor: int | None, size_bytes: int) -> pb.BrokerReply:
        """Closes the descriptor."""
        frame = self.frame(publish=pb.BrokerPublish(size_bytes=size_bytes))
        self.send(frame, () if descriptor is None else (descriptor,))
        if descriptor is not None:
            os.close(descriptor)
        reply = self.reply()
        assert reply is not None
        return reply


@pytest.fixture
def publishing() -> Iterator[Publishing]:
    before = num_descriptors()
    with contextlib.ExitStack() as stack:
        counters = PixelCounters()
        book = SegmentBook(MAX_BYTES, counters)
        rig = stack.enter_context(running_broker(limits=UNLIMITED, segments=book))
        yield Publishing(rig, book, counters)
    assert len(book) == book.num_bytes == 0
    wait_until(lambda: num_descriptors() == before, "every descriptor's close")


def test_p19_what_was_published_is_consumed_by_its_owner_once(publishing: Publishing) -> None:
    with publishing.client(namespace="n") as client:
        reply = client.publish(memfd(b"pixels"), 6)
        ref = SegmentRef("", reply.published.segment_id, client.welcome.owner_id, ends=True)
        assert (len(publishing.book), publishing.book.num_bytes) == (1, 6)
        segment = publishing.book.attach(ref, "n")
        assert segment.file_bytes == 6
        segment.close()
        assert len(publishing.book) == 0
        unpublish = pb.BrokerUnpublish(segment_id=ref.segment_id)
        assert not client.ask(unpublish=unpublish).unpublished.was_held


def test_p19_unpublished_by_its_owner_and_by_no_other(publishing: Publishing) -> None:
    with publishing.client() as client, publishing.client() as other:
        segment_id = client.publish(memfd(b"pixels"), 6).published.segment_id
        assert len(segment_id) == 16
        unpublish = pb.BrokerUnpublish(segment_id=segment_id)
        assert not other.ask(unpublish=unpublish).unpublished.was_held
        assert len(publishing.book) == 1
        assert client.ask(unpublish=unpublish).unpublished.was_held
        assert not client.ask(unpublish=unpublish).unpublished.was_held


def test_p19_a_publisher_that_leaves_takes_its_segments_along_and_no_others(publishing: Publishing) -> None:
    with publishing.client() as stays:
        stays.publish(memfd(b"pixels"), 6)
        with publishing.client() as leaves:
            for _ in range(3):
                leaves.publish(memfd(b"pixels"), 6)
            assert len(publishing.book) == 4
        wait_until(lambda: len(publishing.book) == 1)


@pytest.mark.parametrize(
    ("seals", "size_bytes", "reason", "text"),
    [
        (0, 6, "NOT_SEALED", "seals 0x0, 0x6 are needed"),
        (fcntl.F_SEAL_GROW, 6, "NOT_SEALED", "seals 0x4, 0x6 are needed"),
        (fcntl.F_SEAL_SHRINK, 6, "NOT_SEALED", "seals 0x2"),
        (SIZE_SEALS, 7, "WRONG_SIZE", "has 6 bytes, 7 were announced"),
        (SIZE_SEALS, 0, "WRONG_SIZE", "has 6 bytes, 0 were announced"),
    ],
)
def test_p19_a_memfd_has_to_be_sealed_and_of_the_size_announced(
    publishing: Publishing, seals: int, size_bytes: int, reason: str, text: str
) -> None:
    with publishing.client() as client:
        failure = client.publish(memfd(b"pixels", seals=seals), size_bytes).failure
        assert (failure.reason, failure.retryable) == (reason, False)
        assert text in failure.message
        assert client.publish(memfd(b"pixels"), 6).HasField("published"), "the connection lives"
    assert publishing.counters.refused == {reason: 1}


def test_p19_what_is_no_memfd_is_not_taken(publishing: Publishing) -> None:
    with publishing.client() as client:
        read_end, write_end = os.pipe()
        os.close(write_end)
        assert client.publish(read_end, 1).failure.reason == "NOT_SEALED"
        assert client.publish(os.open(__file__, os.O_RDONLY), 1).failure.reason == "NOT_SEALED"


def test_p17_one_connection_has_a_share_and_all_have_a_bound(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = MAX_BYTES // pixel_book.OWNER_SHARE
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(publishing.client())
        failure = client.publish(memfd(b"x" * (share + 1)), share + 1).failure
        assert (failure.reason, failure.retryable) == ("TOO_MANY_SEGMENTS", False)
        assert f"{share + 1} bytes, at most {share}" in failure.message
        client.publish(memfd(b"x" * share), share)
        failure = client.publish(memfd(b"x"), 1).failure
        assert (failure.reason, failure.retryable) == ("TOO_MANY_SEGMENTS", True)
        for _ in range(pixel_book.OWNER_SHARE - 1):
            stack.enter_context(publishing.client()).publish(memfd(b"x" * share), share)
        another = stack.enter_context(publishing.client())
        failure = another.publish(memfd(b"x"), 1).failure
        assert f"{MAX_BYTES + 1} bytes, at most {MAX_BYTES}" in failure.message
    wait_until(lambda: len(publishing.book) == 0)
    monkeypatch.setattr(pixel_book, "MAX_SEGMENTS_PER_OWNER", 2)
    with publishing.client() as client:
        replies = [client.publish(memfd(b"x"), 1) for _ in range(3)]
        assert [reply.WhichOneof("reply") for reply in replies] == ["published", "published", "failure"]


def test_p19_descriptors_sent_unasked_end_the_connection(publishing: Publishing) -> None:
    for request in ({"ping": pb.BrokerPing()}, {"list": pb.BrokerListArenas()}):
        with publishing.client() as client:
            descriptor = memfd(b"x")
            client.send(client.frame(**request), (descriptor,))
            os.close(descriptor)
            while client.reply() is not None:
                pass
    with publishing.client() as client:  # two where one is taken
        descriptor = memfd(b"x")
        client.send(client.frame(publish=pb.BrokerPublish(size_bytes=1)), (descriptor, descriptor))
        os.close(descriptor)
        assert client.ended()
    wait_until(lambda: publishing.rig.broker.counters.closed["protocol_error"] == 3)
    assert len(publishing.book) == 0


def test_p19_descriptors_before_the_handshake_are_the_kernels_to_close(publishing: Publishing) -> None:
    with Publisher(publishing.rig.path, greet=False) as client:
        before = num_descriptors()
        descriptor = memfd(b"x")
        client.send(b"VE", (descriptor,))
        os.close(descriptor)
        wait_until(lambda: publishing.rig.broker.counters.accepted == 1)
        assert num_descriptors() <= before + 1


def test_a_request_without_its_descriptor_fails_alone(publishing: Publishing) -> None:
    with publishing.client() as client:
        assert client.publish(None, 6).failure.reason == "DESCRIPTOR_MISSING"
        assert client.publish(memfd(b"pixels"), 6).HasField("published")


def test_requests_in_one_piece_and_in_single_bytes_keep_their_descriptors(publishing: Publishing) -> None:
    with publishing.client() as client:
        sizes = [3, 5, 7]
        frames = [client.frame(publish=pb.BrokerPublish(size_bytes=size)) for size in sizes]
        for size, frame in zip(sizes, frames, strict=True):
            descriptor = memfd(b"x" * size)
            client.send(frame[:1], (descriptor,))
            os.close(descriptor)
            for position in range(1, len(frame)):
                client.send(frame[position : position + 1])
        replies = [client.reply() for _ in sizes]
        assert all(reply is not None and reply.HasField("published") for reply in replies)
        assert publishing.book.num_bytes == sum(sizes)


def test_p19_without_room_for_a_descriptor_the_request_fails_as_retryable(publishing: Publishing) -> None:
    with publishing.client() as client:
        descriptor = memfd(b"pixels")
        frame = client.frame(publish=pb.BrokerPublish(size_bytes=6))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The lowest free number was taken just now: none below the limit is free.
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor + 1, hard))
        try:
            client.send(frame, (descriptor,))
            reply = client.reply()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(descriptor)
        assert reply is not None
        assert (reply.failure.reason, reply.failure.retryable) == ("DESCRIPTORS_EXHAUSTED", True)
        assert client.publish(memfd(b"pixels"), 6).HasField("published")


def test_a_broker_without_a_book_takes_none_and_no_descriptor() -> None:
    with running_broker() as rig, Publisher(rig.path) as client:
        assert client.publish(memfd(b"pixels"), 6).failure.reason == "NOT_OFFERED"
