"""Counts the bytes of messages while they arrive.

gRPC hands over a message when all of it is there, so nothing sees its size before. A message that is not
whole after JUDGED_AFTER_S counts with the bytes that its connection has received since then, which the
kernel counts. Where it does not (unix sockets), the message counts as large as one may be. Messages that
arrive at once, nearly all, cost nothing here; they are counted when they are there.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from encoder_service.errors import DeadlineExceeded, QueueFull
from encoder_service.rpc.connections import open_connections
from encoder_service.scheduler.admission import Admission, Permit

Context = grpc.aio.ServicerContext[Any, Any]

# A message is late when it is seen at two checks in a row.
CHECK_S = 0.05
JUDGED_AFTER_S = 2 * CHECK_S
# tcpi_bytes_received in struct tcp_info of linux/tcp.h.
TCP_INFO, BYTES_RECEIVED_AT = 11, 128


@dataclass(eq=False)
class _Arrival:
    """A message that is not there yet. refused: why it is not waited for any longer."""

    peer: str
    limit: asyncio.Timeout
    refused: QueueFull | None = None


@dataclass
class _Late:
    """The late messages of a connection, or a single one where the kernel does not count. received: its count
    at the last check. num_bytes: received for them. permit: for what they hold."""

    received: int | None
    arrivals: set[_Arrival] = field(default_factory=set)
    num_bytes: int = 0
    permit: Permit | None = None


class Arrivals:
    """The messages of all calls of a server that are not there yet. Used on one event loop."""

    def __init__(
        self,
        admission: Admission,
        max_message_bytes: int,
        received: Callable[[Collection[str]], Mapping[Any, int]] | None = None,
    ) -> None:
        """admission: counts what has arrived. received: the bytes that connections have received, by peer;
        called on a thread."""
        self._admission = admission
        self._max_message_bytes = max_message_bytes
        self._received = received or received_bytes
        self._waiting: set[_Arrival] = set()
        # By peer; without the kernel's count by message.
        self._late: dict[str | _Arrival, _Late] = {}
        self._checking: asyncio.Task[None] | None = None

    async def read(self, context: Context, within_s: float) -> bytes | None:
        """A call's next message, which the caller has to count; None at the end of its messages. Raises
        QueueFull if it is late and there is no room for more bytes, and DeadlineExceeded."""
        arrival: _Arrival | None = None
        try:
            async with asyncio.timeout(within_s) as limit:
                arrival = _Arrival(context.peer(), limit)
                data = await self._wait(context, arrival)
        except TimeoutError:
            if arrival is not None and arrival.refused is not None:
                raise arrival.refused from None
            raise DeadlineExceeded(f"the request did not arrive within {within_s} s") from None
        return data if isinstance(data, bytes) else None

    async def _wait(self, context: Context, arrival: _Arrival) -> object:
        self._waiting.add(arrival)
        if self._checking is None:
            self._checking = asyncio.get_running_loop().create_task(self._check())
        data: object = None
        try:
            data = await context.read()
            return data
        finally:
            self._waiting.discard(arrival)
            if self._late:
                self._leave(arrival, len(data) if isinstance(data, bytes) else 0)

    def _leave(self, arrival: _Arrival, num_bytes: int) -> None:
        """A message that has come, with ``num_bytes``, or is not waited for any longer. Also one that came at
        once is part of what its connection has received."""
        key = arrival if arrival in self._late else arrival.peer
        late = self._late.get(key)
        if late is None:
            return
        late.num_bytes -= num_bytes
        late.arrivals.discard(arrival)
        self._count(late)
        if not late.arrivals:
            del self._late[key]

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

    async def _count_late(self, found: list[_Arrival]) -> None:
        """Counts what has arrived of late messages. The look at the connections also gives the loop a turn,
        in which messages that are there leave."""
        received = await asyncio.to_thread(self._received, {arrival.peer for arrival in found})
        changed: set[str | _Arrival] = set()
        for arrival in found:
            if arrival in self._waiting:
                peer = arrival.peer
                key = peer if peer in received or peer in self._late else arrival
                self._late.setdefault(key, _Late(received.get(peer))).arrivals.add(arrival)
                changed.add(key)
        for key in changed:
            late = self._late[key]
            if late.received is not None and key in received:
                late.num_bytes += received[key] - late.received
                late.received = received[key]
            self._count(late)

    def _count(self, late: _Late) -> None:
        """Takes room for what a connection's late messages hold now, or ends them."""
        num_bytes = len(late.arrivals) * self._max_message_bytes
        if late.received is not None:
            num_bytes = min(num_bytes, max(0, late.num_bytes))
        if late.permit is not None:
            late.permit.release()
            late.permit = None
        if not num_bytes:
            return
        try:
            late.permit = self._admission.acquire(num_bytes)
        except QueueFull as error:
            for arrival in late.arrivals:
                arrival.refused = QueueFull(
                    error.message, retry_after_ms=error.retry_after_ms, **error.details
                )
                arrival.limit.reschedule(asyncio.get_running_loop().time())
            late.arrivals.clear()


def received_bytes(peers: Collection[str]) -> dict[str, int]:
    """The bytes that the connections of these peers have received, as far as the kernel counts them."""
    found = {}
    for connection in open_connections():
        if connection.peer in peers:
            info = connection.option(TCP_INFO, BYTES_RECEIVED_AT + 8)
            if len(info) == BYTES_RECEIVED_AT + 8:
                found[connection.peer] = struct.unpack_from("=Q", info, BYTES_RECEIVED_AT)[0]
    return found
