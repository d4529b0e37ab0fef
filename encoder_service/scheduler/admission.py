"""Admission: bounds on queued patches and bytes, and on unread rows.

Owns these counters and the advice to refused callers when to retry. Fails fast instead of letting callers
pile up. Not thread-safe: used from the event loop only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from encoder_service.errors import QueueFull

# Advice before anything was measured, and the bounds of measured advice: below, retries only add load; above,
# the service could be idle while its callers wait.
RETRY_AFTER_MS = 200
MIN_RETRY_AFTER_MS = 50
MAX_RETRY_AFTER_MS = 5_000
# Time constant of the pace.
PACE_S = 5.0


class Pace:
    """How fast room becomes free: an exponential average over ``PACE_S``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._amount = 0.0
        self._noted_s: float | None = None

    def note(self, amount: float) -> None:
        """``amount`` became free now."""
        self._amount = self._faded() + amount
        self._noted_s = self._clock()

    def retry_after_ms(self, needed: float) -> int:
        """How long until ``needed`` more will be free, within the bounds of advice."""
        if self._noted_s is None:
            return RETRY_AFTER_MS
        per_s = self._faded() / PACE_S
        wait_ms = needed / per_s * 1e3 if per_s > 0 else math.inf
        return int(min(MAX_RETRY_AFTER_MS, max(MIN_RETRY_AFTER_MS, wait_ms)))

    def _faded(self) -> float:
        if self._noted_s is None:
            return 0.0
        return self._amount * math.exp((self._noted_s - self._clock()) / PACE_S)


class Permit:
    """One item's share of the bounds. Grows once its patches are known; given back exactly once."""

    def __init__(self, admission: Admission, num_bytes: int) -> None:
        self._admission = admission
        self.num_bytes = num_bytes
        self.num_patches = 0
        self._released = False

    def add_patches(self, num_patches: int) -> None:
        """Takes room for the item's patches. Raises QueueFull; the bytes stay held until ``release``."""
        self._admission._take_patches(num_patches)
        self.num_patches += num_patches

    def add_bytes(self, num_bytes: int) -> None:
        """Takes room for content that is still arriving. Raises QueueFull; what is held stays so."""
        self._admission._take_bytes(num_bytes)
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Gives everything back; a second call does nothing."""
        if not self._released:
            self._released = True
            self._admission._give_back(self.num_patches, self.num_bytes)


class UnreadBytes:
    """Bytes of encoded rows that some caller has not read yet: what slow readers keep in memory beside the
    store. Rows that several callers wait for count once.

    max_bytes: at this many no new encode starts; those that were admitted continue.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._num_readers: dict[int, int] = {}

    def add(self, rows: object, num_bytes: int) -> None:
        """One more caller holds ``rows`` until ``remove``."""
        readers = self._num_readers.get(id(rows), 0)
        self._num_readers[id(rows)] = readers + 1
        if not readers:
            self.num_bytes += num_bytes

    def remove(self, rows: object, num_bytes: int) -> None:
        """A caller has read ``rows``, or has left."""
        self._num_readers[id(rows)] -= 1
        if not self._num_readers[id(rows)]:
            del self._num_readers[id(rows)]
            self.num_bytes -= num_bytes

    def check_room(self) -> None:
        """Raises QueueFull with both numbers while too much is unread."""
        if self.num_bytes >= self.max_bytes:
            raise QueueFull(
                f"{self.num_bytes} bytes of rows wait to be read, at most {self.max_bytes} may",
                retry_after_ms=RETRY_AFTER_MS,
                undelivered_bytes=self.num_bytes,
                max_bytes=self.max_bytes,
            )


class Admission:
    """Bounds on admitted, unfinished work."""

    def __init__(self, max_patches: int, max_bytes: int, clock: Callable[[], float] | None = None) -> None:
        """clock: monotonic seconds, for advice by the pace of the last seconds; None: fixed advice."""
        self.max_patches = max_patches
        self.max_bytes = max_bytes
        self.num_patches = 0
        self.num_bytes = 0
        self._patches_pace = None if clock is None else Pace(clock)
        self._bytes_pace = None if clock is None else Pace(clock)

    def acquire(self, num_bytes: int) -> Permit:
        """A permit for an item whose content holds ``num_bytes``. Raises QueueFull with both numbers."""
        self._take_bytes(num_bytes)
        return Permit(self, num_bytes)

    def _take_bytes(self, num_bytes: int) -> None:
        excess = self.num_bytes + num_bytes - self.max_bytes
        if excess > 0:
            raise QueueFull(
                f"queue holds {self.num_bytes} content bytes of {self.max_bytes}, the item needs {num_bytes}",
                retry_after_ms=advice_ms(self._bytes_pace, excess),
                held_bytes=self.num_bytes,
                needed_bytes=num_bytes,
                max_bytes=self.max_bytes,
            )
        self.num_bytes += num_bytes

    def _take_patches(self, num_patches: int) -> None:
        excess = self.num_patches + num_patches - self.max_patches
        if excess > 0:
            raise QueueFull(
                f"queue holds {self.num_patches} patches of {self.max_patches}, the item needs {num_patches}",
                retry_after_ms=advice_ms(self._patches_pace, excess),
                held_patches=self.num_patches,
                needed_patches=num_patches,
                max_patches=self.max_patches,
            )
        self.num_patches += num_patches

    def _give_back(self, num_patches: int, num_bytes: int) -> None:
        self.num_patches -= num_patches
        self.num_bytes -= num_bytes
        assert self.num_patches >= 0
        assert self.num_bytes >= 0
        for pace, amount in ((self._patches_pace, num_patches), (self._bytes_pace, num_bytes)):
            if pace is not None and amount:
                pace.note(amount)


def advice_ms(pace: Pace | None, needed: float) -> int:
    """When to retry, by a pace or without one."""
    return RETRY_AFTER_MS if pace is None else pace.retry_after_ms(needed)
