"""Calls of the service without gRPC, over a unix socket beside the broker's, from threads and from loops.

Owns one client's connections there: each carries one call at a time and is kept for the next. On cores that
sleep, a call by gRPC wakes six to eight threads of two processes one after the other, and this one two. What
is called and what comes back are the same; a call that cannot go this way goes by gRPC, and a call that was
begun here fails as it would have there. One call is ``local_call``'s, on a loop ``local_loop``'s.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from lm_adapter.transport.local_call import LocalCall
from lm_adapter.transport.local_frames import Metadata
from lm_adapter.transport.local_loop import LoopCall, LoopReading

__all__ = ["Connection", "LocalCalls"]

MAX_IDLE = 64
"""Connections that are kept for later calls."""
MAX_IN_USE = 256
"""Calls at a time; others go by gRPC, which needs no connection for each."""
PAUSE_S = 1.0
"""After a connection that could not be made, before the next is tried."""


class LocalCalls:
    """One client's connections. Thread-safe; ``begin`` and ``begin_on_loop`` not both."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._in_use: set[Connection] = set()
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
        loop = asyncio.get_running_loop()
        return call if call.connects(path, loop) else otherwise(timeout_s)

    def close(self) -> None:
        """Ends calls in progress, as a connection that breaks does. Twice is once."""
        if self._pid != os.getpid():
            self._forget_in_child()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._in_use:
                _shut_down(connection.socket)
        for connection in idle:
            connection.close()

    # -- for calls -------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._closed

    def take(self, path: str, loop: asyncio.AbstractEventLoop | None = None) -> Connection | None:
        """A connection of nobody else's, for a call, on this loop where one is given; None where there is
        none to be had."""
        if self._pid != os.getpid():
            self._forget_in_child()
        with self._lock:
            if self._closed:
                return None
            while self._idle:
                found = self._idle.pop()
                if found.path == path and found.is_for(loop) and _is_quiet(found.socket):
                    self._in_use.add(found)
                    return found
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
            connection = Connection(path, made)
            self._in_use.add(connection)
        return connection

    def pause(self) -> None:
        """A new connection was not to be had."""
        self._not_before_s = self._clock() + PAUSE_S

    def give_back(self, connection: Connection, *, reusable: bool) -> None:
        """reusable: its call has ended. Else the encoder learns that its caller has left."""
        if self._pid != os.getpid():
            self._forget_in_child()
        with self._lock:
            was_ours = connection in self._in_use  # not a parent's
            self._in_use.discard(connection)
            if reusable and was_ours and not self._closed and len(self._idle) < MAX_IDLE:
                connection.is_new = False
                self._idle.append(connection)
                return
        if was_ours:
            _shut_down(connection.socket)  # a forked child may hold it too
            connection.close()
        else:
            connection.socket.close()

    def _forget_in_child(self) -> None:
        """After a fork: the connections are the parent's, which may be in the middle of a call."""
        self._lock = threading.Lock()
        for inherited in self._idle:
            inherited.socket.close()  # no word to its loop, which is the parent's
        self._idle, self._in_use, self._pid = [], set(), os.getpid()


class Connection:
    """One call's at a time."""

    def __init__(self, path: str, made: socket.socket) -> None:
        self.path, self.socket = path, made
        self.is_new = True
        """No call has gone over it yet, not even the preamble."""
        self.reading: LoopReading | None = None
        """By the loop whose calls it has carried."""

    def is_for(self, loop: asyncio.AbstractEventLoop | None) -> bool:
        """Whether no other loop looks at it."""
        reading = self.reading
        if reading is None or reading.loop is loop:
            return True
        if not reading.loop.is_closed():
            return False
        reading.let_be()
        self.reading = None
        return True

    def close(self) -> None:
        """On any thread."""
        if self.reading is None:
            self.socket.close()
        else:
            self.reading.close()


def _is_quiet(connection: socket.socket) -> bool:
    """Whether an idle connection is as it was left: the encoder has neither closed it nor said a word."""
    if connection.gettimeout() != 0.0:
        connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # closed by the other side, or not connected any more
