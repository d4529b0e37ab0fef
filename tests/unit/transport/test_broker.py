"""The broker over real sockets: handshake, descriptors, notices, and clients that misbehave."""

from __future__ import annotations

import errno
import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.errors import ConfigurationError
from encoder_service.transport import acceptor
from encoder_service.transport.access import BrokerAccess
from encoder_service.transport.broker import Broker
from encoder_service.transport.broker_options import BrokerOptions, ConnectionLimits
from encoder_service.transport.framing import encode_frame
from encoder_service.transport.offers import OfferBook
from tests.unit.transport.broker_rig import (
    RawClient,
    Rig,
    hello,
    num_descriptors,
    running_broker,
    socket_folder,
    wait_until,
)
from vision_encoder.v1 import broker_pb2 as pb

QUICK = ConnectionLimits(handshake_s=0.3, frame_s=0.3, send_s=0.3, idle_s=1.0)


def test_handshake_says_who_the_broker_is_and_names_the_owner() -> None:
    with running_broker(heartbeat_s=2.0) as rig:
        arena = rig.offer(b"rows" * 100)
        with RawClient(rig.path) as client, RawClient(rig.path) as other:
            welcome = client.welcome
            assert (welcome.protocol_version, welcome.instance_id, welcome.host_id) == (1, "one", "host-1")
            assert (welcome.heartbeat_ms, welcome.idle_timeout_ms) == (2000, 30000)
            assert [geometry.arena_id for geometry in welcome.arenas] == [arena]
            assert len(welcome.owner_id) == 32
            assert welcome.owner_id != other.welcome.owner_id
            assert rig.broker.is_connected(welcome.owner_id, "")
            assert not rig.broker.is_connected(welcome.owner_id, "another namespace")
            assert not rig.broker.is_connected("nobody", "")
            assert rig.broker.num_connections == 2


def test_attach_hands_out_both_descriptors_with_the_geometry() -> None:
    with running_broker() as rig:
        arena = rig.offer(b"rows" * 100)
        with RawClient(rig.path) as client:
            reply = client.ask(attach=pb.BrokerAttach(arena_id=arena))
            geometry = reply.attached.geometry
            assert reply.num_descriptors == 2
            assert (geometry.arena_id, geometry.size_bytes, geometry.page_bytes) == (arena, 400, 20)
            assert geometry.kind == pb.ARENA_KIND_HOST
            data, page = client.descriptors
            assert os.pread(data, 8, 0) == b"rowsrows"
            assert os.pread(page, 20, 0) == b"page" + arena
        assert rig.broker.counters.attaches == 1
        wait_until(lambda: rig.broker.counters.descriptors_sent == 2)


def test_probe_list_ping_and_what_is_unknown() -> None:
    with running_broker() as rig:
        arena, bare = rig.offer(b"0123456789abcdef" * 2, probe=16), rig.offer(b"x", probe=0)
        with RawClient(rig.path) as client:
            slot = client.ask(probe=pb.BrokerProbe(arena_id=arena)).probe_slot
            assert (slot.offset_bytes, slot.num_bytes, len(slot.sha256)) == (0, 16, 32)
            listed = client.ask(list=pb.BrokerListArenas()).arenas.arenas
            assert {geometry.arena_id for geometry in listed} == {arena, bare}
            assert client.ask(ping=pb.BrokerPing()).HasField("pong")
            reasons = [
                client.ask(probe=pb.BrokerProbe(arena_id=bare)).failure.reason,
                client.ask(probe=pb.BrokerProbe(arena_id=b"?")).failure.reason,
                client.ask(attach=pb.BrokerAttach(arena_id=b"?" * 16)).failure.reason,
                client.ask().failure.reason,  # a request of a later version
            ]
            assert reasons == ["NO_PROBE_SLOT", "UNKNOWN_ARENA", "UNKNOWN_ARENA", "UNKNOWN_REQUEST"]
            assert client.ask(ping=pb.BrokerPing()).HasField("pong"), "a failed request fails alone"
        assert rig.broker.counters.failed.total() == 4


