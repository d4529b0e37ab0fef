"""TokenSpeed's messages and grids as records, and turns at the send buffer."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tracemalloc
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import zmq

from encoder_service.config import parse_settings
from encoder_service.errors import GridMismatch, InvalidRequest, TooManyCalls, TransportUnavailable
from encoder_service.protocols.tokenspeed.mooncake import Mooncake
from encoder_service.protocols.tokenspeed.rooms import Destination, Rooms
from encoder_service.protocols.tokenspeed.server import grid_of
from encoder_service.protocols.zmq_push import Receivers, Sender
from encoder_service.rpc.observed import Call
from encoder_service.scheduler.admission import UnreadBytes
from encoder_service.types import Grid, Modality
from vision_encoder.tokenspeed import tokenspeed_scheduler_pb2 as scheduler

ROOM = 8232471665173244710
# As TokenSpeed 0.1.1's receiver sends it.
PARTS = [
    *(b"8232471665173244710", b"10.0.0.7", b"41234", b"10.0.0.7:15499"),
    *((0x7F6CA27FD010).to_bytes(8, "little"), (0x7F6CA2800000).to_bytes(8, "little")),
    *(b"35", b"4096", b"torch.bfloat16", b"1", b"2", b"35", b"70"),
]


def test_a_message_of_a_prefill_rank() -> None:
    assert Destination.parse(
        [*PARTS, b"of a later version"], "10.0.0.7", Receivers("list", [])
    ) == Destination(
        room=ROOM,
        peer="10.0.0.7",
        endpoint="tcp://10.0.0.7:41234",
        session="10.0.0.7:15499",
        main=0x7F6CA27FD010,
        deepstack=0x7F6CA2800000,
        num_rows=35,
        width=4096,
        dtype=torch.bfloat16,
        has_deepstack=True,
        num_ranks=2,
        row_start=35,
        span=70,
    )


def item_with(name: str, dtype: str, shape: list[int], data: bytes) -> scheduler.MultimodalItem:
    found = scheduler.MultimodalItem()
    found.model_specific_tensors[name].CopyFrom(scheduler.TensorData(dtype=dtype, shape=shape, inline=data))
    return found


def int64(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


@pytest.mark.parametrize(
    ("name", "modality"),
    [
        ("image_grid_thw", Modality.IMAGE),
        ("video_grid_thw", Modality.VIDEO),
        ("grid_thws", Modality.IMAGE),
    ],
)
def test_grids_have_their_models_names(name: str, modality: Modality) -> None:
    assert grid_of(item_with(name, "int64", [1, 3], int64(4, 10, 14)), modality) == Grid(4, 10, 14)
    four = b"".join(value.to_bytes(4, "little") for value in (4, 10, 14))
    assert grid_of(item_with(name, "uint32", [3], four), modality) == Grid(4, 10, 14)


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (item_with("video_grid_thw", "int64", [1, 3], int64(1, 2, 2)), InvalidRequest),
        (item_with("image_grid_thw", "int64", [2, 3], int64(1, 2, 2, 1, 2, 2)), GridMismatch),
        (item_with("image_grid_thw", "int64", [1, 3], int64(1, 2)), GridMismatch),
        (item_with("image_grid_thw", "int64", [1, 3], int64(0, 2, 2)), GridMismatch),
        (item_with("image_grid_thw", "int64", [1, 3], int64(1, 2, 1 << 40)), GridMismatch),
        (item_with("image_grid_thw", "bool", [1, 3], b"123"), InvalidRequest),
    ],
)
def test_other_grids_are_refused(item: scheduler.MultimodalItem, error: type[Exception]) -> None:
    with pytest.raises(error):
        grid_of(item, Modality.IMAGE)


def test_p46_a_shape_of_many_dimensions_is_not_copied() -> None:
    item = item_with("image_grid_thw", "int64", [1] * 1_000_000, int64(1, 2, 2))
    tracemalloc.start()
    with pytest.raises(GridMismatch):
        grid_of(item, Modality.IMAGE)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


class Engine:
    def initialize(self, *_: str) -> int:
        return 0


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> Mooncake:
    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    given: dict[str, Any] = {"serve_tokenspeed": "127.0.0.1:0", "tokenspeed_send_bytes": 1 << 20}
    return Mooncake(parse_settings(model=Path("/m"), **given), torch.device("cpu"))


def test_p17_a_host_leaves_half_of_the_buffer_to_others(mooncake: Mooncake) -> None:
    rows = torch.zeros(300, 512, dtype=torch.bfloat16)  # 300 KiB

    async def main() -> None:
        release = asyncio.Event()
        entered: list[str] = []

        async def hold(host: str) -> None:
            async with mooncake.staged(rows, 256, torch.bfloat16, host):
                entered.append(host)
                await release.wait()

        holders = [asyncio.create_task(hold(host)) for host in ("a", "a", "a", "b", "c")]
        while len(entered) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert sorted(entered) == ["a", "b", "c"]
        assert mooncake.held_bytes == 3 * rows.nbytes
        release.set()
        await asyncio.gather(*holders)
        while mooncake.held_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(
            TransportUnavailable, match="have 1049600 bytes, tokenspeed_send_bytes is 1048576"
        ):
            async with mooncake.staged(torch.zeros(1025, 512), 256, torch.bfloat16, "a"):
                pass

    asyncio.run(main())
    mooncake.close()


# -- rooms ---------------------------------------------------------------------------------------------

PEER = "10.0.0.7"


class SilentSender:
    """Statuses that are never taken."""

    def __init__(self) -> None:
        self.pushed: list[tuple[bytes, bytes]] = []

    async def push(self, endpoint: str, frames: list[bytes]) -> None:
        self.pushed.append((frames[0], frames[1]))
        await asyncio.Event().wait()


def new_rooms(sender: Any = None) -> Rooms:
    return Rooms(Receivers("list", []), sender or SilentSender(), UnreadBytes(1 << 20))


def message(room: int, host: str = PEER) -> list[bytes]:
    text = host.encode()
    return [str(room).encode(), text, PARTS[2], text + b":15499", *PARTS[4:]]


async def ended(rooms: Rooms) -> None:
    for room in list(rooms._rooms.values()):
        rooms._set_timer(room, None)
    for task in rooms._tasks:
        task.cancel()
    await asyncio.gather(*rooms._tasks, return_exceptions=True)


def test_p46_messages_without_end_leave_the_loop_to_others() -> None:
    """Also one message with very many parts, of which the first are kept."""

    async def main() -> None:
        sender = Sender("tokenspeed", 1.0)
        rooms = new_rooms(sender)
        puller, port = sender.bind_puller("127.0.0.1", 0, 256)
        taken: list[Sequence[bytes]] = []
        rooms.take = lambda parts, peer: taken.append(parts)  # type: ignore[method-assign]
        with zmq.Context() as context, context.socket(zmq.PUSH) as pusher:
            pusher.connect(f"tcp://127.0.0.1:{port}")
            pusher.send_multipart([b"many"] * 5000)
            for _ in range(500):
                pusher.send_multipart([b"one", b"two"])
            await puller.poll()
            listening = asyncio.create_task(rooms.listen(puller))
            turns = 0
            while len(taken) < 501:
                await asyncio.sleep(0)
                turns += 1
            listening.cancel()
        assert taken[0] == [b"many"] * 13
        assert taken[1:] == [[b"one", b"two"]] * 500
        assert turns >= 6000
        sender.close()

    asyncio.run(main())


def test_refused_messages_are_counted_and_one_a_second_is_logged() -> None:
    rooms = new_rooms()
    with structlog.testing.capture_logs() as logs:
        for _ in range(100):
            rooms.take([b"x"], PEER)
    assert rooms.refused["INVALID_REQUEST"] == 100
    assert [line["event"] for line in logs] == ["message refused"]


def test_p46_ranks_that_ask_for_failed_rooms_start_a_bounded_number_of_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("encoder_service.protocols.tokenspeed.rooms.MAX_TASKS", 3)

    async def main() -> None:
        rooms = new_rooms()
        rooms.refuse(ROOM, TooManyCalls("none"))
        for _ in range(10):
            rooms.take(message(ROOM), PEER)
        assert len(rooms._tasks) == 3
        assert rooms.refused == {"TOO_MANY_CALLS": 7}
        await ended(rooms)

    asyncio.run(main())


def test_p46_ranks_that_wait_for_items_have_a_share_for_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.protocols.tokenspeed.rooms.MAX_EARLY", 5)
    monkeypatch.setattr("encoder_service.protocols.tokenspeed.rooms.MAX_EARLY_OF_HOST", 3)

    async def main() -> None:
        sender = SilentSender()
        rooms = new_rooms(sender)
        for room in (1, 2, 3, 3, 4, 1):  # some ask twice
            rooms.take(message(room), PEER)
        for room in (5, 6, 7):
            rooms.take(message(room, "10.0.0.8"), "10.0.0.8")
        await asyncio.sleep(0)
        assert sender.pushed == [(b"4", b"0"), (b"7", b"0")]
        assert rooms.refused == {"TOO_MANY_CALLS": 2}
        rooms.refuse(2, TooManyCalls("none"))
        rooms.take(message(8), PEER)
        assert sorted(rooms._rooms) == [1, 3, 5, 6, 8]
        for room in list(rooms._rooms):
            rooms.refuse(room, TooManyCalls("none"))
        assert not rooms._early
        await ended(rooms)

    asyncio.run(main())


def test_ranks_of_an_item_that_has_no_place_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.protocols.tokenspeed.rooms.MAX_ROOMS", 0)

    async def main() -> None:
        sender = SilentSender()
        rooms = new_rooms(sender)
        with pytest.raises(TooManyCalls), rooms.encoding(ROOM, Call("", ""), 0):
            pass
        rooms.take(message(ROOM), PEER)
        await asyncio.sleep(0)
        assert sender.pushed == [(str(ROOM).encode(), b"0")]
        await ended(rooms)

    asyncio.run(main())


def test_a_status_that_cannot_be_sent_is_counted() -> None:
    """The process has no more sockets."""

    async def main() -> None:
        sender = Sender("tokenspeed", 1.0)
        sender._context.set(zmq.MAX_SOCKETS, 1)
        rooms = new_rooms(sender)
        with contextlib.closing(sender._context.socket(zmq.PULL)):
            rooms.refuse(ROOM, TooManyCalls("none"))
            rooms.take(message(ROOM), PEER)
            await asyncio.gather(*rooms._tasks)
        assert rooms.refused["TRANSPORT_UNAVAILABLE"] == 1
        sender.close()

    asyncio.run(main())
