"""The service's event loop: asyncio's own, with fewer turns for gRPC and a measure of its idle time.

gRPC's poller, a thread, writes a byte to a socket for each completion. Its reader on the loop handles all
completions that are there, but takes one byte, so that the loop makes a turn for each completion, five for a
call, however many calls wait. In each turn it gives the interpreter's lock away. Here the reader takes all
bytes. ``accepting`` lets a turn have more than one new call.

How busy the loop is shows neither in its thread's CPU time (the thread also waits for the interpreter's lock,
with work before it) nor in a late timer (which passes calls that wait). The selector measures it: the time in
which there was no work.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVarTuple, Unpack

Arguments = TypeVarTuple("Arguments")

MAX_BYTES = 4096


class IdleSelector(selectors.DefaultSelector):
    """idle_s: how long it has waited while nothing was ready. A wait ends when the thread has the
    interpreter's lock again, so the time for which others hold the lock then counts as idle; what is ready at
    the first question, as on a loop at its limit, costs no idle time."""

    idle_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        from_s = time.monotonic()
        ready = super().select(timeout)
        self.idle_s += time.monotonic() - from_s
        return ready


class ServiceLoop(asyncio.SelectorEventLoop):
    """Run it with ``asyncio.Runner(loop_factory=ServiceLoop)``. idle_s: seconds without work since its
    start; read it on the loop."""

    def __init__(self, selector: IdleSelector | None = None) -> None:
        self._idle = selector or IdleSelector()
        super().__init__(self._idle)

    @property
    def idle_s(self) -> float:
        return self._idle.idle_s

    def add_reader(self, fd: Any, callback: Callable[[Unpack[Arguments]], Any], *args: *Arguments) -> None:
        # The name in gRPC's Cython source. Where it changes, gRPC's reader takes a byte a turn as before, and
        # tests/unit/rpc/test_event_loop.py fails.
        if isinstance(fd, socket.socket) and "PollerCompletionQueue._handle_events" in repr(callback):
            callback = takes_all(fd, callback)
        super().add_reader(fd, callback, *args)


def takes_all(
    wakeups: socket.socket, handle: Callable[[Unpack[Arguments]], Any]
) -> Callable[[Unpack[Arguments]], None]:
    """The reader, once all bytes but the one that it takes itself are gone. None is missed: a completion is
    in the queue before its byte is written, and ``handle`` empties the queue. No other loop of the process
    may run gRPC's asyncio side, because the socket and the queue are the process's."""

    def take(*args: *Arguments) -> None:
        num_bytes = len(wakeups.recv(MAX_BYTES, socket.MSG_PEEK))
        if num_bytes > 1:
            wakeups.recv(num_bytes - 1)
        handle(*args)

    return take