def test_p18_isolated_namespaces_get_the_descriptors_of_their_own_arenas_only() -> None:
    access = BrokerAccess(tokens={"tenant": "secret"}, open_namespaces=True)
    with running_broker(access=access, isolated=("tenant",)) as rig:
        shared, own = rig.offer(b"shared"), rig.offer(b"secret", namespace="tenant")
        with (
            RawClient(rig.path, namespace="tenant", token="secret") as tenant,
            RawClient(rig.path, namespace="other") as other,
        ):
            for client, theirs, foreign in ((tenant, own, shared), (other, shared, own)):
                assert [geometry.arena_id for geometry in client.welcome.arenas] == [theirs]
                refused = client.ask(attach=pb.BrokerAttach(arena_id=foreign)).failure
                absent = client.ask(attach=pb.BrokerAttach(arena_id=bytes(16))).failure
                assert refused.reason == absent.reason == "UNKNOWN_ARENA"
                assert refused.message == absent.message.replace(bytes(16).hex(), foreign.hex())
                assert client.descriptors == []
                assert client.ask(probe=pb.BrokerProbe(arena_id=foreign)).failure.reason == "UNKNOWN_ARENA"
            # A notice of a foreign arena does not arrive either: the first thing that does is the pong.
            rig.broker.withdraw(own)
            notice = tenant.reply()
            assert notice is not None
            assert notice.arena_closed.arena_id == own
            assert other.ask(ping=pb.BrokerPing()).HasField("pong")


def test_p18_a_token_that_opens_no_more_ends_the_connections_made_with_it() -> None:
    """Also that of a namespace which had no token before; those whose token still opens go on."""
    opens = {("a", "old"), ("a", "new"), ("b", "")}
    access = BrokerAccess(opens=lambda namespace, token: (namespace, token) in opens)
    with (
        running_broker(access=access) as rig,
        RawClient(rig.path, namespace="a", token="old") as old,
        RawClient(rig.path, namespace="a", token="new") as new,
        RawClient(rig.path, namespace="b") as bare,
    ):
        owners = [old.welcome.owner_id, bare.welcome.owner_id]
        assert old.ask(ping=pb.BrokerPing()).HasField("pong")
        opens -= {("a", "old"), ("b", "")}
        assert old.ended()
        assert bare.ended()
        wait_until(lambda: sorted(rig.gone) == sorted(owners), "the end of both owners")
        assert rig.broker.counters.closed["token_withdrawn"] == 2
        assert new.ask(ping=pb.BrokerPing()).HasField("pong")
        with RawClient(rig.path, greet=False) as again:
            assert again.ask(hello=hello(namespace="a", token="old")).refused.reason == "UNAUTHENTICATED"
        assert "old" not in repr(list(rig.broker._connections))


@pytest.mark.parametrize(
    ("given_hello", "reason", "retryable"),
    [
        ({"namespace": "a", "token": "wrong"}, "UNAUTHENTICATED", False),
        ({"protocol_version": 9, "min_protocol_version": 5}, "PROTOCOL_MISMATCH", False),
        ({"client_name": "x" * 200}, "INVALID_REQUEST", False),
    ],
)
def test_a_refusal_carries_its_reason_and_both_versions(
    given_hello: dict[str, object], reason: str, retryable: bool
) -> None:
    with running_broker(access=BrokerAccess(tokens={"a": "right"})) as rig:
        with RawClient(rig.path, greet=False) as client:
            message = hello(**given_hello)
            refused = client.ask(hello=message).refused
            assert (refused.reason, refused.retryable) == (reason, retryable)
            assert (refused.protocol_version, refused.min_protocol_version) == (1, 1)
            assert refused.client_protocol_version == message.protocol_version
            assert refused.client_min_protocol_version == message.min_protocol_version
            assert client.ended()
        assert rig.broker.counters.refused[reason] == 1
        assert rig.gone == []


def test_user_ids_that_are_not_allowed_are_refused_before_they_speak() -> None:
    access = BrokerAccess(open_namespaces=True, allowed_uids=frozenset({os.getuid() + 1}))
    with running_broker(access=access) as rig, RawClient(rig.path, greet=False) as client:
        reply = client.reply()
        assert reply is not None
        assert reply.refused.reason == "UID_NOT_ALLOWED"
        assert str(os.getuid()) in reply.refused.message
        assert client.ended()


