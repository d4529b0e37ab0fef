"""Rooms: their states, what the table of them allows, and what is sent to ranks."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import structlog
import torch
import zmq

from encoder_service.errors import (
    Draining,
    InvalidRequest,
    QueueFull,
    TooManyCalls,
    TransportUnavailable,
    VisionEncoderError,
)
from encoder_service.ops.metrics import Metrics
from encoder_service.pipeline import EncodeResult
from encoder_service.protocols.tokenspeed import rooms as rooms_module
from encoder_service.protocols.tokenspeed import sending
from encoder_service.protocols.tokenspeed.room import ROOM_S, CallItem, Rank, Room, State
from encoder_service.protocols.tokenspeed.rooms import Rooms
from encoder_service.protocols.tokenspeed.sending import Ended, RankSender
from encoder_service.protocols.tokenspeed.wire import FAILED, SUCCESS, RowsRequest
from encoder_service.protocols.zmq_push import AllowedReceivers, Sender
from encoder_service.rpc.observed import Call
from encoder_service.scheduler.admission import UndeliveredBytes
from encoder_service.store.embedding_store import PinnedRows
from encoder_service.types import CacheTier, EncodedItem, Grid, StageTimings
from tests.integration.tokenspeed import request
from tests.unit.protocols.mooncake_engine import FakeMooncake, fake_mooncake
from tests.unit.protocols.test_mooncake import new_mooncake
from tests.unit.service.rig import until

pytestmark = pytest.mark.anyio
ROOM, PEER, OTHER = 7, "10.0.0.7", "10.0.0.8"
ITEM = CallItem(Call("tokenspeed/Encode", "request"), 0)
ROWS = torch.arange(4 * 6, dtype=torch.float32).view(4, 6)


def rank(room: int = ROOM, host: str = PEER, /, **changed: object) -> Rank:
    wanted = RowsRequest.parse(request(room, host, **changed))
    return Rank(wanted, host, f"tcp://{host}:{wanted.port}", wanted.session)


def new_result() -> EncodeResult:
    item = EncodedItem(b"key", b"digest", Grid(1, 4, 4), ROWS, 2)
    return EncodeResult(PinnedRows(item), CacheTier.MISS, StageTimings(), ready_s=0.0)


# -- one room ------------------------------------------------------------------------------------------


ORDERS = sorted(set(itertools.permutations(["gateway", "gateway", "rank", "rank"])))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_a_room_sends_once_its_rows_and_all_ranks_are_there(order: Sequence[str]) -> None:
    """A gateway's item comes before its rows."""
    events = iter(["item", "rows"])
    order = [event if event == "rank" else next(events) for event in order]
    now_s, hosts, result = 0.0, iter([PEER, OTHER]), new_result()
    room = Room(ROOM, lambda: now_s)
    assert (room.state, room.ends_s) == (State.WAITING_ITEM, ROOM_S)
    for now_s, event in enumerate(order, 1):
        assert room.state is not State.SENDING
        if event == "rank":
            room.join(rank(ROOM, next(hosts), num_ranks=2))
        elif event == "item":
            room.begin_encode(ITEM)
            assert (room.state, room.ends_s) == (State.WAITING_ROWS, None)
        else:
            room.add_rows(result)
            if order[-1] != "rows":
                assert (room.state, room.ends_s) == (State.WAITING_RANKS, now_s + ROOM_S)
    assert (room.state, room.ends_s) == (State.SENDING, None)
    assert list(room.ranks) == [f"{PEER}:15499", f"{OTHER}:15499"]
    with pytest.raises(InvalidRequest, match="room 7 has its 2 ranks"):
        room.join(rank())
    with pytest.raises(InvalidRequest, match="room 7 already has an item"):
        room.begin_encode(ITEM)
    assert room.end() is result
    assert (room.state, room.end()) == (State.OVER, None)


def test_a_room_has_a_bounded_number_of_ranks_by_session() -> None:
    room = Room(ROOM, lambda: 0.0)
    for port in (1, 1, *range(2, 257)):
        room.join(rank(session=f"{PEER}:{port}"))
    with pytest.raises(InvalidRequest, match="room 7 has its 256 ranks"):
        room.join(rank())


