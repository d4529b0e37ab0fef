"""Admission: limits on queued patches and bytes, and on unread rows.

Owns these counters and the retry delay that refused callers are given. Refuses work at once instead of
letting callers wait. Not thread-safe: used from the event loop only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from encoder_service.errors import QueueFull

# The retry delay before anything was measured, and the limits of a measured delay. A shorter delay only adds
# load; with a longer one, the service could be idle while its callers wait.
RETRY_AFTER_MS = 200
MIN_RETRY_AFTER_MS = 50
MAX_RETRY_AFTER_MS = 5_000
# Time constant of the exponential average in ``Pace``.
PACE_S = 5.0


class Pace:
    """The rate at which capacity becomes free: an exponential average with time constant ``PACE_S``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._amount = 0.0
        self._noted_s: float | None = None

    def note(self, amount: float) -> None:
        """Records that ``amount`` became free now."""
        self._amount = self._faded() + amount
        self._noted_s = self._clock()

    def retry_after_ms(self, needed: float) -> int:
        """Milliseconds until ``needed`` more is expected to be free, within the limits of the delay."""
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
    """One item's share of the limits. It grows when the item's patches are known and is released once."""

    def __init__(self, admission: Admission, num_bytes: int) -> None:
        self._admission = admission
        self.num_bytes = num_bytes
        self.num_patches = 0
        self.num_squares = 0
        self._released = False

    def add_patches(self, num_patches: int, seqlen: int) -> None:
        """Takes room for the item's patches. seqlen: patches of an attention sequence. Raises QueueFull; the
        bytes then stay held until ``release``."""
        self._admission._take_patches(num_patches)
        self._admission.num_squares += num_patches * seqlen
        self.num_patches += num_patches
        self.num_squares += num_patches * seqlen

    def add_bytes(self, num_bytes: int) -> None:
        """Takes room for content that is still arriving. Raises QueueFull; bytes taken before stay held."""
        self._admission._take_bytes(num_bytes)
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Gives everything back. A second call does nothing."""
        if not self._released:
            self._released = True
            self._admission._give_back(self)


class UnreadBytes:
    """Bytes of encoded rows that some caller has not read yet. Slow readers keep them in memory in addition
    to the store. Rows that several callers wait for count once.

    max_bytes: no new encode starts at or above this limit; encodes that were admitted continue.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._num_readers: dict[int, int] = {}

    def add(self, rows: object, num_bytes: int) -> None:
        """Adds a caller that holds ``rows`` until ``remove``."""
        readers = self._num_readers.get(id(rows), 0)
        self._num_readers[id(rows)] = readers + 1
        if not readers:
            self.num_bytes += num_bytes

    def remove(self, rows: object, num_bytes: int) -> None:
        """Removes a caller that has read ``rows`` or has left."""
        self._num_readers[id(rows)] -= 1
        if not self._num_readers[id(rows)]:
            del self._num_readers[id(rows)]
            self.num_bytes -= num_bytes

    def check_room(self) -> None:
        """Raises QueueFull, with both numbers, while too much is unread."""
        if self.num_bytes >= self.max_bytes:
            raise QueueFull(
                f"{self.num_bytes} bytes of rows wait to be read, at most {self.max_bytes} may",
                retry_after_ms=RETRY_AFTER_MS,
                undelivered_bytes=self.num_bytes,
                max_bytes=self.max_bytes,
            )


class Admission:
    """The limits on work that is admitted and not finished."""

    def __init__(self, max_patches: int, max_bytes: int, clock: Callable[[], float] | None = None) -> None:
        """clock: monotonic seconds, for a retry delay from the measured rate; None for a fixed delay."""
        self.max_patches = max_patches
        self.max_bytes = max_bytes
        self.num_patches = 0
        self.num_bytes = 0
        self.num_squares = 0
        """Sum over the items of patches times patches of an attention sequence."""
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

    def _give_back(self, permit: Permit) -> None:
        self.num_patches -= permit.num_patches
        self.num_bytes -= permit.num_bytes
        self.num_squares -= permit.num_squares
        assert self.num_patches >= 0
        assert self.num_bytes >= 0
        for pace, amount in ((self._patches_pace, permit.num_patches), (self._bytes_pace, permit.num_bytes)):
            if pace is not None and amount:
                pace.note(amount)


def advice_ms(pace: Pace | None, needed: float) -> int:
    """The retry delay: measured, or fixed where there is no ``pace``."""
    return RETRY_AFTER_MS if pace is None else pace.retry_after_ms(needed)
