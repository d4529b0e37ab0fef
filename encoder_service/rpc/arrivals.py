"""Bounds the bytes of messages that are still arriving.

gRPC hands over a message when all of it is there, so nothing sees its size before. A message that is not
whole by the second check is late, and from then on counts with the bytes that its connection receives, by the
kernel's count. Where the kernel does not count (unix sockets), it counts as large as one may be. What cannot
be counted for want of room is refused. Until it is late, a message counts as large as the ones before it: as
the largest at first, and after each message as large as that one or a little less than before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from encoder_service.errors import DeadlineExceeded, QueueFull
from encoder_service.ops.shares import Holder, Shares, WaitingShares
from encoder_service.rpc.connections import connection_of, is_tcp, open_connections, received_bytes
from encoder_service.scheduler.admission import RETRY_AFTER_MS

Context = grpc.aio.ServicerContext[Any, Any]

CHECK_S = 0.025
# How fast the expected size of a message falls, by message, and to what.
FADING = 0.8
LEAST_EXPECTED_BYTES = 1 << 16
MAX_PEERS = 4096


@dataclass(eq=False)
class _Arrival:
    """A message that is not there yet. num_expected: bytes taken for it until it is late. num_held: taken for
    it alone as a late one. refused: why it is not waited for any longer."""

    peer: str
    holder: Holder
    limit: asyncio.Timeout
    num_expected: int = 0
    num_held: int = 0
    refused: QueueFull | None = None


@dataclass
class _Connection:
    """A connection with late messages. received: the kernel's count at the last check. num_bytes: received
    for its messages. num_held: taken of the limit."""

    holder: Holder
    received: int
    arrivals: set[_Arrival] = field(default_factory=set)
    num_bytes: int = 0
    num_held: int = 0


class Arrivals:
    """The messages of all calls of a server that are not there yet. Used on one event loop."""

    def __init__(
        self,
        max_bytes: int,
        max_message_bytes: int,
        received: Callable[[Collection[str]], Mapping[str, int]] | None = None,
    ) -> None:
        """max_bytes: of the late messages, and apart from them of the others, with a share for each holder.
        received: the bytes that connections have received, by peer; called on a thread."""
        self._prompt = WaitingShares(max_bytes)
        self._expected_bytes = max_message_bytes
        self._least_bytes = min(LEAST_EXPECTED_BYTES, max_message_bytes)
        self._shares = Shares(max_bytes)
        self._max_message_bytes = max_message_bytes
        self._received = received or KernelCounts()
        self._waiting: set[_Arrival] = set()
        self._connections: dict[str, _Connection] = {}
        self._delivered: dict[str, int] = {}
        """Bytes of the messages that came whole, by connection."""
        self._checking: asyncio.Task[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Of late messages."""
        return self._shares.num_used

    async def read(self, context: Context, holder: Holder, within_s: float) -> bytes | None:
        """A call's next message, which the caller has to count; None at the end of its messages. Raises
        QueueFull if it is late and there is no room for more bytes, and DeadlineExceeded."""
        arrival: _Arrival | None = None
        try:
            async with asyncio.timeout(within_s) as limit:
                num_expected = await self._prompt.acquire(holder, self._expected_bytes)
                arrival = _Arrival(context.peer(), holder, limit, num_expected)
                data = await self._receive(context, arrival)
        except TimeoutError:
            if arrival is not None and arrival.refused is not None:
                raise arrival.refused from None
            raise DeadlineExceeded(f"the request did not arrive within {within_s} s") from None
        return data if isinstance(data, bytes) else None

    async def _receive(self, context: Context, arrival: _Arrival) -> object:
        self._waiting.add(arrival)
        if self._checking is None:
            self._checking = asyncio.get_running_loop().create_task(self._check())
        data: object = None
        try:
            data = await context.read()
            num_bytes = len(data) if isinstance(data, bytes) else 0
            self._note_delivered(arrival.peer, num_bytes)
            faded_bytes = int(self._expected_bytes * FADING)
            self._expected_bytes = max(num_bytes, faded_bytes, self._least_bytes)
            return data
        finally:
            self._waiting.discard(arrival)
            self._end_prompt(arrival)
            self._shares.give_back(arrival.holder, arrival.num_held)
            connection = self._connections.get(arrival.peer)
            if connection is not None:
                self._leave(connection, arrival, len(data) if isinstance(data, bytes) else 0)

    def _end_prompt(self, arrival: _Arrival) -> None:
        num_expected, arrival.num_expected = arrival.num_expected, 0
        if num_expected:
            self._prompt.release(arrival.holder, num_expected)

    def _leave(self, connection: _Connection, arrival: _Arrival, num_bytes: int) -> None:
        """A message that has come, with ``num_bytes``, or is not waited for any longer. Also one that came in
        time is part of what its connection has received."""
        connection.num_bytes -= num_bytes
        connection.arrivals.discard(arrival)
        self._give_back(connection, self._bytes_of(connection))
        if connection.arrivals:
            return
        del self._connections[arrival.peer]
        if not any(other.peer == arrival.peer for other in self._waiting):
            self._delivered[arrival.peer] = connection.received

    def _note_delivered(self, peer: str, num_bytes: int) -> None:
        """Adds to what the connection's messages had in all. The oldest of very many connections are
        forgotten: all that they received counts then."""
        self._delivered[peer] = self._delivered.pop(peer, 0) + num_bytes
        if len(self._delivered) > MAX_PEERS:
            del self._delivered[next(iter(self._delivered))]

    # -- late messages ---------------------------------------------------------------------------------

    async def _check(self) -> None:
        """Runs while messages are waited for."""
        try:
            while self._waiting:
                seen_before = list(self._waiting)
                await asyncio.sleep(CHECK_S)
                late = [arrival for arrival in seen_before if arrival in self._waiting]
                if late:
                    await self._count_late(late)
        finally:
            self._checking = None

    async def _count_late(self, late: list[_Arrival]) -> None:
        """Counts what has arrived of late messages. The look at the connections also gives the loop a turn,
        in which messages that are there leave."""
        received = await asyncio.to_thread(self._received, {arrival.peer for arrival in late})
        for arrival in late:
            if arrival not in self._waiting:
                continue
            peer, holder = arrival.peer, arrival.holder
            if peer in received:
                connection = self._connections.get(peer)
                if connection is None:
                    self._connections[peer] = connection = _Connection(holder, received[peer])
                    # Before it is late, too; nothing was delivered if another connection had this address.
                    held_bytes = received[peer] - self._delivered.get(peer, 0)
                    connection.num_bytes = received[peer] if held_bytes < 0 else held_bytes
                connection.arrivals.add(arrival)
                self._end_prompt(arrival)
            elif arrival.num_expected:
                self._end_prompt(arrival)
                if self._shares.take(holder, self._max_message_bytes):
                    arrival.num_held = self._max_message_bytes
                else:
                    self._refuse(arrival)
        for peer, num_bytes in received.items():
            counted = self._connections.get(peer)
            if counted is not None:
                counted.num_bytes += num_bytes - counted.received
                counted.received = num_bytes
        self._fit()

    def _fit(self) -> None:
        """Takes room for what late messages hold now, and ends those that have none. A caller's older
        connections come first, so that their messages arrive whole."""
        for connection in self._connections.values():
            self._give_back(connection, 0)
        for connection in self._connections.values():
            num_bytes = self._bytes_of(connection)
            if self._shares.take(connection.holder, num_bytes):
                connection.num_held = num_bytes
            else:
                for arrival in connection.arrivals:
                    self._refuse(arrival)

    def _give_back(self, connection: _Connection, num_kept: int) -> None:
        """Gives back what the connection holds above ``num_kept`` bytes."""
        num_more = max(0, connection.num_held - num_kept)
        connection.num_held -= num_more
        self._shares.give_back(connection.holder, num_more)

    def _bytes_of(self, connection: _Connection) -> int:
        """What the connection's late messages may hold: what it received, at most as many whole ones."""
        most = len(connection.arrivals) * self._max_message_bytes
        return min(most, max(0, connection.num_bytes))

    def _refuse(self, arrival: _Arrival) -> None:
        if arrival.refused is not None:  # its call ends already
            return
        arrival.refused = self._no_room(arrival.holder)
        arrival.limit.reschedule(asyncio.get_running_loop().time())

    def _no_room(self, holder: Holder) -> QueueFull:
        used, held, most = self._shares.num_used, self._shares.held_by(holder), self._shares.limit
        return QueueFull(
            f"messages that are still arriving hold {used} bytes, {held} of them this caller's; at most "
            f"{most} may be, and the last quarter is left to others",
            retry_after_ms=RETRY_AFTER_MS,
            held_bytes=used,
            own_bytes=held,
            max_bytes=most,
        )


class KernelCounts:
    """What connections have received, by the kernel's count. Knows their descriptors from one look at all."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def __call__(self, peers: Collection[str]) -> dict[str, int]:
        """The bytes by peer, of TCP connections that are open."""
        if not all(map(self._is_known, filter(is_tcp, peers))):
            self._descriptors = {each.peer: each.descriptor for each in open_connections()}
        found = {peer: received_bytes(self._descriptors[peer]) for peer in filter(self._is_known, peers)}
        return {peer: num_bytes for peer, num_bytes in found.items() if num_bytes is not None}

    def _is_known(self, peer: str) -> bool:
        descriptor = self._descriptors.get(peer)
        if descriptor is None:
            return False
        connection = connection_of(descriptor)
        return connection is not None and connection.peer == peer