def test_room_is_bounded_for_all_and_for_each_namespace() -> None:
    with (
        running_broker(max_connections=3, max_connections_per_namespace=2) as rig,
        RawClient(rig.path, namespace="a"),
        RawClient(rig.path, namespace="a"),
    ):
        with RawClient(rig.path, namespace="a", greet=False) as third:
            refused = third.ask(hello=hello(namespace="a")).refused
            assert (refused.reason, refused.retryable) == ("TOO_MANY_CONNECTIONS", True)
            assert "namespace 'a' has 2 connections, at most 2" in refused.message
        with RawClient(rig.path, namespace="b"), RawClient(rig.path, namespace="c", greet=False) as fourth:
            assert "3 connections, at most 3" in fourth.ask(hello=hello(namespace="c")).refused.message
        wait_until(lambda: rig.broker.num_connections == 2)
        with RawClient(rig.path, namespace="c") as next_one:
            assert next_one.welcome.owner_id


def test_the_end_of_a_connection_releases_its_owner_once_and_only_it() -> None:
    with running_broker() as rig:
        with RawClient(rig.path) as stays:
            with RawClient(rig.path) as leaves:
                owner = leaves.welcome.owner_id
            wait_until(lambda: rig.gone == [owner])
            assert not rig.broker.is_connected(owner, "")
            assert rig.broker.is_connected(stays.welcome.owner_id, "")
        wait_until(lambda: len(rig.gone) == 2)
    assert len(set(rig.gone)) == len(rig.gone) == 2


def test_a_failing_release_ends_neither_the_broker_nor_other_releases() -> None:
    with socket_folder() as folder:
        gone = []

        def on_disconnect(owner_id: str) -> None:
            gone.append(owner_id)
            raise RuntimeError("the table is broken")

        options = BrokerOptions(str(folder / "s"), "i", "h", access=BrokerAccess(open_namespaces=True))
        broker = Broker(options, OfferBook(), on_disconnect=on_disconnect)
        broker.start()
        for _ in range(2):
            RawClient(options.path).socket.close()
        wait_until(lambda: len(gone) == 2)
        assert broker.is_serving()
        assert broker.stop()


def test_withdrawn_arenas_are_told_and_not_handed_out() -> None:
    with running_broker() as rig:
        arena, heir = rig.offer(b"old"), os.urandom(16)
        with RawClient(rig.path) as client:
            assert rig.broker.withdraw(arena, replaced_by=heir)
            notice = client.reply()
            assert notice is not None
            assert notice.request_id == 0
            assert (notice.arena_closed.arena_id, notice.arena_closed.replaced_by) == (arena, heir)
            reply = client.ask(attach=pb.BrokerAttach(arena_id=arena))
            assert reply.failure.reason == "UNKNOWN_ARENA"
            assert not rig.broker.withdraw(arena)


def test_a_clean_stop_tells_the_clients_removes_the_file_and_releases_everything() -> None:
    before = num_descriptors()
    with running_broker() as rig:
        rig.offer(b"rows")
        client = RawClient(rig.path)
        assert rig.broker.is_serving()
        assert rig.broker.stop()
        assert not os.path.exists(rig.path)
        assert not rig.broker.is_serving()
        notice = client.reply()
        assert notice is not None
        assert notice.HasField("stopping")
        assert client.ended()
        assert rig.gone == [client.welcome.owner_id]
        client.socket.close()
    assert num_descriptors() == before


def test_a_second_broker_at_the_same_path_does_not_start_and_leaves_nothing() -> None:
    with running_broker() as rig:
        before = num_descriptors()
        options = BrokerOptions(rig.path, "i", "h")
        with pytest.raises(ConfigurationError, match="another process listens"):
            Broker(options, OfferBook(), on_disconnect=lambda _: None).start()
        # the first one, in this process, has yet to close its end of the connection that asked
        wait_until(lambda: num_descriptors() == before, "every descriptor's close")
        assert rig.broker.is_serving()


def test_a_socket_file_that_somebody_removed_is_noticed() -> None:
    with running_broker() as rig:
        os.unlink(rig.path)
        assert not rig.broker.is_serving()


# -- clients that misbehave ------------------------------------------------------------------------------


def bad_bytes() -> dict[str, bytes]:
    ping = pb.BrokerRequest(request_id=1, ping=pb.BrokerPing()).SerializeToString()
    return {
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "zeros": bytes(1000),
        "length over the bound": b"VEBR" + b"\xff\xff\xff\xff",
        "no protobuf": encode_frame(b"\xff" * 64),
        "request before hello": encode_frame(ping),
        "no request id": encode_frame(pb.BrokerRequest(hello=hello()).SerializeToString()),
        "nothing in it": encode_frame(b""),
    }


