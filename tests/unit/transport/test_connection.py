"""One connection's limits, on a socket pair and a clock that the test moves."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from encoder_service.transport.access import PeerCredentials
from encoder_service.transport.broker_options import BrokerCounters, ConnectionLimits
from encoder_service.transport.connection import ClientFailed, Connection
from encoder_service.transport.framing import encode_frame
from tests.unit.transport.broker_rig import num_descriptors
from vision_encoder.v1 import broker_pb2 as pb

LIMITS = ConnectionLimits(
    handshake_s=5,
    frame_s=3,
    send_s=4,
    idle_s=30,
    unsent_bytes=4000,
    unread_descriptors=4,
    requests_per_s=10,
    request_burst=5,
)
PING = encode_frame(pb.BrokerRequest(request_id=1, ping=pb.BrokerPing()).SerializeToString())


@dataclass
class Pair:
    connection: Connection
    client: socket.socket

    def welcome(self) -> None:
        self.connection.owner_id = "owner"


@pytest.fixture
def pair() -> Iterator[Pair]:
    before = num_descriptors()
    ours, theirs = socket.socketpair()
    theirs.settimeout(5)
    connection = Connection(ours, PeerCredentials(1, 2, 3), LIMITS, BrokerCounters(), since_s=100.0)
    yield Pair(connection, theirs)
    connection.close()
    theirs.close()
    assert num_descriptors() == before


def cause_at(pair: Pair, now_s: float) -> str | None:
    try:
        pair.connection.check_time(now_s)
    except ClientFailed as failed:
        return failed.cause
    return None


def fill(pair: Pair) -> None:
    """Fills the kernel's buffer with replies, until one waits here."""
    reply = pb.BrokerReply(failure=pb.BrokerFailure(message="x" * 900))
    while not pair.connection.wants_to_send:
        pair.connection.send(reply, 100.0)


def test_the_handshake_has_a_time_of_its_own_that_bytes_do_not_extend(pair: Pair) -> None:
    assert cause_at(pair, 105.0) is None
    pair.client.sendall(PING[:3])
    pair.connection.receive(104.9)
    assert cause_at(pair, 105.1) == "handshake_timeout"


def test_a_frame_that_drips_in_ends_the_connection(pair: Pair) -> None:
    pair.welcome()
    for number, now_s in enumerate((110.0, 111.0, 112.0, 113.0)):
        pair.client.sendall(PING[number : number + 1])
        assert pair.connection.receive(now_s)
        assert pair.connection.take(now_s) is None
        assert cause_at(pair, now_s) is None
    assert cause_at(pair, 113.1) == "frame_timeout"


def test_the_time_of_a_frame_starts_anew_with_each_frame(pair: Pair) -> None:
    pair.welcome()
    pair.client.sendall(PING[:4])
    pair.connection.receive(110.0)
    assert pair.connection.take(110.0) is None
    pair.client.sendall(PING[4:] + PING[:4])
    pair.connection.receive(112.0)
    assert pair.connection.take(112.0) is not None
    assert pair.connection.take(112.0) is None
    assert cause_at(pair, 114.9) is None
    assert cause_at(pair, 115.1) == "frame_timeout"


def test_a_silent_client_is_taken_for_dead(pair: Pair) -> None:
    pair.welcome()
    pair.client.sendall(PING)
    pair.connection.receive(120.0)
    assert pair.connection.take(120.0) is not None
    assert cause_at(pair, 150.0) is None
    assert cause_at(pair, 150.1) == "idle"


def test_a_flood_of_requests_is_read_at_its_rate_and_none_is_lost(pair: Pair) -> None:
    pair.welcome()
    pair.client.sendall(PING * 12)
    pair.connection.receive(110.0)
    taken = []
    for now_s in (110.0, 110.125, 110.5, 111.0):
        num = 0
        while pair.connection.take(now_s) is not None:
            num += 1
        taken.append(num)
    assert taken == [5, 1, 4, 2]
    assert not pair.connection.paused


def test_a_pause_of_ours_does_not_count_as_the_clients_slowness(pair: Pair) -> None:
    pair.welcome()
    pair.client.sendall(PING * 5 + PING[:4])
    pair.connection.receive(110.0)
    while pair.connection.take(110.0) is not None:
        pass
    assert pair.connection.paused
    assert cause_at(pair, 119.0) is None
    assert pair.connection.take(119.0) is None
    assert not pair.connection.paused
    assert cause_at(pair, 119.1) is None
    assert cause_at(pair, 122.1) == "frame_timeout"


def test_a_client_that_never_reads_holds_a_bounded_number_of_bytes(pair: Pair) -> None:
    pair.welcome()
    fill(pair)
    reply = pb.BrokerReply(failure=pb.BrokerFailure(message="x" * 900))
    for _ in range(3):
        pair.connection.send(reply, 100.0)
    with pytest.raises(ClientFailed, match=r"wait for it and 9\d\d more are to, at most 4000") as failed:
        pair.connection.send(reply, 100.0)
    assert failed.value.cause == "not_reading"


