"""Wakes a thread that waits in ``poll``: an eventfd, which its owner may close while others still wake it."""

from __future__ import annotations

import contextlib
import os
import select
import threading

__all__ = ["WakeUp"]


class WakeUp:
    """``register`` on the thread that waits; ``wake`` on any. Without a descriptor to be had, and after
    ``close``, nobody is woken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        self.abandon_in_child()

    def register(self, poll: select.poll) -> None:
        if self._fd >= 0:
            poll.register(self._fd, select.POLLIN)

    def wake(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def was_woken(self, happened: dict[int, int]) -> bool:
        """happened: what ``poll`` gave. Once for all that woke it until now."""
        if self._fd not in happened:
            return False
        os.eventfd_read(self._fd)
        return True

    def close(self) -> None:
        """Twice is once."""
        with self._lock:
            self.abandon_in_child()

    def abandon_in_child(self) -> None:
        """``close`` in a forked child, where the lock may be held for ever."""
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)
