"""Calls of the service without gRPC, over a unix socket beside the broker's, from threads and from loops.

Owns one client's connections there: each carries one call at a time and is kept for the next. On cores that
sleep, a call by gRPC wakes six to eight threads of two processes one after the other, and this one two. What
is called and what comes back are the same; a call that cannot go this way goes by gRPC, and a call that was
begun here fails as it would have there.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Self, cast

import grpc

from lm_adapter.transport.local_frames import PREAMBLE, LocalAnswer, Metadata, head_of

__all__ = ["LocalCall", "LocalCalls", "LoopCall"]

MAX_IDLE = 64
"""Connections that are kept for later calls."""
MAX_IN_USE = 256
"""Calls at a time; others go by gRPC, which needs no connection for each."""
PAUSE_S = 1.0
"""After a connection that could not be made, before the next is tried."""
MAX_TIMEOUT_S = 1e9
"""What is asked for beyond it is as good as for ever, and fits into no frame."""
RECEIVE_BYTES = 1 << 16
JOINED_BYTES = 1 << 17
"""A request up to this goes out in one piece with its head, for the price of a copy."""


class LocalCalls:
    """One client's connections. Thread-safe; ``begin`` and ``begin_on_loop`` not both."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[tuple[str, socket.socket]] = []
        self._in_use: set[socket.socket] = set()
        self._not_before_s = float("-inf")
        self._pid = os.getpid()
        self._closed = False

    def begin(
        self,
        path: str,
        method: str,
        request: bytes,
        timeout_s: float,
        metadata: Metadata,
        otherwise: Callable[[float], Any],
    ) -> Any:
        """The stream of a call's answer. path: of the socket; empty for none. otherwise: begins the same call
        over gRPC, for the seconds that are left, where it cannot go this way; may be called by the stream."""
        if not path:
            return otherwise(timeout_s)
        call = LocalCall(self, method, request, timeout_s, metadata, otherwise)
        return call if call.connects(path) else otherwise(timeout_s)

    def begin_on_loop(
        self,
        path: str,
        method: str,
        request: bytes,
        timeout_s: float,
        metadata: Metadata,
        otherwise: Callable[[float], Any],
    ) -> Any:
        """``begin`` on an event loop."""
        if not path:
            return otherwise(timeout_s)
        call = LoopCall(self, method, request, timeout_s, metadata, otherwise)
        return call if call.connects(path) else otherwise(timeout_s)

    def close(self) -> None:
        """Ends calls in progress, as a connection that breaks does. Twice is once."""
        if self._pid != os.getpid():
            self._forget_in_child()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._in_use:
                _shut_down(connection)
        for _, connection in idle:
            connection.close()

    # -- for calls -------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._closed

    def take(self, path: str) -> Connection | None:
        """A connection of nobody else's, for a call; None where there is none to be had."""
        if self._pid != os.getpid():
            self._forget_in_child()
        with self._lock:
            if self._closed:
                return None
            while self._idle:
                known_path, found = self._idle.pop()
                if known_path == path and _is_quiet(found):
                    self._in_use.add(found)
                    return Connection(path, found, is_new=False)
                found.close()
            if len(self._in_use) >= MAX_IN_USE:
                return None
        return self.connect(path)

    def connect(self, path: str) -> Connection | None:
        """A new one; None where there is none to be had."""
        if self._clock() < self._not_before_s:
            return None
        made: socket.socket | None = None
        try:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.setblocking(False)
            made.connect(path)
        except OSError:  # not there, nobody listens, too many wait to be taken, no descriptor is left
            if made is not None:
                made.close()
            self.pause()
            return None
        with self._lock:
            if self._closed or len(self._in_use) >= MAX_IN_USE:  # other threads connect meanwhile
                made.close()
                return None
            self._in_use.add(made)
        return Connection(path, made, is_new=True)

    def pause(self) -> None:
        """A new connection was not to be had."""
        self._not_before_s = self._clock() + PAUSE_S

    def give_back(self, connection: Connection, *, reusable: bool) -> None:
        """reusable: its call has ended. Else the encoder learns that its caller has left."""
        if self._pid != os.getpid():
            self._forget_in_child()
        with self._lock:
            was_ours = connection.socket in self._in_use  # not a parent's
            self._in_use.discard(connection.socket)
            if reusable and was_ours and not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append((connection.path, connection.socket))
                return
        if was_ours:
            _shut_down(connection.socket)  # a forked child may hold it too
        connection.socket.close()

    def _forget_in_child(self) -> None:
        """After a fork: the connections are the parent's, which may be in the middle of a call."""
        self._lock = threading.Lock()
        for _, inherited in self._idle:
            inherited.close()
        self._idle, self._in_use, self._pid = [], set(), os.getpid()


class Connection:
    """One call's. is_new: no call has gone over it yet, not even the preamble."""

    def __init__(self, path: str, made: socket.socket, *, is_new: bool) -> None:
        self.path, self.socket, self.is_new = path, made, is_new


