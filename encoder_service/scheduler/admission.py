"""Admission: limits on queued patches and bytes, and on undelivered rows, each with shares by caller.

Owns these counters and the retry delay of refused callers; ``ops.shares`` owns how a limit is
shared. Refuses work at once instead of letting callers wait. Not thread-safe: used from the event loop only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from encoder_service.errors import InvalidRequest, QueueFull
from encoder_service.ops.shares import RESERVED, WHOLE, Holder, Shares

# The retry delay before anything was measured, and the limits of a measured delay. A shorter delay only adds
# load; with a longer one, the service could be idle while its callers wait.
RETRY_AFTER_MS = 200
MIN_RETRY_AFTER_MS = 50
MAX_RETRY_AFTER_MS = 5_000
# Prefetches are admitted up to this share of the patches, so that calls whose callers wait find room.
PREFETCH_SHARE = 1 / 2
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
    """The part of the limits that a call's content, or an item, takes. It grows when an item's patches are
    known and is released once. What it takes stays counted until the permits within it are released too."""

    def __init__(
        self, admission: Admission, holder: Holder, num_bytes: int, within: Permit | None = None
    ) -> None:
        self._admission = admission
        self.holder = holder
        self.num_bytes = num_bytes
        self.num_patches = 0
        self.num_squares = 0
        self._released = False
        self._within = within
        self._num_users = 1
        """Itself until it is released, and the permits within it."""
        if within is not None:
            within._num_users += 1

    @property
    def is_counted(self) -> bool:
        return self._num_users > 0

    def add_patches(self, num_patches: int, seqlen: int, *, is_prefetch: bool = False) -> None:
        """Takes room for the item's patches. seqlen: patches of an attention sequence. is_prefetch: no
        caller waits for the item. Raises QueueFull; the bytes then stay held until ``release``."""
        self._admission._take_patches(self.holder, num_patches, is_prefetch=is_prefetch)
        self._admission.num_squares += num_patches * seqlen
        self.num_patches += num_patches
        self.num_squares += num_patches * seqlen

    def add_bytes(self, num_bytes: int) -> None:
        """Takes room for content that is still arriving. Raises QueueFull; bytes taken before stay held."""
        self._admission._take_bytes(self.holder, num_bytes)
        self.num_bytes += num_bytes

    def add_rows(self, num_bytes: int) -> None:
        """Takes room for rows that are held until the request ends. Raises InvalidRequest if the request
        alone exceeds the limit, QueueFull if other requests leave too little of it."""
        needed, limit = self.num_bytes + num_bytes, self._admission.max_bytes
        if needed > limit:
            raise InvalidRequest(
                f"the request has at least {needed} bytes with its rows, at most {limit} are taken; "
                "send fewer items in one"
            )
        self.add_bytes(num_bytes)

    def release(self) -> None:
        """Releases its part of every limit. Idempotent."""
        if not self._released:
            self._released = True
            self._leave()

    def _leave(self) -> None:
        self._num_users -= 1
        if not self._num_users:
            self._admission._give_back(self)
            if self._within is not None:
                self._within._leave()


class UndeliveredBytes:
    """Bytes of encoded rows that are not delivered to all their callers yet. Slow readers keep them in memory
    in addition to the store. Rows that several callers wait for count once, in the first caller's share.

    No new encode starts for a caller above its share of ``max_bytes``; encodes that were admitted continue.
    Bytes above a caller's share do not reduce the shares of others.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._shares = Shares(max_bytes)
        self._undelivered: Counter[Holder] = Counter()
        self._readers: dict[int, tuple[Holder, int]] = {}
        """By the rows' identity: their owner, and the number of callers that have not read them."""

    def add(self, rows: object, num_bytes: int, holder: Holder = WHOLE) -> None:
        """Adds a caller that ``rows`` are to be delivered to."""
        owner, num_readers = self._readers.get(id(rows), (holder[:1], 0))
        self._readers[id(rows)] = owner, num_readers + 1
        if not num_readers:
            self._count(owner, num_bytes)

    def remove(self, rows: object, num_bytes: int) -> None:
        """Removes a caller that ``rows`` were delivered to, or that has left."""
        owner, num_readers = self._readers[id(rows)]
        self._readers[id(rows)] = owner, num_readers - 1
        if num_readers == 1:
            del self._readers[id(rows)]
            self._count(owner, -num_bytes)

    def check_room(self, holder: Holder = WHOLE) -> None:
        """Raises QueueFull, with both numbers, while the caller is above its share."""
        if self._shares.room(holder[:1]) <= 0:
            raise QueueFull(
                f"{self.num_bytes} bytes of rows wait to be read, at most {self.max_bytes} may, three "
                f"quarters of them one caller's, and {self._undelivered[holder[:1]]} are this caller's",
                retry_after_ms=RETRY_AFTER_MS,
                undelivered_bytes=self.num_bytes,
                max_bytes=self.max_bytes,
            )

    def fill(self) -> float:
        """From 0 to 1: the share in use, as ``Shares.fill``."""
        return self._shares.fill()

    def _count(self, owner: Holder, num_bytes: int) -> None:
        most = self.max_bytes - (self.max_bytes // RESERVED if owner else 0)
        former = min(most, self._undelivered[owner])
        self.num_bytes += num_bytes
        self._undelivered[owner] += num_bytes
        self._shares.add(owner, min(most, self._undelivered[owner]) - former)
        if not self._undelivered[owner]:
            del self._undelivered[owner]


class Admission:
    """The limits on content in memory, and on work that is admitted and not finished."""

    def __init__(self, max_patches: int, max_bytes: int, clock: Callable[[], float] | None = None) -> None:
        """clock: monotonic seconds, for a retry delay from the measured rate; None for a fixed delay."""
        self.max_patches = max_patches
        self.max_bytes = max_bytes
        self.num_squares = 0
        """Sum over the items of patches times patches of an attention sequence."""
        self._patches = Shares(max_patches)
        self._bytes = Shares(max_bytes)
        self._patches_pace = None if clock is None else Pace(clock)
        self._bytes_pace = None if clock is None else Pace(clock)

    @property
    def num_patches(self) -> int:
        """Patches admitted and not yet encoded."""
        return self._patches.num_used

    @property
    def num_bytes(self) -> int:
        """Bytes of content held: messages of calls, and items that are in no message."""
        return self._bytes.num_used

    def fill(self) -> float:
        """From 0 to 1: the fuller limit's share in use, as ``Shares.fill``."""
        return max(shares.fill() for shares in (self._patches, self._bytes) if shares.limit)

    def acquire(self, num_bytes: int, holder: Holder = WHOLE, within: Permit | None = None) -> Permit:
        """A permit for content of ``num_bytes``. within: a permit that counts the same bytes; while they
        are counted they are not counted again. Raises QueueFull with both numbers."""
        if within is not None and within.is_counted:
            return Permit(self, holder, 0, within)
        self._take_bytes(holder, num_bytes)
        return Permit(self, holder, num_bytes)

    def _take_bytes(self, holder: Holder, num_bytes: int) -> None:
        if not self._bytes.take(holder, num_bytes):
            room = max(0, self._bytes.room(holder))
            raise queue_full("content bytes", self._bytes, num_bytes, room, self._bytes_pace)

    def _take_patches(self, holder: Holder, num_patches: int, *, is_prefetch: bool) -> None:
        room = max(0, self._patches.room(holder))
        if is_prefetch and self.num_patches:
            room = min(room, max(0, int(self.max_patches * PREFETCH_SHARE) - self.num_patches))
        if num_patches > room:
            whom = "a prefetch" if is_prefetch else "this caller"
            raise queue_full("patches", self._patches, num_patches, room, self._patches_pace, whom)
        self._patches.add(holder, num_patches)

    def _give_back(self, permit: Permit) -> None:
        self._patches.give_back(permit.holder, permit.num_patches)
        self._bytes.give_back(permit.holder, permit.num_bytes)
        self.num_squares -= permit.num_squares
        for pace, amount in ((self._patches_pace, permit.num_patches), (self._bytes_pace, permit.num_bytes)):
            if pace is not None and amount:
                pace.note(amount)


def queue_full(
    unit: str, shares: Shares, needed: int, room: int, pace: Pace | None, whom: str = "this caller"
) -> QueueFull:
    """The refusal of an item while ``room`` are left. unit: its last word names the details. pace: of the
    retry delay; None for a fixed delay."""
    name = unit.split()[-1]
    return QueueFull(
        f"the queue holds {shares.num_used} {unit} of {shares.limit}, the item needs {needed}, "
        f"{room} are left to {whom}",
        retry_after_ms=RETRY_AFTER_MS if pace is None else pace.retry_after_ms(needed - room),
        **{f"held_{name}": shares.num_used, f"needed_{name}": needed, f"max_{name}": shares.limit},
    )
