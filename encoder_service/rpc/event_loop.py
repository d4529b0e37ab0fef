"""The service's event loop: asyncio's own, with fewer turns for gRPC.

gRPC's poller, a thread, writes a byte to a socket for each completion. Its reader on the loop handles all
completions that are there, but takes one byte, so that the loop makes a turn for each completion, five for a
call, however many calls wait. In each turn it gives the interpreter's lock away. Here the reader takes all
bytes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, TypeVarTuple, Unpack

Arguments = TypeVarTuple("Arguments")

MAX_BYTES = 4096


class ServiceLoop(asyncio.SelectorEventLoop):
    """Run it with ``asyncio.Runner(loop_factory=ServiceLoop)``."""

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
