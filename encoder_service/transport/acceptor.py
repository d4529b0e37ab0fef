"""Takes waiting connections off the broker's listening socket, also when descriptors run out.

Owns the listening socket's place in the selector and a reserve descriptor. A listening socket with clients
in its queue stays readable when accept fails: accepting pauses then, instead of being tried in a busy loop.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterator

import structlog

from encoder_service.transport.broker_options import BrokerCounters
from encoder_service.transport.socket_file import ListeningSocket

log = structlog.get_logger(__name__)

ACCEPTS_AT_ONCE = 64
PAUSE_S = 0.1


class Acceptor:
    """Used by the broker's thread only, but for ``close``."""

    def __init__(
        self, listener: ListeningSocket, selector: selectors.BaseSelector, counters: BrokerCounters
    ) -> None:
        self._listener = listener
        self._selector = selector
        self._counters = counters
        self._reserve = _open_reserve()
        self._again_s: float | None = None
        selector.register(listener.socket, selectors.EVENT_READ)

    @property
    def is_paused(self) -> bool:
        return self._again_s is not None

    def waiting(self, now_s: float) -> Iterator[socket.socket]:
        """Connections that wait, a bounded number of them; the caller's to close."""
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                accepted, _ = self._listener.socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._turn_one_away(error, now_s)
                return
            yield accepted

    def resume(self, now_s: float) -> None:
        """Ends a pause that is over."""
        if self._again_s is None or now_s < self._again_s:
            return
        if self._reserve < 0:
            self._reserve = _open_reserve()
        self._again_s = None
        self._selector.register(self._listener.socket, selectors.EVENT_READ)

    def close(self) -> None:
        """Nobody is accepted any more; the socket's file goes."""
        if self._listener.socket.fileno() >= 0 and self._again_s is None:
            self._selector.unregister(self._listener.socket)
        self._again_s = None
        self._listener.close()
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1

    def _turn_one_away(self, error: OSError, now_s: float) -> None:
        """No descriptor is left (or no memory). The reserve makes room for closing one waiting client, which
        learns of it so. Another thread may take the room first: nothing is lost then but the reserve, which
        is opened again after the pause."""
        self._counters.accept_failures += 1
        log.warning("a client is turned away", cause=error.strerror, pause_s=PAUSE_S)
        if self._reserve >= 0:
            os.close(self._reserve)
            try:
                self._listener.socket.accept()[0].close()
            except OSError as again:
                log.debug("the reserve did not help", cause=again.strerror)
            self._reserve = _open_reserve()
        self._selector.unregister(self._listener.socket)
        self._again_s = now_s + PAUSE_S


def _open_reserve() -> int:
    """A descriptor to give up when there is no other; -1 when there is none now either."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
