"""Rooms: one item's rows and the prefill ranks that want them, paired by a number that the gateway drew.

Owns TokenSpeed 0.1.1's handshake (``runtime/epd``): a prefill rank names its memory in a message by ZMQ,
before or after the gateway has the item encoded; once the rows and all ranks are there, the rows are written
by ``mooncake`` and every rank gets a status. Every room ends: ROOM_S after its first half if the other half
does not come, SEND_S after both are there, or when its item fails. Then its ranks get a status, and its
memory is freed.

A rank that knows the room's number, 63 random bits, may have the rows. They are sent only to the host that
asks, or to one of an allow-list (``zmq_push.Receivers``).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import structlog
import torch

from encoder_service.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    TooManyCalls,
    TransportUnavailable,
    VisionEncoderError,
)
from encoder_service.pipeline import EncodeResult, Pipeline
from encoder_service.protocols.tokenspeed.mooncake import Mooncake, StagedRows
from encoder_service.protocols.zmq_push import Receivers, Sender
from encoder_service.rpc.observed import Call
from encoder_service.rpc.status import as_service_error, failure_of
from encoder_service.scheduler.admission import UnreadBytes
from encoder_service.types import EncodedItem

log = structlog.get_logger(__name__)

# How long rows wait for their ranks, and ranks for their item.
ROOM_S = 60.0
# For the rows of a room to be written, once all of its ranks are there.
SEND_S = 30.0
PUSH_S = 5.0
# Open rooms, ranks of one room, failed rooms whose numbers are kept.
MAX_ROOMS, MAX_RANKS, MAX_FAILED = 32_768, 256, 16_384
# Most ranks in rooms without an item, in total and of one host. Below MAX_ROOMS, so that items get rooms.
MAX_EARLY, MAX_EARLY_OF_HOST = 16_384, 2048
MAX_ROOM = (1 << 63) - 1
MAX_ROWS = (1 << 31) - 1
# Of one part of a message. ZMQ ends the connection of a peer that sends more.
MAX_PART_BYTES = 256
STOP_POLL_S = 0.05
# Most tasks that send. Above it a rank that asks for a failed room gets no status.
MAX_TASKS = 2048
# Minimum interval between logged refusals.
LOG_S = 1.0

REGISTRATION = b"None"
NUM_PARTS = 13
SUCCESS, FAILED = b"5", b"0"
# This service is one rank.
OUR_RANK = b"0"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def count(part: bytes, name: str, most: int) -> int:
    """Raises InvalidRequest."""
    if not re.fullmatch(rb"[0-9]{1,20}", part) or int(part) > most:
        raise InvalidRequest(f"{name} is {part[:32]!r}, needed is a number from 0 to {most}")
    return int(part)


def text(part: bytes) -> str:
    return part.decode("ascii", "replace")


@dataclass(frozen=True)
class Destination:
    """A prefill rank's memory for rows [row_start, row_start + num_rows) of a room's ``span``.

    peer: the host that asked. endpoint: where it wants the status, for ZMQ. session: its Mooncake engine,
    host:port. main, deepstack: addresses. width: of a row without deepstack. num_ranks: how many want rows of
    this room.
    """

    room: int
    peer: str
    endpoint: str
    session: str
    main: int
    deepstack: int
    num_rows: int
    width: int
    dtype: torch.dtype
    has_deepstack: bool
    num_ranks: int
    row_start: int
    span: int

    @classmethod
    def parse(cls, parts: Sequence[bytes], peer: str, receivers: Receivers) -> Self:
        """peer: the address of the message's sender. Raises InvalidRequest, PermissionDenied."""
        if len(parts) < NUM_PARTS:
            raise InvalidRequest(f"the message has {len(parts)} parts, needed are {NUM_PARTS}")
        room, host, port, session, main, deepstack, rows, width, dtype, deep, ranks, start, span = parts[
            :NUM_PARTS
        ]
        for address in (main, deepstack):
            if len(address) != 8:
                raise InvalidRequest(f"an address has {len(address)} bytes, needed are 8")
        name = text(dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise InvalidRequest(f"dtype {name!r} is not known, {', '.join(DTYPES)} are")
        if deep not in (b"0", b"1"):
            raise InvalidRequest(f"has_deepstack is {deep!r}, needed is 0 or 1")
        num_ranks = count(ranks, "the number of ranks", MAX_RANKS)
        if not num_ranks:
            raise InvalidRequest("the number of ranks is 0, needed is at least 1")
        return cls(
            room=count(room, "the room", MAX_ROOM),
            peer=peer,
            endpoint=receivers.endpoint(text(host), count(port, "the port", 65535), peer),
            session=receivers.endpoint_of(text(session), peer).removeprefix("tcp://"),
            main=int.from_bytes(main, "little"),
            deepstack=int.from_bytes(deepstack, "little"),
            num_rows=count(rows, "the number of rows", MAX_ROWS),
            width=count(width, "the width", MAX_ROWS),
            dtype=DTYPES[name],
            has_deepstack=deep == b"1",
            num_ranks=num_ranks,
            row_start=count(start, "the first row", MAX_ROWS),
            span=count(span, "the span", MAX_ROWS),
        )

    def check(self, item: EncodedItem) -> None:
        """Raises TransportUnavailable, with both numbers, where the memory is not for these rows."""
        spec = item.spec
        width = spec.width // (1 + spec.num_deepstack_levels)
        for what, found, needed in (
            ("row width", self.width, width),
            ("row count", self.span, spec.num_rows),
            ("deepstack", self.has_deepstack, spec.num_deepstack_levels > 0),
        ):
            if found != needed:
                raise TransportUnavailable(f"the receiver's {what} is {found}, the encoder's is {needed}")
        if self.row_start + self.num_rows > self.span:
            raise TransportUnavailable(
                f"rows {self.row_start} to {self.row_start + self.num_rows} are wanted of {self.span}"
            )
        if self.num_rows and not (self.main and (self.deepstack or not self.has_deepstack)):
            raise TransportUnavailable("the receiver has no memory for its rows")


@dataclass
class Room:
    """destinations: by session. call, index: the item's, None until it is being encoded. result: its rows,
    which wait or are being sent. timer: ends the room."""

    number: int
    destinations: dict[str, Destination] = field(default_factory=dict)
    call: Call | None = None
    index: int = 0
    result: EncodeResult | None = None
    is_sending: bool = False
    timer: asyncio.TimerHandle | None = None


class Rooms:
    """All rooms of the service. Used from the event loop only. refused: messages that were not taken, rooms
    whose item did not come and statuses that could not be sent, by reason. unread: rows that wait or are on
    their way."""

    def __init__(self, receivers: Receivers, sender: Sender, unread: UnreadBytes) -> None:
        self.refused: Counter[str] = Counter()
        self.unread = unread
        self._receivers, self._sender = receivers, sender
        self._rooms: dict[int, Room] = {}
        # Numbers of rooms that failed, the oldest first: ranks that ask later get the status FAILED.
        self._failed: dict[int, None] = {}
        # Ranks in rooms without an item, by the host that asked.
        self._early: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        # When a refused message was logged last.
        self._logged_s = -LOG_S
        self._pipeline: Pipeline | None = None
        self._mooncake: Mooncake | None = None

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def num_waiting(self) -> int:
        """Rooms whose rows are ready and not delivered."""
        return sum(room.result is not None for room in self._rooms.values())

    def attach(self, pipeline: Pipeline, mooncake: Mooncake) -> None:
        self._pipeline, self._mooncake = pipeline, mooncake

    async def drain(self, ends_s: float) -> None:
        """Returns once no rows wait, or at that time. The rooms that are left fail then."""
        while self.num_waiting and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(STOP_POLL_S)
        for room in list(self._rooms.values()):
            if not room.is_sending:
                self._fail(room, Draining("the service stops"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PUSH_S)

    # -- the two halves of a room ----------------------------------------------------------------------

    @contextmanager
    def encoding(self, number: int, call: Call, index: int) -> Iterator[Room]:
        """The room of an item that is being encoded. What is raised inside is the room's failure, too. Raises
        InvalidRequest for a room that has an item, TooManyCalls, QueueFull while many rows wait."""
        if not 0 <= number <= MAX_ROOM:
            raise InvalidRequest(f"bootstrap_room is {number}, needed is a number from 0 to {MAX_ROOM}")
        room = self._rooms.get(number)
        if room is None:
            if len(self._rooms) >= MAX_ROOMS:
                self._note_failed(number)
                raise TooManyCalls(f"{len(self._rooms)} rooms are open, at most {MAX_ROOMS} may be")
            room = self._rooms[number] = Room(number)
        elif room.call is not None:
            raise InvalidRequest(f"room {number} already has an item")
        self._failed.pop(number, None)
        self._end_early(room)
        room.call, room.index = call, index
        self._set_timer(room, None)
        try:
            self.unread.check_room()
            yield room
        except BaseException as found:
            has_left = isinstance(found, asyncio.CancelledError)
            self._fail(room, Cancelled("the gateway has left") if has_left else as_service_error(found))
            raise

    def deliver(self, room: Room, result: EncodeResult) -> None:
        """The item's rows. Takes ``result`` over."""
        if self._rooms.get(room.number) is not room:  # it failed at the stop
            result.release()
            return
        room.result = result
        self.unread.add(result.encoded, result.encoded.spec.num_bytes)
        self._set_timer(room, ROOM_S)
        self._advance(room)

    async def listen(self, puller: Any) -> None:
        """Takes the messages of a ZMQ socket, for ever. Parts above NUM_PARTS are dropped."""
        while True:
            parts: list[Any] = []
            has_more = True
            while has_more:
                part = await puller.recv(copy=False)
                has_more = part.more
                if len(parts) < NUM_PARTS:
                    parts.append(part)
                await asyncio.sleep(0)  # recv does not wait while there are messages
            try:
                self.take([bytes(part) for part in parts], parts[0].get("Peer-Address"))
            except Exception:
                log.exception("a message of a prefill worker failed by a defect")

    def take(self, parts: Sequence[bytes], peer: str) -> None:
        """One message of a prefill rank. A message that is not taken is counted."""
        if parts[0] == REGISTRATION:  # what it says is repeated for each room
            return
        try:
            self._add(Destination.parse(parts, peer, self._receivers))
        except VisionEncoderError as error:
            self.refused[error.reason] += 1
            now_s = time.monotonic()
            if now_s - self._logged_s >= LOG_S:
                self._logged_s = now_s
                log.warning("message refused", peer=peer, reason=error.reason, error=error.message)

    def _add(self, destination: Destination) -> None:
        number = destination.room
        if number in self._failed:
            self._tell_failed(destination)
            return
        room = self._rooms.get(number)
        if room is not None and (room.is_sending or len(room.destinations) >= MAX_RANKS):
            raise InvalidRequest(f"room {number} has its {len(room.destinations)} ranks")
        if room is None or (room.call is None and destination.session not in room.destinations):
            self._check_early(destination)
        if room is None:
            room = self._rooms[number] = Room(number)
            self._set_timer(room, ROOM_S)
        if room.call is None:
            self._early[destination.peer] += 1
            if (replaced := room.destinations.get(destination.session)) is not None:
                self._early[replaced.peer] -= 1
        room.destinations[destination.session] = destination
        self._advance(room)

    def _check_early(self, destination: Destination) -> None:
        """Raises TooManyCalls and tells the rank while too many wait."""
        peer, found = destination.peer, self._early.total()
        if found >= MAX_EARLY or self._early[peer] >= MAX_EARLY_OF_HOST:
            self._tell_failed(destination)
            raise TooManyCalls(
                f"{found} ranks wait for items, {self._early[peer]} of {peer}; at most {MAX_EARLY} may, "
                f"{MAX_EARLY_OF_HOST} of one host"
            )

    def _end_early(self, room: Room) -> None:
        """The ranks of a room without an item wait no more."""
        self._early.subtract(each.peer for each in room.destinations.values())
        self._early = +self._early

    def _advance(self, room: Room) -> None:
        """Starts to send once both halves are there."""
        if room.result is None or not room.destinations:
            return
        (first, *_) = room.destinations.values()
        if len(room.destinations) >= first.num_ranks:
            room.is_sending = True
            self._set_timer(room, None)
            self._run(self._send(room, room.result))

    def refuse(self, number: int, error: VisionEncoderError) -> None:
        """The item of this room is not taken. A room that has one already keeps it."""
        room = self._rooms.get(number) or Room(number)
        if room.call is None:
            self._fail(room, error)

    # -- its end ---------------------------------------------------------------------------------------

    async def _send(self, room: Room, result: EncodeResult) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                await self._write(result.encoded, list(room.destinations.values()))
        except TimeoutError:
            self._fail(room, DeadlineExceeded(f"the rows were not written within {SEND_S} s"))
        except Exception as error:
            self._fail(room, as_service_error(error))
        else:
            assert room.call is not None
            assert self._pipeline is not None
            room.call.delivered(
                self._pipeline.metrics, result, room.index, "mooncake", self._pipeline.clock()
            )
            self._close(room, SUCCESS)

    async def _write(self, item: EncodedItem, destinations: Sequence[Destination]) -> None:
        assert self._mooncake is not None
        first = destinations[0]
        for each in destinations:
            each.check(item)
            if (each.dtype, each.num_ranks) != (first.dtype, first.num_ranks):
                raise TransportUnavailable(
                    f"one rank wants {first.dtype} for {first.num_ranks} ranks, another {each.dtype} for "
                    f"{each.num_ranks}"
                )
        host = first.session.rpartition(":")[0]
        async with self._mooncake.staged(item.rows, first.width, first.dtype, host) as staged:
            writes = (self._write_rank(staged, each) for each in destinations if each.num_rows)
            for found in await asyncio.gather(*writes, return_exceptions=True):
                if found is not None:
                    raise found

    async def _write_rank(self, staged: StagedRows, wanted: Destination) -> None:
        assert self._mooncake is not None
        rows = slice(wanted.row_start, wanted.row_start + wanted.num_rows)
        sources, addresses = [staged.main[rows]], [wanted.main]
        if wanted.has_deepstack:
            sources.append(staged.deepstack[rows])
            addresses.append(wanted.deepstack)
        await self._mooncake.write(staged, wanted.session, sources, addresses)

    def _expire(self, room: Room) -> None:
        """Its other half has not come for ROOM_S."""
        has_rows = room.result is not None
        what = f"{len(room.destinations)} ranks asked for its rows" if has_rows else "no item came"
        error = DeadlineExceeded(f"room {room.number}: {what} within {ROOM_S} s")
        if not has_rows:
            self.refused[error.reason] += 1
        self._fail(room, error)

    def _fail(self, room: Room, error: VisionEncoderError) -> None:
        """Tells the ranks that are there, and later those that come."""
        if room.result is not None and room.call is not None and self._pipeline is not None:
            # Before the rows were ready, the failure is the call's, and reported with it.
            room.call.item_failed(self._pipeline.metrics, failure_of(error), room.index)
        elif room.call is None:
            self._end_early(room)
            log.warning("room failed", room=room.number, error=error.message)
        self._note_failed(room.number)
        self._close(room, FAILED)

    def _note_failed(self, number: int) -> None:
        self._failed[number] = None
        if len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def _close(self, room: Room, status: bytes) -> None:
        """Gives back what the room holds and tells its ranks."""
        self._set_timer(room, None)
        if self._rooms.get(room.number) is room:
            del self._rooms[room.number]
        result, room.result = room.result, None
        if result is not None:
            self.unread.remove(result.encoded, result.encoded.spec.num_bytes)
            result.release()
        for destination in room.destinations.values():
            self._push(destination, status)

    def _set_timer(self, room: Room, delay_s: float | None) -> None:
        if room.timer is not None:
            room.timer.cancel()
            room.timer = None
        if delay_s is not None:
            room.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, room)

    def _tell_failed(self, destination: Destination) -> None:
        """A rank that is in no room. Raises TooManyCalls while many statuses are on their way."""
        if len(self._tasks) >= MAX_TASKS:
            raise TooManyCalls(
                f"{len(self._tasks)} statuses and rows are on their way, at most {MAX_TASKS} may be"
            )
        self._push(destination, FAILED)

    def _push(self, destination: Destination, status: bytes) -> None:
        self._run(self._push_status(destination, status))

    async def _push_status(self, destination: Destination, status: bytes) -> None:
        try:
            await self._sender.push(destination.endpoint, [str(destination.room).encode(), status, OUR_RANK])
        except VisionEncoderError as error:
            self.refused[error.reason] += 1
            log.warning("status not delivered", room=destination.room, error=error.message)

    def _run(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