@pytest.mark.parametrize("name", sorted(bad_bytes()))
def test_p33_garbage_ends_its_own_connection_and_no_other(name: str) -> None:
    with running_broker() as rig, RawClient(rig.path) as good:
        with RawClient(rig.path, greet=False) as bad:
            bad.socket.sendall(bad_bytes()[name])
            assert bad.ended()
        wait_until(lambda: rig.broker.counters.closed["protocol_error"] == 1)
        assert good.ask(ping=pb.BrokerPing()).HasField("pong")


def test_a_second_hello_ends_the_connection() -> None:
    with running_broker() as rig, RawClient(rig.path) as client:
        client.socket.sendall(client.frame(hello=hello()))
        assert client.ended()
        wait_until(lambda: rig.gone == [client.welcome.owner_id])


@settings(max_examples=60, deadline=None)
@given(junk=st.binary(max_size=200), greet=st.booleans(), framed=st.booleans())
def test_p33_no_bytes_break_the_broker(fuzzed_rig: Rig, junk: bytes, greet: bool, framed: bool) -> None:
    with RawClient(fuzzed_rig.path, greet=greet) as client:
        client.socket.sendall(encode_frame(junk) if framed else junk)
    assert fuzzed_rig.broker.is_serving()
    assert fuzzed_rig.broker.counters.closed["internal"] == 0


@pytest.fixture(scope="module")
def fuzzed_rig() -> Iterator[Rig]:
    with running_broker() as rig:
        rig.offer(b"rows")
        yield rig
        with RawClient(rig.path) as client:
            assert client.ask(ping=pb.BrokerPing()).HasField("pong")


def test_half_a_hello_is_given_up_in_time() -> None:
    with running_broker(limits=QUICK) as rig, RawClient(rig.path, greet=False) as client:
        client.socket.sendall(client.frame(hello=hello())[:-1])
        started_s = time.monotonic()
        assert client.ended()
        assert 0.25 < time.monotonic() - started_s < 5
        assert rig.broker.counters.closed["handshake_timeout"] == 1


def test_half_a_request_is_given_up_in_time_and_its_owner_released() -> None:
    with running_broker(limits=QUICK) as rig, RawClient(rig.path) as client:
        client.socket.sendall(client.frame(ping=pb.BrokerPing())[:-1])
        assert client.ended()
        assert rig.broker.counters.closed["frame_timeout"] == 1
        wait_until(lambda: rig.gone == [client.welcome.owner_id])


def test_a_client_without_heartbeats_is_released() -> None:
    with running_broker(limits=QUICK) as rig, RawClient(rig.path) as client:
        assert client.ended()
        assert rig.broker.counters.closed["idle"] == 1
        wait_until(lambda: rig.gone == [client.welcome.owner_id])


def test_a_client_that_never_reads_is_ended_and_others_are_served_meanwhile() -> None:
    limits = ConnectionLimits(send_s=0.3, requests_per_s=1e6, request_burst=1_000_000)
    with running_broker(limits=limits) as rig, RawClient(rig.path) as good:
        deaf = RawClient(rig.path)
        frame = deaf.frame(list=pb.BrokerListArenas()) * 1000
        for _ in range(40):
            rig.offer(b"x")
        deaf.socket.setblocking(False)
        ends_s = time.monotonic() + 20
        while rig.broker.counters.closed["not_reading"] == 0:
            assert time.monotonic() < ends_s
            try:
                deaf.socket.send(frame)
            except BlockingIOError:
                time.sleep(0.01)
            except (BrokenPipeError, ConnectionResetError):
                break
            assert good.ask(ping=pb.BrokerPing()).HasField("pong")
        wait_until(lambda: rig.gone == [deaf.welcome.owner_id])
        deaf.socket.close()


def test_a_client_that_collects_descriptors_in_its_socket_gets_a_bounded_number() -> None:
    with running_broker() as rig:
        arena = rig.offer(b"rows")
        with RawClient(rig.path) as client:
            asked = client.frame(attach=pb.BrokerAttach(arena_id=arena)) * 30
            client.socket.sendall(asked)
            wait_until(lambda: rig.broker.counters.failed["DESCRIPTORS_UNREAD"] == 14)
            assert rig.broker.counters.descriptors_sent == 32
            replies = [client.reply() for _ in range(30)]
            assert sum(reply is not None and reply.HasField("attached") for reply in replies) == 16
            assert len(client.descriptors) == 32
            again = client.ask(attach=pb.BrokerAttach(arena_id=arena))
            assert again.HasField("attached"), "what was read is not in flight"


