"""The table of rooms: which prefill ranks get which item's rows.

Owns TokenSpeed 0.1.1's handshake (``runtime/epd``): a prefill rank names its memory in a message by ZMQ,
before or after the gateway sends the item. Once the rows and all ranks are there, the rows are written
and every rank gets a status. Every room ends: ROOM_S after it began to wait for ranks or an item, SEND_S
(``sending``) after it began to send, or when its item fails. Its ranks then get a status, and its memory is
freed.

A rank that knows the room's number, 63 random bits, may have the rows. They are sent only to the host that
requests them, or to one of an allow-list (``zmq_push.AllowedReceivers``).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import structlog

from encoder_service.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    TooManyCalls,
    VisionEncoderError,
)
from encoder_service.ops.metrics import Metrics
from encoder_service.pipeline import EncodeResult
from encoder_service.protocols.tokenspeed import wire
from encoder_service.protocols.tokenspeed.room import ROOM_S, CallItem, Rank, Room, State
from encoder_service.protocols.tokenspeed.sending import RankSender
from encoder_service.protocols.zmq_push import AllowedReceivers
from encoder_service.rpc.status import failure_of
from encoder_service.scheduler.admission import UndeliveredBytes

log = structlog.get_logger(__name__)

# Open rooms, and failed rooms whose numbers are kept.
MAX_ROOMS, MAX_FAILED = 32_768, 16_384
# Most ranks in rooms without an item, in total and of one host. Below MAX_ROOMS, so that items get rooms.
MAX_EARLY, MAX_EARLY_OF_HOST = 16_384, 2048
STOP_POLL_S = 0.05
# For the last statuses at a stop.
STOP_S = 5.0
# Minimum interval between logged refusals.
LOG_S = 1.0


class Rooms:
    """All rooms of the service. Used from the event loop only. refused: counts messages that were not taken,
    and rooms whose item did not come, by reason."""

    def __init__(
        self,
        receivers: AllowedReceivers,
        sender: RankSender,
        undelivered: UndeliveredBytes,
        metrics: Metrics,
        refused: Counter[str],
        clock: Callable[[], float] = time.monotonic,
        limit_s: float = ROOM_S,
    ) -> None:
        """undelivered: counts rows that wait or are being sent. clock: monotonic seconds, the pipeline's.
        limit_s: how long a room waits for its ranks or its item."""
        self.refused = refused
        self._receivers, self._sender, self._undelivered = receivers, sender, undelivered
        self._metrics, self._clock, self._limit_s = metrics, clock, limit_s
        self._rooms: dict[int, Room] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        # Numbers of rooms that failed, the oldest first: ranks that come later get the status FAILED.
        self._failed: dict[int, None] = {}
        # Ranks in WAITING_ITEM, by the host that their request came from.
        self._early: Counter[str] = Counter()
        # When a refused message was logged last.
        self._logged_s = -LOG_S

    def __len__(self) -> int:
        return len(self._rooms)

    async def drain(self, ends_s: float) -> None:
        """Returns once no rows wait, or at that time. The rooms that are left fail then."""
        while self._clock() < ends_s and self._has_rows():  # noqa: ASYNC110
            await asyncio.sleep(STOP_POLL_S)
        for room in list(self._rooms.values()):
            if room.state is not State.SENDING:
                self._fail(room, Draining("the service stops"))
        await self._sender.finish(STOP_S)

    def _has_rows(self) -> bool:
        return any(room.result is not None for room in self._rooms.values())

    # -- items -----------------------------------------------------------------------------------------

    @contextmanager
    def encoding(self, number: int, item: CallItem) -> Iterator[Room]:
        """The room of an item while it is encoded. An error inside ends the room. Raises InvalidRequest for a
        room that has an item, TooManyCalls, and QueueFull while too many rows wait."""
        if not 0 <= number <= wire.MAX_ROOM:
            raise InvalidRequest(f"bootstrap_room is {number}, needed is a number from 0 to {wire.MAX_ROOM}")
        room = self._rooms.get(number)
        if room is None:
            if len(self._rooms) >= MAX_ROOMS:
                self._note_failed(number)
                raise TooManyCalls(f"{len(self._rooms)} rooms are open, at most {MAX_ROOMS} may be")
            room = self._open(number)
        room.begin_encode(item)
        self._failed.pop(number, None)
        self._forget_early(room)
        self._act_on(room)
        try:
            self._undelivered.check_room()
            yield room
        except BaseException:  # the call reports it
            self._end(room, wire.FAILED)
            raise

    def deliver(self, room: Room, result: EncodeResult) -> None:
        """The item's rows. Takes ``result`` over."""
        if room.state is State.OVER:  # the service stops
            result.release()
            return
        room.add_rows(result)
        self._undelivered.add(result.encoded, result.encoded.spec.num_bytes)
        self._act_on(room)

    def _open(self, number: int) -> Room:
        room = self._rooms[number] = Room(number, self._clock, self._limit_s)
        return room

    def refuse(self, number: int, error: VisionEncoderError) -> None:
        """The item of this room is not taken. A room that has one already keeps it."""
        room = self._rooms.get(number) or Room(number, self._clock, self._limit_s)
        if room.state is State.WAITING_ITEM:
            self._fail(room, error)

    # -- ranks -----------------------------------------------------------------------------------------

    async def listen(self, puller: Any) -> None:
        """Takes the messages of a ZMQ socket, without end. Drops parts above NUM_PARTS."""
        while True:
            parts: list[Any] = []
            has_more = True
            while has_more:
                part = await puller.recv(copy=False)
                has_more = part.more
                if len(parts) < wire.NUM_PARTS:
                    parts.append(part)
                await asyncio.sleep(0)  # recv does not wait while there are messages
            try:
                self.take([bytes(part) for part in parts], parts[0].get("Peer-Address"))
            except Exception:
                log.exception("a message of a prefill rank failed by a defect")

    def take(self, parts: Sequence[bytes], peer: str) -> None:
        """Handles one message of a prefill rank, or counts it as refused. peer: the address of its sender."""
        if parts[0] == wire.REGISTRATION:
            return
        try:
            request = wire.RowsRequest.parse(parts)
            endpoint = self._receivers.endpoint(request.host, request.port, peer)
            session = self._receivers.endpoint_of(request.session, peer).removeprefix("tcp://")
            self._join(Rank(request, peer, endpoint, session))
        except VisionEncoderError as error:
            self.refused[error.reason] += 1
            now_s = self._clock()
            if now_s - self._logged_s >= LOG_S:
                self._logged_s = now_s
                log.warning("message refused", peer=peer, reason=error.reason, error=error.message)

    def _join(self, rank: Rank) -> None:
        """Raises InvalidRequest, TooManyCalls."""
        number = rank.request.room
        if number in self._failed:
            self._sender.send_failed(rank)
            return
        room = self._rooms.get(number)
        if room is None:
            self._count_early(rank)
            room = self._open(number)
        else:
            room.check_open()
            if room.state is State.WAITING_ITEM:
                self._count_early(rank, room.ranks.get(rank.session))
        room.join(rank)
        self._act_on(room)

    def _count_early(self, rank: Rank, replaced: Rank | None = None) -> None:
        """Counts a rank that waits for an item. Raises TooManyCalls and sends it the status FAILED while too
        many do."""
        peer, num_early = rank.peer, self._early.total()
        if replaced is not None:
            self._early[replaced.peer] -= 1
        elif num_early >= MAX_EARLY or self._early[peer] >= MAX_EARLY_OF_HOST:
            self._sender.send_failed(rank)
            raise TooManyCalls(
                f"{num_early} ranks wait for items, {self._early[peer]} of {peer}; at most {MAX_EARLY} may, "
                f"{MAX_EARLY_OF_HOST} of one host"
            )
        self._early[peer] += 1

    def _forget_early(self, room: Room) -> None:
        """The ranks of the room no longer wait for an item."""
        self._early.subtract(rank.peer for rank in room.ranks.values())
        self._early = +self._early

    # -- what follows from a room's state --------------------------------------------------------------

    def _act_on(self, room: Room) -> None:
        """Starts to send, or the timer of the state."""
        self._stop_timer(room)
        if room.state is State.SENDING:
            assert room.result is not None
            ranks = list(room.ranks.values())
            self._sender.send_rows(room.result.encoded, ranks, lambda error: self._sent(room, error))
        elif room.ends_s is not None:
            delay_s = room.ends_s - self._clock()
            self._timers[room.number] = asyncio.get_running_loop().call_later(delay_s, self._expire, room)

    def _sent(self, room: Room, error: VisionEncoderError | None) -> None:
        if error is not None:
            self._fail(room, error)
            return
        assert room.item is not None
        assert room.result is not None
        call, index = room.item.call, room.item.index
        call.delivered(self._metrics, room.result, index, "mooncake", self._clock())
        self._end(room, wire.SUCCESS)

    def _expire(self, room: Room) -> None:
        if room.state is State.WAITING_RANKS:
            missing = f"{len(room.ranks)} ranks asked for its rows"
        else:
            missing = "no item came"
            self.refused[DeadlineExceeded.reason] += 1
        self._fail(room, DeadlineExceeded(f"room {room.number}: {missing} within {self._limit_s} s"))

    def _fail(self, room: Room, error: VisionEncoderError) -> None:
        """Reports the error, unless the room's call does, and ends the room."""
        if room.state is State.WAITING_ITEM:
            log.warning("room failed", room=room.number, error=error.message)
        elif room.state in (State.WAITING_RANKS, State.SENDING):
            assert room.item is not None
            room.item.call.item_failed(self._metrics, failure_of(error), room.item.index)
        self._end(room, wire.FAILED)

    def _end(self, room: Room, status: bytes) -> None:
        """Frees what the room holds and sends its ranks the status. Idempotent."""
        if room.state is State.OVER:
            return
        if room.state is State.WAITING_ITEM:
            self._forget_early(room)
        if status == wire.FAILED:
            self._note_failed(room.number)
        self._stop_timer(room)
        self._rooms.pop(room.number, None)
        result = room.end()
        if result is not None:
            self._undelivered.remove(result.encoded, result.encoded.spec.num_bytes)
            result.release()
        for rank in room.ranks.values():
            self._sender.send_status(rank, status)

    def _note_failed(self, number: int) -> None:
        self._failed[number] = None
        if len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def _stop_timer(self, room: Room) -> None:
        timer = self._timers.pop(room.number, None)
        if timer is not None:
            timer.cancel()