# -- the table -----------------------------------------------------------------------------------------


class FakeSender(RankSender):
    """rows: what is being sent, with the function that ends it."""

    def __init__(self) -> None:
        self.statuses: list[tuple[int, bytes]] = []
        self.rows: list[tuple[Sequence[Rank], Ended]] = []

    def send_rows(self, item: EncodedItem, ranks: Sequence[Rank], ended: Ended) -> None:
        assert item.rows is ROWS
        self.rows.append((ranks, ended))

    def send_status(self, rank: Rank, status: bytes) -> None:
        self.statuses.append((rank.request.room, status))

    def send_failed(self, rank: Rank) -> None:
        self.send_status(rank, FAILED)

    async def finish(self, timeout_s: float) -> None:
        pass


class Rig:
    """Rooms that hold nothing at the end. failures: of items, by reason."""

    def __init__(self, max_undelivered_bytes: int = 1 << 20, limit_s: float = ROOM_S) -> None:
        self.sender = FakeSender()
        self.metrics = Metrics()
        self.undelivered = UndeliveredBytes(max_undelivered_bytes)
        receivers = AllowedReceivers("tokenspeed_receivers", ["192.0.2.0/24"])
        self.rooms = Rooms(
            receivers, self.sender, self.undelivered, self.metrics, Counter(), time.monotonic, limit_s
        )

    def take(self, number: int, host: str = PEER, /, **changed: object) -> None:
        self.rooms.take(request(number, host, **changed), host)

    def encode(self, number: int) -> None:
        with self.rooms.encoding(number, ITEM) as room:
            self.rooms.deliver(room, new_result())

    def failures(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("ve_item_failures_total", {"reason": reason}) or 0.0

    def is_free(self) -> bool:
        return not len(self.rooms) and not self.undelivered.num_bytes


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize("error", [None, TransportUnavailable("none")], ids=["written", "not written"])
async def test_a_room_ends_when_its_rows_are_written_or_cannot_be(
    rig: Rig, error: VisionEncoderError | None
) -> None:
    rig.encode(ROOM)
    assert rig.undelivered.num_bytes == ROWS.nbytes
    with pytest.raises(InvalidRequest, match="already has an item"):
        rig.encode(ROOM)
    rig.rooms.refuse(ROOM, InvalidRequest("another call with this room"))
    rig.take(ROOM)
    (((sent,), ended),) = rig.sender.rows
    assert sent == rank()
    ended(error)
    assert rig.sender.statuses == [(ROOM, FAILED if error else SUCCESS)]
    assert rig.failures("TRANSPORT_UNAVAILABLE") == (error is not None)
    assert rig.is_free()


async def test_a_failed_encode_is_the_calls_and_its_ranks_get_a_status(rig: Rig) -> None:
    rig.take(ROOM)
    with pytest.raises(asyncio.CancelledError), rig.rooms.encoding(ROOM, ITEM):
        raise asyncio.CancelledError
    rig.take(ROOM)
    assert rig.sender.statuses == [(ROOM, FAILED)] * 2, "also a rank that comes later"
    assert not rig.failures("CANCELLED")
    assert rig.is_free()
    rig.encode(ROOM)
    rig.take(ROOM)
    assert len(rig.sender.rows) == 1, "the gateway has tried again"


async def test_rooms_end_whose_other_half_does_not_come() -> None:
    """An item without ranks, one without the second of two ranks, and a rank without an item."""
    rig = Rig(limit_s=0.05)
    for room in (1, 2):
        rig.encode(room)
    rig.take(2, num_ranks=2)
    rig.take(3)
    with structlog.testing.capture_logs() as logs:
        await until(rig.is_free)
    assert rig.failures("DEADLINE_EXCEEDED") == 2
    assert rig.rooms.refused == {"DEADLINE_EXCEEDED": 1}
    assert sorted(rig.sender.statuses) == [(2, FAILED), (3, FAILED)]
    assert sorted(line["error"] for line in logs) == [
        "room 1: 0 ranks asked for its rows within 0.05 s",
        "room 2: 1 ranks asked for its rows within 0.05 s",
        "room 3: no item came within 0.05 s",
    ]
    rig.take(1)
    assert rig.sender.statuses[-1] == (1, FAILED)


async def test_p46_no_item_is_encoded_while_too_many_rows_wait_for_their_ranks() -> None:
    rig = Rig(max_undelivered_bytes=ROWS.nbytes)
    rig.encode(1)
    with pytest.raises(QueueFull, match="96 bytes of rows wait to be read, at most 96 may"):
        rig.encode(2)
    for room in (1, 2):
        rig.take(room)
    assert rig.sender.statuses == [(2, FAILED)]
    rig.sender.rows[0][1](None)
    rig.encode(3)
    await rig.rooms.drain(0.0)


async def test_p37_a_stop_fails_the_rooms_that_are_left(rig: Rig) -> None:
    for room in (1, 2):
        rig.encode(room)
        rig.take(room, num_ranks=room)
    rig.take(3)
    result = new_result()
    with rig.rooms.encoding(4, ITEM) as encoded:
        rig.take(4)
        await rig.rooms.drain(0.0)
        rig.rooms.deliver(encoded, result)
    assert sorted(rig.sender.statuses) == [(2, FAILED), (3, FAILED), (4, FAILED)]
    assert rig.failures(Draining.reason) == 1
    assert len(rig.rooms) == 1, "rows that are being sent may arrive"
    rig.sender.rows[0][1](None)
    assert rig.is_free()


@pytest.mark.parametrize("number", [-1, 1 << 63])
def test_a_rooms_number_has_bounds(rig: Rig, number: int) -> None:
    with pytest.raises(InvalidRequest, match=f"bootstrap_room is {number}"):
        rig.encode(number)


async def test_ranks_of_an_item_that_gets_no_room_are_told(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> None:
    monkeypatch.setattr(rooms_module, "MAX_ROOMS", 0)
    with pytest.raises(TooManyCalls, match="0 rooms are open, at most 0 may be"):
        rig.encode(ROOM)
    rig.take(ROOM)
    assert rig.sender.statuses == [(ROOM, FAILED)]


async def test_p46_ranks_that_wait_for_items_have_a_share_for_each_host(
    monkeypatch: pytest.MonkeyPatch, rig: Rig
) -> None:
    monkeypatch.setattr(rooms_module, "MAX_EARLY", 5)
    monkeypatch.setattr(rooms_module, "MAX_EARLY_OF_HOST", 3)
    for room in (1, 2, 3, 3, 4, 1):  # some ask twice
        rig.take(room)
    for room in (5, 6, 7):
        rig.take(room, OTHER)
    assert rig.sender.statuses == [(4, FAILED), (7, FAILED)]
    assert rig.rooms.refused == {"TOO_MANY_CALLS": 2}
    rig.rooms.refuse(2, TooManyCalls("none"))
    rig.take(8)
    assert len(rig.rooms) == 5
    rig.encode(1)
    rig.sender.rows[0][1](None)
    for room in (3, 5, 6, 8):
        rig.rooms.refuse(room, TooManyCalls("none"))
    assert rig.is_free()
    for room in (11, 12, 13):
        rig.take(room)
    assert rig.rooms.refused == {"TOO_MANY_CALLS": 2}, "the share is free again"
    await rig.rooms.drain(0.0)


@pytest.mark.parametrize(
    "changed",
    [{"host": "192.0.3.1"}, {"session": "192.0.3.1:5000"}, {"session": b"\xff\xff:5"}, {"session": PEER}],
    ids=str,
)
async def test_p46_rows_do_not_go_to_a_host_that_a_message_names(rig: Rig, changed: dict[str, Any]) -> None:
    rig.encode(ROOM)
    rig.take(ROOM, **changed)
    assert rig.rooms.refused.total() == 1
    assert not rig.sender.rows
    rig.take(ROOM, session="192.0.2.1:5000")
    (((sent,), _),) = rig.sender.rows
    assert sent.session == "192.0.2.1:5000", "a network of the list may receive"


def test_refused_messages_are_counted_and_one_a_second_is_logged(rig: Rig) -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(100):
            rig.rooms.take([b"x"], PEER)
    assert rig.rooms.refused == {"INVALID_REQUEST": 100}
    assert [line["event"] for line in logs] == ["message refused"]


async def test_p46_messages_without_end_leave_the_loop_to_others(rig: Rig) -> None:
    """Also one message with very many parts, of which the first are kept."""
    sender = Sender(1.0)
    puller, port = sender.bind_puller("127.0.0.1", 0, 256)
    with zmq.Context() as context, context.socket(zmq.PUSH) as pusher:
        pusher.connect(f"tcp://127.0.0.1:{port}")
        pusher.send_multipart([*request(ROOM, "127.0.0.1"), *[b"many"] * 5000])
        for _ in range(500):
            pusher.send_multipart([b"one", b"two"])
        await puller.poll()
        listening = asyncio.create_task(rig.rooms.listen(puller))
        turns = 0
        while rig.rooms.refused.total() < 500:
            await asyncio.sleep(0)
            turns += 1
        listening.cancel()
    assert len(rig.rooms) == 1
    assert turns >= 6000
    await rig.rooms.drain(0.0)
    sender.close()


# -- sending -------------------------------------------------------------------------------------------


class SilentSender:
    """Statuses that are never taken."""

    async def push(self, endpoint: str, frames: list[bytes]) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def fake() -> Iterator[FakeMooncake]:
    with fake_mooncake() as fake:
        yield fake


async def errors_of(sender: RankSender, *ranks: Rank) -> list[VisionEncoderError | None]:
    errors: list[VisionEncoderError | None] = []
    sender.send_rows(new_result().encoded, ranks, errors.append)
    await until(lambda: errors)
    return errors


async def test_each_rank_gets_its_span(fake: FakeMooncake) -> None:
    mooncake = new_mooncake()
    sender = RankSender(SilentSender(), mooncake, Counter())  # type: ignore[arg-type]
    main, deepstack = torch.zeros(3, 2), torch.zeros(3, 4)
    memory = {
        "main": main.data_ptr().to_bytes(8, "little"),
        "deepstack": deepstack.data_ptr().to_bytes(8, "little"),
    }
    first = rank(ROOM, PEER, num_rows=3, row_start=1, num_ranks=2, **memory)
    second = rank(ROOM, OTHER, num_rows=0, row_start=4, num_ranks=2)
    assert await errors_of(sender, first, second) == [None]
    assert torch.equal(torch.cat([main, deepstack], 1), ROWS[1:])
    assert fake.sessions == [first.session], "a rank without rows is not written to"
    (error,) = await errors_of(sender, rank(width=3))
    assert isinstance(error, TransportUnavailable)
    mooncake.close()


async def test_a_write_that_does_not_end_ends_its_room_and_keeps_its_memory(
    fake: FakeMooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_service.protocols.tokenspeed.mooncake.QUARANTINE_S", 0.0)
    mooncake, session = new_mooncake(), f"{PEER}:15499"
    sender = RankSender(SilentSender(), mooncake, Counter(), limit_s=0.1)  # type: ignore[arg-type]
    fake.silent[session] = answered = threading.Event()
    (error,) = await errors_of(sender, rank())
    assert error is not None
    assert error.message == "the rows were not written within 0.1 s"
    assert mooncake.held_bytes == ROWS.nbytes
    answered.set()
    await until(lambda: not mooncake.held_bytes)
    mooncake.close()


async def test_p46_ranks_of_failed_rooms_start_a_bounded_number_of_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "MAX_TASKS", 3)
    sender: Any = RankSender(SilentSender(), None, Counter())  # type: ignore[arg-type]
    for _ in range(3):
        sender.send_failed(rank())
    with pytest.raises(TooManyCalls, match="3 statuses and rows are on their way, at most 3 may be"):
        sender.send_failed(rank())


async def test_a_status_that_nobody_takes_is_counted() -> None:
    statuses, refused = Sender(0.1), Counter[str]()
    sender: Any = RankSender(statuses, None, refused)  # type: ignore[arg-type]
    sender.send_status(rank(ROOM, "127.0.0.1", port=1), SUCCESS)
    await sender.finish(10.0)
    assert refused == {"TRANSPORT_UNAVAILABLE": 1}
    statuses.close()
