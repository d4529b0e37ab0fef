"""Leases that go back and reads that are told, over the broker's socket: none is lost, however many."""

from __future__ import annotations

import os
import threading
import time

from encoder_service.transport.broker_options import ConnectionLimits
from lm_adapter.transport.broker_client import BrokerClient
from tests.unit.transport.broker_rig import RawClient, wait_until
from tests.unit.transport.test_broker_fetch import Rig, fetch, fetching, keys
from vision_encoder.v1 import broker_pb2 as pb
from vision_encoder.v1 import encoder_pb2


def release_of(*lease_ids: bytes, owner: BrokerClient | None = None) -> encoder_pb2.ReleaseRequest:
    """owner: whose leases they are."""
    request = encoder_pb2.ReleaseRequest(lease_ids=lease_ids)
    if owner is not None:
        assert owner.session is not None
        request.owner_id = owner.session.owner_id.encode()
    return request


def ids(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]


def released(rig: Rig) -> list[bytes]:
    return [each for _, _, request in rig.asked for each in request.release.lease_ids]


def test_p17_any_number_of_releases_waits_for_a_stuck_loop() -> None:
    """Far more than fetches may be under way: no failure comes back, and each lease is given back."""
    given_back = ids(1000)
    with fetching(ConnectionLimits(requests_under_way=4)) as rig, RawClient(rig.path) as client:
        with rig.hold():
            for lease_id in given_back:
                client.socket.sendall(client.frame(release=release_of(lease_id)))
            assert client.ask(ping=pb.BrokerPing()).HasField("pong"), "and nothing before it"
        wait_until(lambda: len(released(rig)) == len(given_back), "all releases")
        assert released(rig) == given_back
        assert not rig.broker.counters.failed
        assert client.ask(fetch=fetch(*keys(1))).HasField("fetched")


def test_releases_and_uses_come_before_the_fetches_that_follow_them() -> None:
    with fetching() as rig, RawClient(rig.path) as client:
        with rig.hold():
            for _ in range(5):
                client.socket.sendall(client.frame(release=release_of(*ids(1))))
                used = pb.BrokerUsed(kind=pb.ARENA_KIND_HOST, uses=[pb.BrokerUse(key=os.urandom(32))])
                client.socket.sendall(client.frame(used=used))
                client.socket.sendall(client.frame(fetch=fetch(*keys(1))))
        for _ in range(5):
            reply = client.reply()
            assert reply is not None
            assert reply.HasField("fetched")
        kinds = [request.WhichOneof("request") for _, _, request in rig.asked]
        for number in range(1, 6):
            # Those that wait go in one turn: some may come earlier than they were sent, none later.
            before = kinds[: [i for i, kind in enumerate(kinds) if kind == "fetch"][number - 1]]
            assert before.count("release") >= number
            assert before.count("used") >= number


def test_p17_what_waits_of_one_connection_is_bounded_and_the_rest_stays_in_its_socket() -> None:
    """The broker reads no more of it; everybody else is served, and it goes on where it stopped."""
    given_back = ids(20_000)
    limits = ConnectionLimits(gathered_bytes=64 * 1024)
    with fetching(limits) as rig, RawClient(rig.path) as client, RawClient(rig.path) as other:
        frames = b"".join(client.frame(release=release_of(lease_id)) for lease_id in given_back)
        sending = threading.Thread(target=client.socket.sendall, args=(frames,))
        connection = rig.broker._desk.owners[client.welcome.owner_id].connection
        with rig.hold():
            sending.start()
            wait_until(lambda: connection.is_held_back, "the bound")
            for _ in range(3):
                assert other.ask(ping=pb.BrokerPing()).HasField("pong")
            gathered = rig.desk._gathered[connection]
            assert gathered.num_bytes <= limits.gathered_bytes + 1024 + 64
            assert len(gathered.requests) < 100
        wait_until(lambda: len(released(rig)) == len(given_back), "all releases")
        sending.join()
        assert released(rig) == given_back
        assert client.ask(ping=pb.BrokerPing()).HasField("pong")
        assert not rig.broker.counters.failed


def test_p21_a_connection_that_ends_with_releases_on_their_way_harms_nobody() -> None:
    with fetching() as rig, RawClient(rig.path) as other:
        with rig.hold():
            leaver = RawClient(rig.path)
            for lease_id in ids(300):
                leaver.socket.sendall(leaver.frame(release=release_of(lease_id)))
            wait_until(lambda: bool(rig.desk._gathered), "their arrival")
            leaver.socket.close()
            wait_until(lambda: rig.gone == [leaver.welcome.owner_id], "its end")
        assert other.ask(fetch=fetch(*keys(1))).HasField("fetched")
        rig.turn()
        assert not rig.desk._gathered


def test_a_client_gathers_what_it_gives_back_one_by_one() -> None:
    """Far fewer messages than leases, at most as many of them in one as the broker takes, and soon."""
    given_back = ids(900)
    with fetching() as rig, BrokerClient(rig.path) as client:
        client.connect()
        for lease_id in given_back:
            assert client.release(release_of(lease_id, owner=client))
        wait_until(lambda: len(released(rig)) == len(given_back), "all releases")
        assert released(rig) == given_back
        assert len(rig.asked) < 100
        assert not rig.broker.counters.failed


def test_a_client_keeps_readers_apart_and_sends_anothers_at_once() -> None:
    """What is another connection's does not end with this one."""
    with fetching() as rig, BrokerClient(rig.path) as client:
        client.connect()
        with rig.hold():
            assert client.release(release_of(b"first" * 3, owner=client))  # at once; those behind it wait
            for number, reader in enumerate([0, 0, None, None, 0, 1]):
                request = release_of(bytes([number]) * 16, owner=client)
                if reader is not None:
                    request.reader = reader
                assert client.release(request)
            assert client.release(encoder_pb2.ReleaseRequest(lease_ids=[b"another's"], owner_id=b"another"))
        wait_until(lambda: len(released(rig)) == 8, "all releases")
        sent = [request.release for _, _, request in rig.asked]
        found = [(each.reader if each.HasField("reader") else None, len(each.lease_ids)) for each in sent]
        assert found == [(None, 1), (0, 2), (None, 2), (0, 1), (1, 1), (None, 1)]
        assert released(rig)[-1] == b"another's"


def test_what_a_client_gave_back_goes_before_it_leaves() -> None:
    """Leases that end with their connection cost their slots a generation; those given back do not."""
    given_back = ids(40)
    with fetching() as rig:
        with BrokerClient(rig.path) as client:
            client.connect()
            for lease_id in given_back:
                assert client.release(release_of(lease_id, owner=client))
        wait_until(lambda: len(rig.gone) == 1, "the client's end")
        rig.turn()
        assert released(rig) == given_back


def test_a_client_that_only_gives_back_is_still_known_to_live() -> None:
    """A release alone, with nothing else to say, goes out within a moment."""
    with fetching() as rig, BrokerClient(rig.path) as client:
        client.connect()
        for number in range(3):
            since_s = time.monotonic()
            assert client.release(release_of(bytes([number]) * 16, owner=client))
            assert client.release(release_of(bytes([number + 9]) * 16, owner=client))
            wait_until(lambda: len(released(rig)) == 2 * number + 2, "both")  # noqa: B023
            assert time.monotonic() - since_s < 2.0
            time.sleep(0.05)
