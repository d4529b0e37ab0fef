"""One call of the service without gRPC, on an event loop, and how a loop reads a connection.

Owns the loop's side of it: a connection stays known to its loop from call to call, so that a call costs no
word with the kernel but what it sends and what it receives. What comes while nobody waits for it stays where
it is until somebody does.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Self, cast

from lm_adapter.transport.local_call import RECEIVE_BYTES, Call

if TYPE_CHECKING:
    from lm_adapter.transport.local_calls import Connection

__all__ = ["LoopCall", "LoopReading"]


class LoopCall(Call):
    """What ``grpc.aio.Channel.unary_stream`` gives, so far as the client uses it."""

    _events: AsyncIterator[bytes] | None = None
    _timer: asyncio.TimerHandle | None = None
    _arriving: asyncio.Future[bytes] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Raises grpc.RpcError."""
        try:
            while (message := self._answer.message()) is None:
                if self._instead is not None:
                    return await self._next_of_instead()
                if self._answer.has_ended:
                    raise StopAsyncIteration
                self._take(await self._exchange(self._connected()))
        except TimeoutError:
            raise self._too_late() from None
        return message

    async def trailing_metadata(self) -> Any:
        """Names and values."""
        if self._instead is None:
            return self._answer.trailers
        return await self._instead.trailing_metadata()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().cancel()

    async def _next_of_instead(self) -> bytes:
        if self._events is None:
            self._events = aiter(self._instead)
        return cast("bytes", await anext(self._events))

    async def _exchange(self, connection: Connection) -> bytes:
        """As ``LocalCall._exchange``."""
        loop = asyncio.get_running_loop()
        left_s = self._left_s()
        try:
            if self._is_sent:
                return connection.socket.recv(RECEIVE_BYTES)  # what came while the last was looked at
            for piece in self._unsent(connection):
                num_sent = _sent_at_once(connection.socket, piece)
                if num_sent < len(piece):
                    async with asyncio.timeout(left_s):
                        await loop.sock_sendall(connection.socket, memoryview(piece)[num_sent:])
                    left_s = self._left_s()
        except BlockingIOError:
            pass
        except ConnectionError as error:  # the encoder may have answered all the same
            self._broke(error)
        if self._timer is None:
            self._timer = loop.call_at(loop.time() + left_s, self._expire)
        reading = connection.reading
        if reading is None:
            reading = connection.reading = LoopReading(loop, connection.socket)
        self._arriving = reading.arriving()
        try:
            return await self._arriving
        except ConnectionError as error:
            self._broke(error)
            return b""
        finally:  # no more of its error, whose traceback leads here
            self._arriving = None
            reading.rest()

    def _expire(self) -> None:
        self._timer = None  # timers of some loops are early: whoever waits again sets another
        if self._arriving is not None and not self._arriving.done():
            self._arriving.set_exception(TimeoutError())


class LoopReading:
    """One connection as its loop reads it, for one call after the other. On the loop's thread, but for
    ``close`` and ``let_be``. One that is forgotten closes its connection, although its loop knows it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        self.loop = loop
        self._socket = connection
        self._descriptor = connection.fileno()
        self._is_watched = False
        self._arriving: asyncio.Future[bytes] | None = None
        self._end = weakref.finalize(self, _end, loop, connection, self._descriptor, os.getpid())
        self._end.atexit = False

    def arriving(self) -> asyncio.Future[bytes]:
        """What comes next, empty at the end; ConnectionError where it breaks."""
        if not self._is_watched:
            self.loop.add_reader(self._descriptor, _readable, weakref.ref(self))
            self._is_watched = True
        self._arriving = self.loop.create_future()
        return self._arriving

    def rest(self) -> None:
        """Nobody waits."""
        self._arriving = None

    def close(self) -> None:
        """Closes the connection, on any thread."""
        self._end()

    def let_be(self) -> None:
        """The connection is another's business from now on."""
        self._end.detach()

    def take(self) -> None:
        """Something has come."""
        arriving = self._arriving
        if arriving is None or arriving.done():
            self.loop.remove_reader(self._descriptor)  # what is there is taken by whoever waits next
            self._is_watched = False
            return
        try:
            arriving.set_result(self._socket.recv(RECEIVE_BYTES))
        except BlockingIOError:
            return
        except OSError as error:
            arriving.set_exception(error)


def _readable(reference: weakref.ref[LoopReading]) -> None:
    reading = reference()
    if reading is not None:
        reading.take()


def _end(loop: asyncio.AbstractEventLoop, connection: socket.socket, descriptor: int, pid: int) -> None:
    """Closes a connection. Its loop lets go of it first, since a descriptor's number is soon another's; not
    the loop of a parent, of which a forked child has a copy."""
    if loop.is_closed() or os.getpid() != pid:
        connection.close()
    elif loop.is_running() and asyncio._get_running_loop() is not loop:
        try:
            loop.call_soon_threadsafe(_end, loop, connection, descriptor, pid)
        except RuntimeError:  # closed in this very moment
            connection.close()
    else:
        loop.remove_reader(descriptor)
        connection.close()


def _sent_at_once(connection: socket.socket, piece: bytes) -> int:
    """How much of it the kernel has taken. Raises ConnectionError."""
    try:
        return connection.send(piece)
    except BlockingIOError:
        return 0