class _Call:
    """What both kinds share: the request, the answer so far, and the connection until it is given back."""

    def __init__(
        self,
        calls: LocalCalls,
        method: str,
        request: bytes,
        timeout_s: float,
        metadata: Metadata,
        otherwise: Callable[[float], Any],
    ) -> None:
        self._calls = calls
        self._connection: Connection | None = None
        self._otherwise = otherwise
        self._instead: Any = None
        self._answer = LocalAnswer(is_greeted=False)
        self._is_sent = False
        self._is_unread = False
        self._why = "the encoder closed it"
        timeout_s = min(timeout_s, MAX_TIMEOUT_S)
        self._ends_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._head, self._request = head_of(method, metadata, timeout_s, len(request)), request

    def connects(self, path: str) -> bool:
        """Whether there is a connection to be had. Once, before all else."""
        self._connection = self._calls.take(path)
        if self._connection is None:
            return False
        self._answer = LocalAnswer(is_greeted=not self._connection.is_new)
        return True

    def cancel(self) -> None:
        """Gives the connection back where the call has ended, else gives it up. Twice is once. For whoever
        reads the answer, not for another thread meanwhile."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._calls.give_back(connection, reusable=self._answer.has_ended)
        if self._instead is not None:
            self._instead.cancel()

    def _connected(self) -> Connection:
        if self._connection is None:
            raise self._answer.cut_off("the call was given up")
        return self._connection

    def _unsent(self, connection: Connection) -> list[bytes]:
        """What to send, once."""
        if self._is_sent:
            return []
        self._is_sent = True
        head = PREAMBLE + self._head if connection.is_new else self._head
        if len(self._request) <= JOINED_BYTES:
            return [head + self._request]
        return [head, self._request]

    def _take(self, data: bytes) -> None:
        """Of the answer; none when the connection has ended. One that was kept, and that the encoder closed
        with a part of the request unread, is replaced; one that it did not take is gRPC's business. Raises
        LocalError, also for a call of which the encoder may have done something."""
        answer, connection = self._answer, self._connected()
        if data:
            answer.feed(data)
            return
        is_taken = answer.is_greeted and (connection.is_new or not answer.is_empty or not self._is_unread)
        if is_taken or self._calls.is_closed:
            raise answer.cut_off(self._why)
        self._connection = None
        self._calls.give_back(connection, reusable=False)
        if connection.is_new:
            self._calls.pause()
        else:
            self._connection = self._calls.connect(connection.path)
            self._is_sent = self._is_unread = False
            self._answer = LocalAnswer(is_greeted=False)
        if self._connection is None:
            self._instead = self._otherwise(self._left_s())

    def _broke(self, error: ConnectionError) -> None:
        """The kernel says so where the encoder's end was closed before all of the request had been read."""
        self._is_unread = True
        self._why = error.strerror or self._why

    def _left_s(self) -> float:
        """Raises TimeoutError when there is none."""
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _too_late(self) -> grpc.RpcError:
        return self._answer.failed(grpc.StatusCode.DEADLINE_EXCEEDED, f"no end within {self._timeout_s:g} s")


class LocalCall(_Call):
    """From a thread: what ``grpc.Channel.unary_stream`` gives, so far as the client uses it."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        """Raises grpc.RpcError."""
        try:
            while (message := self._answer.message()) is None:
                if self._instead is not None:
                    return cast("bytes", next(self._instead))
                if self._answer.has_ended:
                    raise StopIteration
                self._take(self._exchange(self._connected()))
        except TimeoutError:
            raise self._too_late() from None
        return message

    def trailing_metadata(self) -> Any:
        """Names and values."""
        return self._answer.trailers if self._instead is None else self._instead.trailing_metadata()

    def _exchange(self, connection: Connection) -> bytes:
        """Some of the answer, empty when no more will come; the request is sent before. Raises
        TimeoutError."""
        try:
            for piece in self._unsent(connection):
                connection.socket.settimeout(self._left_s())
                connection.socket.sendall(piece)
        except ConnectionError as error:  # the encoder may have answered all the same
            self._broke(error)
        try:
            connection.socket.settimeout(self._left_s())
            return connection.socket.recv(RECEIVE_BYTES)
        except ConnectionError as error:
            self._broke(error)
            return b""


class LoopCall(_Call):
    """On an event loop: the same of ``grpc.aio.Channel.unary_stream``."""

    _events: AsyncIterator[bytes] | None = None

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
                async with asyncio.timeout(self._left_s()):
                    self._take(await self._exchange(self._connected()))
        except TimeoutError:
            raise self._too_late() from None
        return message

    async def trailing_metadata(self) -> Any:
        """Names and values."""
        if self._instead is None:
            return self._answer.trailers
        return await self._instead.trailing_metadata()

    async def _next_of_instead(self) -> bytes:
        if self._events is None:
            self._events = aiter(self._instead)
        return cast("bytes", await anext(self._events))

    async def _exchange(self, connection: Connection) -> bytes:
        """As ``LocalCall._exchange``."""
        loop = asyncio.get_running_loop()
        try:
            for piece in self._unsent(connection):
                await loop.sock_sendall(connection.socket, piece)
        except ConnectionError as error:
            self._broke(error)
        try:
            return await loop.sock_recv(connection.socket, RECEIVE_BYTES)
        except ConnectionError as error:
            self._broke(error)
            return b""


def _is_quiet(connection: socket.socket) -> bool:
    """Whether an idle connection is as it was left: the encoder has neither closed it nor said a word."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # closed by the other side, or not connected any more
