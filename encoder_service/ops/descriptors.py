"""The process's file descriptors: how many there may be, and listening when there are none left."""

from __future__ import annotations

import resource
import socket
import time
from typing import Any

import structlog

log = structlog.get_logger(__name__)

# Some libraries walk through all possible descriptors, so not more than this.
MOST = 1 << 20
# Shorter than asyncio's own pause, after which it tries again.
PAUSE_S = 0.5


def raise_limit() -> int:
    """Raises the soft limit on descriptors to the hard one, and returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # the host allows a process less than its limit says
            log.warning("the limit on descriptors stays", limit=soft, hard_limit=hard, cause=str(error))
        else:
            soft = wanted
    return MOST if soft == resource.RLIM_INFINITY else soft


class Listener(socket.socket):
    """A listening socket for asyncio, whose loop goes on accepting after a failure, with a line and a timer
    for each connection that waits. Here a failure ends that, until the pause is over."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._failed_s = -PAUSE_S

    def accept(self) -> tuple[socket.socket, Any]:
        if time.monotonic() - self._failed_s < PAUSE_S:
            raise BlockingIOError  # the loop comes back while a connection waits
        try:
            return super().accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            raise
        except OSError:
            self._failed_s = time.monotonic()
            raise
