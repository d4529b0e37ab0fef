"""One call of the service without gRPC: what it sends, what becomes of its connection, how it ends.

Owns the rules of a call whose connection breaks, and calls of threads; those of loops are ``local_loop``'s.
Connections are ``local_calls``', bytes ``local_frames``'.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, cast

import grpc

from lm_adapter.transport.local_frames import PREAMBLE, LocalAnswer, Metadata, head_of

if TYPE_CHECKING:
    import asyncio

    from lm_adapter.transport.local_calls import Connection, LocalCalls

__all__ = ["RECEIVE_BYTES", "Call", "LocalCall"]

MAX_TIMEOUT_S = 1e9
"""What is asked for beyond it is as good as for ever, and fits into no frame."""
RECEIVE_BYTES = 1 << 16
JOINED_BYTES = 1 << 17
"""A request up to this goes out in one piece with its head, for the price of a copy."""


class Call:
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
        self._answer: LocalAnswer
        self._is_sent = False
        self._is_unread = False
        self._why = "the encoder closed it"
        timeout_s = min(timeout_s, MAX_TIMEOUT_S)
        self._ends_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._head, self._request = head_of(method, metadata, timeout_s, len(request)), request

    def connects(self, path: str, loop: asyncio.AbstractEventLoop | None = None) -> bool:
        """Whether there is a connection to be had, by this loop where one is given. Once, before all
        else."""
        self._connection = self._calls.take(path, loop)
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


class LocalCall(Call):
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
