"""Requests for rows over the broker's socket: from its thread to a loop and back, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from encoder_service.transport.broker import Broker
from encoder_service.transport.broker_fetch import FOUND_BYTES, MAX_FETCH_KEYS, MAX_RELEASED, FetchDesk
from encoder_service.transport.broker_options import BrokerOptions, ConnectionLimits
from encoder_service.transport.offers import OfferBook
from tests.unit.transport.broker_rig import OPEN, RawClient, running_broker, socket_folder, wait_until
from vision_encoder.v1 import broker_pb2 as pb
from vision_encoder.v1 import encoder_pb2

MAX_UINT64, MAX_INT64 = (1 << 64) - 1, (1 << 63) - 1


@dataclass
class Rig:
    """A broker, a loop on a thread of its own, and what the loop was asked. ``hold`` keeps the loop busy."""

    broker: Broker
    desk: FetchDesk
    path: str
    loop: asyncio.AbstractEventLoop
    asked: list[tuple[str, str, pb.BrokerRequest]] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)

    def answer(
        self,
        owner_id: str,
        namespace: str,
        request: pb.BrokerRequest,
        reply: pb.BrokerReply,
        max_bytes: int,
    ) -> bool:
        """Keys that begin with an even byte are resident."""
        self.asked.append((owner_id, namespace, request))
        if request.WhichOneof("request") in ("release", "used"):
            return False
        if request.fetch.lease_ms == 13:
            raise ZeroDivisionError("thirteen")
        for key in request.fetch.keys:
            is_there = key[0] % 2 == 0
            reply.fetched.items.append(pb.BrokerFound(result=largest_result(key) if is_there else None))
        return True

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """The loop does nothing else inside."""
        entered, leave = threading.Event(), threading.Event()

        def stuck() -> None:
            entered.set()
            leave.wait(20)

        self.loop.call_soon_threadsafe(stuck)
        assert entered.wait(20)
        try:
            yield
        finally:
            leave.set()

    def turn(self) -> None:
        """Returns when everything that was posted to the loop has run."""
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(20)


def largest_result(key: bytes) -> encoder_pb2.ItemResult:
    """With every number as long as it gets."""
    many = (1 << 32) - 1
    timings = {name.name: 1 / 3 for name in encoder_pb2.StageTimings.DESCRIPTOR.fields}
    return encoder_pb2.ItemResult(
        key=key,
        content_digest=os.urandom(32),
        grid_thw=encoder_pb2.GridTHW(t=many, h=many, w=many),
        num_rows=many,
        width=many,
        dtype=encoder_pb2.DTYPE_BFLOAT16,
        num_deepstack_levels=many,
        tier=encoder_pb2.CACHE_TIER_DEVICE,
        timings=encoder_pb2.StageTimings(**timings),
        rows_bytes=MAX_UINT64,
        lease=encoder_pb2.DeviceLease(
            lease_id=os.urandom(16),
            arena_id=os.urandom(16),
            offset_bytes=MAX_UINT64,
            shape=[MAX_UINT64, MAX_UINT64],
            dtype=encoder_pb2.DTYPE_BFLOAT16,
            generation=MAX_UINT64,
            expires_at_unix_ms=MAX_INT64,
            device_uuid="GPU-" + "0" * 36,
            slot_index=many,
        ),
    )


@contextlib.contextmanager
def fetching(limits: ConnectionLimits | None = None, *, ready: bool = True) -> Iterator[Rig]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    gone: list[str] = []
    try:
        with socket_folder() as folder:
            path = str(folder / "broker.sock")
            options = BrokerOptions(path, "one", "host-1", access=OPEN, limits=limits or ConnectionLimits())
            broker = Broker(options, OfferBook(()), on_disconnect=gone.append)
            desk = FetchDesk(loop, broker.counters)
            rig = Rig(broker, desk, path, loop, gone=gone)
            if ready:
                desk.answer = rig.answer
            broker.take_fetches(desk)
            broker.start()
            try:
                yield rig
            finally:
                assert broker.stop()
                assert broker.failure is None
            rig.turn()
            assert not desk._under_way, "nothing is under way for a connection that is gone"
            assert not desk._gathered, "nor does anything wait"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def fetch(*wanted: bytes, **given: int) -> pb.BrokerFetch:
    return pb.BrokerFetch(keys=wanted, kind=pb.ARENA_KIND_HOST, **given)


def test_each_key_is_answered_in_its_place() -> None:
    wanted = keys(random.randint(2, MAX_FETCH_KEYS))
    with fetching() as rig, RawClient(rig.path, namespace="here") as client:
        assert client.welcome.max_fetch_keys == MAX_FETCH_KEYS
        found = client.ask(fetch=fetch(*wanted, num_readers=3)).fetched.items
        assert [each.result.key for each in found] == [key if key[0] % 2 == 0 else b"" for key in wanted]
        ((owner_id, namespace, request),) = rig.asked
        assert (owner_id, namespace) == (client.welcome.owner_id, "here")
        assert request.fetch.num_readers == 3
        num_found = sum(key[0] % 2 == 0 for key in wanted)
        counters = rig.broker.counters
        assert (counters.fetched, counters.fetch_misses) == (num_found, len(wanted) - num_found)


def test_a_reply_has_room_for_as_many_items_as_a_request_has_keys() -> None:
    assert largest_result(bytes(32)).ByteSize() + 8 <= FOUND_BYTES
    wanted = [b"\0" + os.urandom(31) for _ in range(MAX_FETCH_KEYS)]
    with fetching() as rig, RawClient(rig.path) as client:
        found = client.ask(fetch=fetch(*wanted)).fetched.items
        assert [each.result.key for each in found] == wanted


def test_a_release_is_not_answered() -> None:
    with fetching() as rig, RawClient(rig.path) as client:
        release = encoder_pb2.ReleaseRequest(lease_ids=[os.urandom(16)], reader=2)
        client.socket.sendall(client.frame(release=release))
        assert client.ask(ping=pb.BrokerPing()).HasField("pong")
        rig.turn()
        assert [request.release for _, _, request in rig.asked] == [release]


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: {"fetch": fetch()},
        lambda: {"fetch": fetch(*keys(MAX_FETCH_KEYS + 1))},
        lambda: {"fetch": fetch(os.urandom(31))},
        lambda: {"fetch": fetch(*keys(3), os.urandom(33))},
        lambda: {"release": encoder_pb2.ReleaseRequest()},
        lambda: {"release": encoder_pb2.ReleaseRequest(lease_ids=[bytes(16)] * (MAX_RELEASED + 1))},
        lambda: {"release": encoder_pb2.ReleaseRequest(lease_ids=[bytes(9000)])},
    ],
)
def test_p17_requests_out_of_bounds_fail_alone_and_reach_no_loop(request_of: object) -> None:
    with fetching() as rig, RawClient(rig.path) as client:
        reply = client.ask(**request_of())  # type: ignore[operator]
        assert reply.failure.reason == "INVALID_REQUEST"
        assert client.ask(ping=pb.BrokerPing()).HasField("pong")
        rig.turn()
        assert rig.asked == []


def test_an_answer_that_breaks_fails_its_request_alone() -> None:
    with fetching() as rig, RawClient(rig.path) as client:
        failure = client.ask(fetch=fetch(*keys(1), lease_ms=13)).failure
        assert (failure.reason, failure.message) == ("INTERNAL", "ZeroDivisionError: thirteen")
        assert client.ask(fetch=fetch(*keys(1))).HasField("fetched")


def test_before_the_service_is_ready_a_fetch_fails_as_retryable() -> None:
    with fetching(ready=False) as rig, RawClient(rig.path) as client:
        failure = client.ask(fetch=fetch(*keys(1))).failure
        assert (failure.reason, failure.retryable) == ("NOT_READY", True)


def test_a_broker_without_a_desk_says_so_and_goes_on() -> None:
    """As an older one does, which does not know the request."""
    with running_broker() as rig, RawClient(rig.path) as client:
        assert client.welcome.max_fetch_keys == 0
        assert client.ask(fetch=fetch(*keys(1))).failure.reason == "UNKNOWN_REQUEST"
        release = encoder_pb2.ReleaseRequest(lease_ids=[bytes(16)])
        assert client.ask(release=release).failure.reason == "UNKNOWN_REQUEST"
        assert client.ask(ping=pb.BrokerPing()).HasField("pong")


def test_p34_a_stuck_loop_stalls_nothing_but_fetches() -> None:
    with fetching() as rig, RawClient(rig.path) as client, RawClient(rig.path) as other:
        with rig.hold():
            client.socket.sendall(client.frame(fetch=fetch(*keys(2))))
            for _ in range(3):
                assert client.ask(ping=pb.BrokerPing()).HasField("pong")
                assert other.ask(list=pb.BrokerListArenas()).HasField("arenas")
        reply = client.reply()
        assert reply is not None
        assert len(reply.fetched.items) == 2


def test_p17_requests_under_way_are_bounded_by_number() -> None:
    limits = ConnectionLimits(requests_under_way=4)
    with fetching(limits) as rig, RawClient(rig.path) as client, RawClient(rig.path) as other:
        with rig.hold():
            for _ in range(4):
                client.socket.sendall(client.frame(fetch=fetch(*keys(1))))
            failure = client.ask(fetch=fetch(*keys(1))).failure
            assert (failure.reason, failure.retryable) == ("TOO_MANY_UNDER_WAY", True)
            other.socket.sendall(other.frame(fetch=fetch(*keys(1))))
        for _ in range(4):
            reply = client.reply()
            assert reply is not None
            assert reply.HasField("fetched")
        assert client.ask(fetch=fetch(*keys(1))).HasField("fetched")


def test_p17_requests_under_way_are_bounded_by_the_bytes_of_their_replies() -> None:
    """So that a client that reads late is told to ask elsewhere and not taken for one that does not read."""
    limits = ConnectionLimits(unsent_bytes=2 * MAX_FETCH_KEYS * FOUND_BYTES)
    with fetching(limits) as rig, RawClient(rig.path) as client:
        with rig.hold():
            for _ in range(2):
                client.socket.sendall(client.frame(fetch=fetch(*keys(MAX_FETCH_KEYS))))
            assert client.ask(fetch=fetch(*keys(1))).failure.reason == "TOO_MANY_UNDER_WAY"
        for _ in range(2):
            assert client.reply() is not None
        assert client.ask(fetch=fetch(*keys(1))).HasField("fetched")


def test_fetches_are_not_held_to_a_number_a_second() -> None:
    """A thousand of them are a matter of milliseconds; pings beyond the burst would take seconds."""
    limits = ConnectionLimits(requests_per_s=0.001, request_burst=3)
    with fetching(limits) as rig, RawClient(rig.path) as client:
        for _ in range(50):
            assert client.ask(fetch=fetch(*keys(1))).HasField("fetched")
        assert client.ask(fetch=fetch()).failure.reason == "INVALID_REQUEST"
        assert client.ask(fetch=fetch()).failure.reason == "INVALID_REQUEST", "the last of the three"
        client.socket.sendall(client.frame(ping=pb.BrokerPing()))
        client.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.reply()


def test_p21_a_connection_that_ends_in_mid_fetch_harms_nobody() -> None:
    with fetching() as rig, RawClient(rig.path) as other:
        with rig.hold():
            leaver = RawClient(rig.path)
            for _ in range(3):
                leaver.socket.sendall(leaver.frame(fetch=fetch(*keys(2))))
            wait_until(lambda: sum(each for each, _ in rig.desk._under_way.values()) == 3, "their arrival")
            leaver.socket.close()
            wait_until(lambda: rig.gone == [leaver.welcome.owner_id], "its end")
        assert other.ask(fetch=fetch(*keys(1))).HasField("fetched")


def test_replies_that_do_not_fit_the_socket_arrive_later_whole_and_in_order() -> None:
    """The loop leaves the rest of a reply to the broker's thread."""
    limits = ConnectionLimits(unsent_bytes=1 << 22, requests_under_way=1000)
    wanted = [b"\0" + os.urandom(31) for _ in range(MAX_FETCH_KEYS)]
    with fetching(limits) as rig, RawClient(rig.path) as client:
        count = 60
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(count):
            client.socket.sendall(client.frame(fetch=fetch(*wanted)))
        wait_until(lambda: len(rig.asked) == count, "all answers")
        rig.turn()
        connection = rig.broker._desk.owners[client.welcome.owner_id].connection
        assert connection.wants_to_send, "more than the kernel takes"
        for number in range(count):
            reply = client.reply()
            assert reply is not None
            assert reply.request_id == 2 + number
            assert [each.result.key for each in reply.fetched.items] == wanted


def test_a_client_that_reads_no_replies_is_ended_by_the_brokers_thread() -> None:
    limits = ConnectionLimits(send_s=0.2, unsent_bytes=1 << 22, requests_under_way=1000)
    wanted = [b"\0" + os.urandom(31) for _ in range(MAX_FETCH_KEYS)]
    with fetching(limits) as rig, RawClient(rig.path) as client:
        for _ in range(60):
            client.socket.sendall(client.frame(fetch=fetch(*wanted)))
        wait_until(lambda: rig.gone == [client.welcome.owner_id], "its end")
        assert rig.broker.counters.closed["not_reading"] == 1
