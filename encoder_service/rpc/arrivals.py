"""Bounds the memory of messages that are still arriving.

gRPC hands over a message only when it is complete, and does not report its size before. So its size is first
estimated and then measured:

- A new message counts with an estimate: the largest size that is allowed at first, later the size of recent
  messages. If the limit has no room for the estimate, the message waits before gRPC receives it.
- A message that is not complete at the second check is late. Late messages count with the bytes that the
  kernel has received on their connection. On unix sockets, where the kernel has no such count, a late message
  counts with the largest size. If the limit has no room for it, its call ends with QueueFull.
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
# The estimate falls by this factor per message, but not below LEAST_EXPECTED_BYTES.
FADING = 0.8
LEAST_EXPECTED_BYTES = 1 << 16
# Number of connections whose delivered bytes are remembered.
MAX_PEERS = 4096


@dataclass(eq=False)
class _Arrival:
    """A message that is not complete yet. num_expected: bytes taken for its estimate, 0 once it is late.
    num_held: bytes taken for it once it is late, if the kernel does not count its connection. refused: the
    error with which its call ends."""

    peer: str
    holder: Holder
    limit: asyncio.Timeout
    num_expected: int = 0
    num_held: int = 0
    refused: QueueFull | None = None


@dataclass
class _Connection:
    """A connection with late messages. received: the kernel's count at the last check. num_bytes: the part of
    it that belongs to messages that are not complete. num_held: bytes taken of the limit."""

    holder: Holder
    received: int
    arrivals: set[_Arrival] = field(default_factory=set)
    num_bytes: int = 0
    num_held: int = 0


class Arrivals:
    """The incomplete messages of all calls of a server. Used on one event loop."""

    def __init__(
        self,
        max_bytes: int,
        max_message_bytes: int,
        received: Callable[[Collection[str]], Mapping[str, int]] | None = None,
    ) -> None:
        """max_bytes: limit on late messages, and a second limit of this size on the estimates of the others;
        both have a share for each holder. received: returns the bytes that connections have received, by
        peer; called on a worker thread."""
        self._estimates = WaitingShares(max_bytes)
        self._expected_bytes = max_message_bytes
        self._least_bytes = min(LEAST_EXPECTED_BYTES, max_message_bytes)
        self._shares = Shares(max_bytes)
        self._max_message_bytes = max_message_bytes
        self._received = received or KernelCounts()
        self._waiting: set[_Arrival] = set()
        self._connections: dict[str, _Connection] = {}
        self._delivered: dict[str, int] = {}
        """Bytes of complete messages, by peer."""
        self._checking: asyncio.Task[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of late messages."""
        return self._shares.num_used

    async def read(self, context: Context, holder: Holder, within_s: float) -> bytes | None:
        """A call's next message, or None after the last one. It is not counted any more when this returns.
        Raises QueueFull if it is late and the limit has no room for it, DeadlineExceeded after
        ``within_s``."""
        arrival: _Arrival | None = None
        try:
            async with asyncio.timeout(within_s) as limit:
                num_expected = await self._estimates.acquire(holder, self._expected_bytes)
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
            self._release_estimate(arrival)
            self._shares.give_back(arrival.holder, arrival.num_held)
            connection = self._connections.get(arrival.peer)
            if connection is not None:
                self._leave(connection, arrival, len(data) if isinstance(data, bytes) else 0)

    def _release_estimate(self, arrival: _Arrival) -> None:
        num_expected, arrival.num_expected = arrival.num_expected, 0
        if num_expected:
            self._estimates.release(arrival.holder, num_expected)

    def _leave(self, connection: _Connection, arrival: _Arrival, num_bytes: int) -> None:
        """Removes a message that is complete, with ``num_bytes``, or whose call ended. Messages that were
        complete in time are deducted too, because the kernel counted their bytes."""
        connection.num_bytes -= num_bytes
        connection.arrivals.discard(arrival)
        self._give_back(connection, self._bytes_of(connection))
        if connection.arrivals:
            return
        del self._connections[arrival.peer]
        if not any(other.peer == arrival.peer for other in self._waiting):
            self._remember(arrival.peer, connection.received)

    def _note_delivered(self, peer: str, num_bytes: int) -> None:
        """Adds to the bytes of the connection's complete messages."""
        self._remember(peer, self._delivered.get(peer, 0) + num_bytes)

    def _remember(self, peer: str, num_bytes: int) -> None:
        """Above MAX_PEERS the connection that was idle the longest is forgotten; if it has a late message
        again, all that it ever received counts."""
        self._delivered.pop(peer, None)
        self._delivered[peer] = num_bytes
        if len(self._delivered) > MAX_PEERS:
            del self._delivered[next(iter(self._delivered))]

    # -- late messages ---------------------------------------------------------------------------------

    async def _check(self) -> None:
        """Runs while any message is incomplete."""
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
        """Counts the bytes of late messages. While the thread reads the kernel's counts, the event loop hands
        over messages that have become complete."""
        received = await asyncio.to_thread(self._received, {arrival.peer for arrival in late})
        for arrival in late:
            if arrival not in self._waiting:
                continue
            peer, holder = arrival.peer, arrival.holder
            if peer in received:
                connection = self._connections.get(peer)
                if connection is None:
                    self._connections[peer] = connection = _Connection(holder, received[peer])
                    # Includes the bytes from before the message was late. If negative, the delivered
                    # bytes belong to an earlier connection from the same address and port.
                    num_pending = received[peer] - self._delivered.get(peer, 0)
                    connection.num_bytes = received[peer] if num_pending < 0 else num_pending
                connection.arrivals.add(arrival)
                self._release_estimate(arrival)
            elif arrival.num_expected:
                self._release_estimate(arrival)
                if self._shares.take(holder, self._max_message_bytes):
                    arrival.num_held = self._max_message_bytes
                else:
                    self._refuse(arrival)
        for peer, num_bytes in received.items():
            connection = self._connections.get(peer)
            if connection is not None:
                connection.num_bytes += num_bytes - connection.received
                connection.received = num_bytes
        self._take_shares()

    def _take_shares(self) -> None:
        """Takes the bytes of late messages from the limit again, and refuses those that do not fit. Older
        connections take first, so that some messages of a caller above its share still become complete."""
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
        """Gives back the bytes that the connection holds above ``num_kept``."""
        num_excess = max(0, connection.num_held - num_kept)
        connection.num_held -= num_excess
        self._shares.give_back(connection.holder, num_excess)

    def _bytes_of(self, connection: _Connection) -> int:
        """The bytes that the connection's late messages can hold: those received, up to the largest size for
        each message."""
        max_bytes = len(connection.arrivals) * self._max_message_bytes
        return min(max_bytes, max(0, connection.num_bytes))

    def _refuse(self, arrival: _Arrival) -> None:
        if arrival.refused is not None or arrival.limit.expired():  # its call ends already
            return
        arrival.refused = self._no_room(arrival.holder)
        arrival.limit.reschedule(asyncio.get_running_loop().time())  # ends ``read`` now

    def _no_room(self, holder: Holder) -> QueueFull:
        used, own, limit = self._shares.num_used, self._shares.held_by(holder), self._shares.limit
        return QueueFull(
            f"messages that are still arriving hold {used} bytes of {limit}, {own} of them this caller's; "
            "the last quarter is left to other callers",
            retry_after_ms=RETRY_AFTER_MS,
            held_bytes=used,
            own_bytes=own,
            max_bytes=limit,
        )


class KernelCounts:
    """The bytes that TCP connections have received, as the kernel counts them. Keeps their descriptors, and
    lists all descriptors of the process only for a peer that it does not know."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def __call__(self, peers: Collection[str]) -> dict[str, int]:
        """The bytes by peer, for the peers with an open TCP connection."""
        if not all(map(self._is_known, filter(is_tcp, peers))):
            self._descriptors = {connection.peer: connection.descriptor for connection in open_connections()}
        counts = {peer: received_bytes(self._descriptors[peer]) for peer in filter(self._is_known, peers)}
        return {peer: num_bytes for peer, num_bytes in counts.items() if num_bytes is not None}

    def _is_known(self, peer: str) -> bool:
        descriptor = self._descriptors.get(peer)
        if descriptor is None:
            return False
        connection = connection_of(descriptor)
        return connection is not None and connection.peer == peer