def test_a_flood_of_requests_is_slowed_and_all_are_answered() -> None:
    limits = ConnectionLimits(requests_per_s=80, request_burst=20)
    with running_broker(limits=limits) as rig, RawClient(rig.path) as client, RawClient(rig.path) as other:
        started_s = time.monotonic()
        client.socket.sendall(b"".join(client.frame(ping=pb.BrokerPing()) for _ in range(100)))
        assert other.ask(ping=pb.BrokerPing()).HasField("pong")
        asked_s = time.monotonic() - started_s
        replies = [client.reply() for _ in range(100)]
        assert all(reply is not None and reply.HasField("pong") for reply in replies)
        answered_s = time.monotonic() - started_s
        assert answered_s > 0.9, "eighty of them, at eighty a second"
        assert asked_s < answered_s - 0.1, "others do not wait for the flood"


def test_silent_connects_crowd_out_each_other_and_no_one_who_speaks() -> None:
    with running_broker(max_pending=8) as rig:
        crowd = [RawClient(rig.path, greet=False) for _ in range(50)]
        with RawClient(rig.path) as honest:
            assert honest.ask(ping=pb.BrokerPing()).HasField("pong")
            wait_until(lambda: rig.broker.counters.closed["crowded_out"] >= 42)
            crowd += [RawClient(rig.path, greet=False) for _ in range(20)]
            wait_until(lambda: rig.broker.counters.accepted == 71)
            assert honest.ask(ping=pb.BrokerPing()).HasField("pong")
        for client in crowd:
            client.socket.close()


def test_p19_thousands_of_connects_leave_no_descriptor() -> None:
    with running_broker() as rig:
        arena = rig.offer(b"rows")
        before = num_descriptors()
        for number in range(2000):
            with RawClient(rig.path, greet=number % 4 != 0) as client:
                if number % 4 == 1:
                    client.ask(attach=pb.BrokerAttach(arena_id=arena))
                elif number % 4 == 2:
                    client.socket.sendall(client.frame(attach=pb.BrokerAttach(arena_id=arena)))  # unread
        wait_until(lambda: len(rig.gone) == 1500 and rig.broker.num_connections == 0)
        wait_until(lambda: num_descriptors() == before, "every descriptor's close")
        assert rig.broker.counters.closed["internal"] == 0


def test_without_descriptors_clients_are_turned_away_without_a_busy_loop() -> None:
    with running_broker() as rig, RawClient(rig.path) as good:
        clients = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            spent_s = time.thread_time(), time.process_time()
            clients[0].settimeout(10)
            clients[0].connect(rig.path)
            assert clients[0].recv(1) == b"", "turned away, not left hanging"
            for client in clients[1:]:
                client.connect(rig.path)
            time.sleep(4 * acceptor.PAUSE_S)
            assert time.process_time() - spent_s[1] < 0.2
            assert good.ask(ping=pb.BrokerPing()).HasField("pong"), "those who are in stay in"
            assert 1 <= rig.broker.counters.accept_failures <= 8
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        wait_until(lambda: rig.broker.is_serving())
        with RawClient(rig.path) as later:
            assert later.ask(ping=pb.BrokerPing()).HasField("pong")
        for client in clients:
            client.close()


def test_attach_without_a_descriptor_to_spare_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_broker() as rig:
        arena = rig.offer(b"rows")
        with RawClient(rig.path) as client:

            def full(*_: object) -> None:
                raise OSError(errno.EMFILE, "Too many open files")

            with monkeypatch.context() as patched:
                patched.setattr("encoder_service.transport.offers.os.dup", full)
                failure = client.ask(attach=pb.BrokerAttach(arena_id=arena)).failure
            assert (failure.reason, failure.retryable) == ("DESCRIPTORS_EXHAUSTED", True)
            assert client.ask(attach=pb.BrokerAttach(arena_id=arena)).HasField("attached")


def test_a_defect_in_one_request_ends_that_connection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_broker() as rig, RawClient(rig.path) as good, RawClient(rig.path) as unlucky:

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patched:
            patched.setattr(OfferBook, "visible_to", broken)
            unlucky.socket.sendall(unlucky.frame(list=pb.BrokerListArenas()))
            assert unlucky.ended()
        assert rig.broker.counters.closed["internal"] == 1
        assert good.ask(list=pb.BrokerListArenas()).HasField("arenas")
