"""The end of a device mapping: after the reads through it, and again later where the driver refuses.

Owns what has to be waited for before memory is unmapped, since unmapping waits for nothing and a kernel that
still read would fault. Copies that nobody waited for are waited for by their events. The whole device is
waited for only where reads may be under way that no event stands for: a view that outlived its mapping's
close, rows that were borrowed and forgotten. Waiting for a device fails while any of its streams captures a
graph, and may spoil the capture; waiting for events does neither.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_adapter.transport.device_lease import Event

__all__ = ["Unmapping", "num_waiting"]

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
MAX_ATTEMPTS = 20

_log = logging.getLogger(__name__)


class Unmapping:
    """Called once, by a finalizer, on any thread; never raises. steps: what ends the mapping, in this order;
    one that has succeeded is not taken again."""

    def __init__(self, wait_for_device: Callable[[], None], steps: tuple[Callable[[], None], ...]) -> None:
        self.done = False
        self._wait_for_device = wait_for_device
        self._left = deque(steps)
        self._events: deque[Event] = deque()
        self._unknown_reads = False
        self._pid = os.getpid()

    def wait_for(self, event: Event | None) -> None:
        """Before the memory goes: a copy that its reader gave up; None for reads without an event."""
        if event is None:
            self._unknown_reads = True
        else:
            self._events.append(event)

    def __call__(self) -> None:
        if os.getpid() != self._pid:
            return  # the parent's
        try:
            self.attempt()
        except Exception as error:
            _log.info("device memory stays mapped for now: %s", error)
            _try_later(self)

    def attempt(self) -> None:
        """Raises what the driver refuses with."""
        while self._events:
            self._events[0].synchronize()
            self._events.popleft()
        if self._unknown_reads:
            self._wait_for_device()
            self._unknown_reads = False
        while self._left:
            self._left[0]()
            self._left.popleft()
        self.done = True


def num_waiting() -> int:
    """Mappings whose end was refused and is tried again."""
    return len(_waiting)


_waiting: deque[Unmapping] = deque()
# Held by the thread that tries again, for as long as it runs.
_trying = threading.Lock()


def _try_later(unmapping: Unmapping) -> None:
    _waiting.append(unmapping)
    if _trying.acquire(blocking=False):
        thread = threading.Thread(target=_try_again, name="device-unmapping", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, and the mapping with it
            _trying.release()


def _try_again(pause: Callable[[float], Any] | None = None) -> None:
    """Until none waits, or each was refused MAX_ATTEMPTS times; then the process keeps its mapping."""
    wait = pause or threading.Event().wait
    pause_s, num_attempts = FIRST_PAUSE_S, 0
    try:
        while _waiting and num_attempts < MAX_ATTEMPTS:
            wait(pause_s)
            pause_s, num_attempts = min(2 * pause_s, MAX_PAUSE_S), num_attempts + 1
            for _ in range(len(_waiting)):
                unmapping = _waiting.popleft()
                try:
                    unmapping.attempt()
                except Exception as error:
                    _waiting.append(unmapping)
                    if num_attempts == MAX_ATTEMPTS:
                        _log.warning("device memory stays mapped: %s", error)
    finally:
        _trying.release()


def _forget_in_child() -> None:
    """What the parent mapped is the parent's to end."""
    global _trying
    _trying = threading.Lock()
    _waiting.clear()


os.register_at_fork(after_in_child=_forget_in_child)