def test_a_client_that_takes_nothing_for_too_long_does_not_read(pair: Pair) -> None:
    pair.welcome()
    fill(pair)
    assert cause_at(pair, 104.0) is None
    assert cause_at(pair, 104.1) == "not_reading"
    pair.client.recv(1 << 20)
    pair.connection.flush(104.1)
    assert not pair.connection.wants_to_send
    assert cause_at(pair, 105.0) is None


def test_replies_that_waited_arrive_whole_and_in_order(pair: Pair) -> None:
    pair.welcome()
    fill(pair)
    pair.connection.send(pb.BrokerReply(request_id=77, pong=pb.BrokerPong()), 100.0)
    received = b""
    while pair.connection.wants_to_send:
        received += pair.client.recv(1 << 16)
        pair.connection.flush(100.0)
    pair.client.setblocking(False)
    while True:
        try:
            received += pair.client.recv(1 << 16)
        except BlockingIOError:
            break
    numbers = []
    while received:
        assert received[:4] == b"VEBR"
        end = 8 + int.from_bytes(received[4:8], "big")
        numbers.append(pb.BrokerReply.FromString(received[8:end]).request_id)
        received = received[end:]
    assert numbers[-1] == 77
    assert set(numbers[:-1]) == {0}


def test_descriptors_that_wait_are_sent_later_and_only_once(pair: Pair) -> None:
    pair.welcome()
    fill(pair)
    fds = (os.memfd_create("a"), os.memfd_create("b"))
    pair.connection.send(pb.BrokerReply(request_id=9, num_descriptors=2), 100.0, fds)
    assert pair.connection.counters.descriptors_sent == 0
    received = []
    pair.client.setblocking(False)
    while pair.connection.wants_to_send:
        while True:
            try:
                _, found, _, _ = socket.recv_fds(pair.client, 1 << 16, 8)
            except BlockingIOError:
                break
            received += found
        pair.connection.flush(100.0)
    while len(received) < 2:
        received += socket.recv_fds(pair.client, 1 << 16, 8)[1]
    for descriptor in received:
        os.close(descriptor)
    assert len(received) == 2
    assert pair.connection.counters.descriptors_sent == 2


def test_descriptors_that_were_never_sent_are_closed_with_the_connection(pair: Pair) -> None:
    fill(pair)
    pair.connection.send(pb.BrokerReply(), 100.0, (os.memfd_create("a"), os.memfd_create("b")))
    pair.connection.close()  # the fixture counts


def test_descriptors_in_flight_are_bounded_until_they_are_read(pair: Pair) -> None:
    for _ in range(2):
        assert pair.connection.may_send_descriptors(2)
        fds = (os.memfd_create("a"), os.memfd_create("b"))
        pair.connection.send(pb.BrokerReply(num_descriptors=2), 100.0, fds)
    assert not pair.connection.may_send_descriptors(2)
    for _ in range(2):
        for descriptor in socket.recv_fds(pair.client, 100, 8)[1]:
            os.close(descriptor)
    assert pair.connection.may_send_descriptors(2)


def test_a_kernel_that_carries_no_more_descriptors_costs_one_request(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Connection._send_some

    def refuse(self: Connection, unsent: object) -> int:
        if unsent.descriptors:  # type: ignore[attr-defined]
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        return real(self, unsent)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "_send_some", refuse)
    fds = (os.memfd_create("a"), os.memfd_create("b"))
    instead = pb.BrokerReply(request_id=5, failure=pb.BrokerFailure(reason="DESCRIPTORS_IN_FLIGHT"))
    pair.connection.send(pb.BrokerReply(request_id=5, num_descriptors=2), 100.0, fds, instead)
    found = pb.BrokerReply.FromString(pair.client.recv(1000)[8:])
    assert found == instead
    assert pair.connection.may_send_descriptors(4)
    assert not pair.connection.wants_to_send


def test_descriptors_of_a_client_are_not_taken(pair: Pair) -> None:
    before = num_descriptors()
    fd = os.memfd_create("unasked")
    socket.send_fds(pair.client, [PING], [fd] * 10)
    os.close(fd)
    assert pair.connection.receive(101.0)
    assert pair.connection.take(101.0) is not None
    assert num_descriptors() == before


def test_the_end_of_the_stream_and_a_reset_are_both_the_end(pair: Pair) -> None:
    pair.connection.send(pb.BrokerReply(), 100.0)
    pair.client.close()  # with an unread reply: a reset
    assert pair.connection.receive(101.0) is False
    with pytest.raises(ClientFailed) as failed:
        pair.connection.send(pb.BrokerReply(), 100.0)
    assert failed.value.cause == "left"
