"""The bytes that rows may take, and the queue of those that wait for them.

Owns the bound and the order of service. It does not know what the bytes are for. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

W = TypeVar("W")


class Room(Generic[W]):
    """At most ``max_bytes`` are taken at once. W: what waits.

    Waiters are served in the order in which they joined, so that small ones do not overtake a large one
    without end. One that needs more than the whole room gets its bytes in portions. From its first portion to
    its last it stays at the head of the queue, and nobody else is served: it never waits for others while it
    holds bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._waiters: deque[W] = deque()
        self._in_portions: W | None = None

    def try_take(self, num_bytes: int) -> bool:
        """Takes the bytes, if they are free."""
        if self.used_bytes + num_bytes > self.max_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Gives back bytes that were taken. Serves nobody: see ``serve``."""
        self.used_bytes -= num_bytes

    def can_begin(self, num_bytes: int) -> bool:
        """Whether a waiter that needs so many bytes may be served: all of them are free, or all of the
        room."""
        return not self.used_bytes or self.used_bytes + num_bytes <= self.max_bytes

    @property
    def waiters(self) -> list[W]:
        """In the order of service."""
        return list(self._waiters)

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiters)

    def is_in_portions(self, waiter: W) -> bool:
        """Whether the waiter has had some portion, but not its last."""
        return self._in_portions is waiter

    def join(self, waiter: W, *, goes_first: bool) -> bool:
        """Joins the end of the queue. goes_first: joins the front instead, behind one that is served in
        portions. Returns False, and changes nothing, if the waiter is in the queue already."""
        if waiter in self._waiters:
            return False
        front = int(self._in_portions is not None)
        self._waiters.insert(front if goes_first else len(self._waiters), waiter)
        return True

    def leave(self, waiter: W) -> None:
        """Leaves the queue, if it is in it. What it took stays taken."""
        if self._in_portions is waiter:
            self._in_portions = None
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def serve(self, needed_bytes: Callable[[W], int], take: Callable[[W], bool]) -> None:
        """Serves waiters until one has to wait.

        needed_bytes: how many bytes a waiter would take. take: takes as many as it can, and returns whether
        the waiter has all that it needs; it must not join, leave or serve."""
        while self._waiters:
            waiter = self._waiters[0]
            is_in_portions = self._in_portions is waiter
            if not is_in_portions and not self.can_begin(needed_bytes(waiter)):
                return
            if not take(waiter):
                self._in_portions = waiter
                return
            self._in_portions = None
            self._waiters.popleft()
