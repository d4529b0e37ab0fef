"""Shares of a limited resource, so that no holder takes all of it.

Owns the rule by which all limits of the service are shared, and the queue for limits that holders wait for.
The owner of a limit (admission, worker threads, URL fetches, connections, ...) defines the unit, and the
error for a refusal.

The rule: the last quarter of a limit is reserved for holders that hold nothing, and for holders that stay
within an eighth of the limit. So one holder can take up to three quarters, and another one still finds room.

A holder is a path, such as ``("peer 10.0.0.7", "namespace a")``. The rule applies at each step of the path,
and the limit of a step is the most that the step above can take. So a caller without a token gains nothing by
inventing namespaces: together they have the share of its address.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

Holder: TypeAlias = tuple[str, ...]

# Divisors of a limit: the reserved part, and the part up to which a holder may use it.
RESERVED, LITTLE = 4, 8
# The holder for limits that only one caller uses: its share is the whole limit.
WHOLE: Holder = ()


class Shares:
    """A limit and the amount that each holder has of it. Not thread-safe."""

    def __init__(self, limit: int, *, num_reserved: int | None = None) -> None:
        """num_reserved: the reserved part of the limit; None for a quarter."""
        self.limit = limit
        self.num_used = 0
        self._num_reserved = limit // RESERVED if num_reserved is None else num_reserved
        self._held: Counter[Holder] = Counter()

    def held_by(self, holder: Holder) -> int:
        """The amount of the holder and of all holders below it."""
        return self._held[holder]

    def room(self, holder: Holder) -> int:
        """The largest amount that ``take`` would give now. It may be negative."""
        limit, used, reserved = self.limit, self.num_used, self._num_reserved
        room = limit - used
        for length in range(1, len(holder) + 1):
            held = self._held[holder[:length]]
            if held:  # may use the reserved part only within an eighth
                room = min(room, max(limit - reserved - used, max(1, limit // LITTLE) - held))
            limit, used = limit - reserved, held
            reserved = limit // RESERVED
        return room

    def fill(self) -> float:
        """From 0 to 1: the used fraction of the limit, or the largest used fraction of a holder's share if
        that is higher."""
        allowed = [self.limit]
        if not self.limit:
            return 0.0
        fill = self.num_used / self.limit
        for holder, held in self._held.items():
            while len(allowed) <= len(holder):
                reserved = self._num_reserved if len(allowed) == 1 else allowed[-1] // RESERVED
                allowed.append(allowed[-1] - reserved)
            fill = max(fill, held / allowed[len(holder)])
        return min(1.0, fill)

    def take(self, holder: Holder, amount: int = 1) -> bool:
        """Takes ``amount`` for the holder if there is room, and returns whether there was."""
        if amount > self.room(holder):
            return False
        self.add(holder, amount)
        return True

    def give_back(self, holder: Holder, amount: int = 1) -> None:
        """Gives back an amount of ``take`` or ``add``."""
        self.add(holder, -amount)
        assert self.num_used >= 0

    def add(self, holder: Holder, amount: int) -> None:
        """Counts an amount that the holder has in any case, also above the limit."""
        self.num_used += amount
        for length in range(1, len(holder) + 1):
            step = holder[:length]
            self._held[step] += amount
            if not self._held[step]:
                del self._held[step]


class WaitingShares:
    """A limit that holders wait for. Waiters are served round-robin by holder, and in order for each holder.
    A waiter that does not fit delays only those of its own holder. Used on one event loop."""

    def __init__(self, limit: int, *, num_reserved: int | None = None) -> None:
        """num_reserved: as for ``Shares``."""
        self._shares = Shares(limit, num_reserved=num_reserved)
        self._waiting: dict[Holder, deque[tuple[asyncio.Future[None], int]]] = {}

    @property
    def limit(self) -> int:
        return self._shares.limit

    @property
    def num_used(self) -> int:
        return self._shares.num_used

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def fill(self) -> float:
        """As of ``Shares``."""
        return self._shares.fill()

    async def acquire(self, holder: Holder, amount: int = 1) -> int:
        """Waits for ``amount``, or for the whole limit if that is less. Returns the amount to ``release``."""
        amount = min(amount, self._shares.limit)
        if holder not in self._waiting and self._shares.take(holder, amount):
            return amount
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = granted, amount
        self._waiting.setdefault(holder, deque()).append(waiter)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release(holder, amount)
            else:
                self._leave(holder, waiter)
            raise
        return amount

    def release(self, holder: Holder, amount: int) -> None:
        """Gives back the amount of ``acquire``, and serves waiters."""
        self._shares.give_back(holder, amount)
        self._serve()

    @asynccontextmanager
    async def hold(self, holder: Holder, amount: int = 1) -> AsyncIterator[None]:
        """Holds ``amount`` while the block runs."""
        taken = await self.acquire(holder, amount)
        try:
            yield
        finally:
            self.release(holder, taken)

    def _leave(self, holder: Holder, waiter: tuple[asyncio.Future[None], int]) -> None:
        queue = self._waiting[holder]
        queue.remove(waiter)
        if not queue:
            del self._waiting[holder]
        self._serve()  # waiters behind it may fit

    def _serve(self) -> None:
        """Serves the first waiter of each holder, again and again until none fits."""
        has_granted = True
        while has_granted and self._waiting:
            has_granted = False
            for holder in list(self._waiting):
                granted, amount = self._waiting[holder][0]
                # The task of a cancelled waiter has not run yet. It will call ``_leave``.
                if granted.cancelled() or not self._shares.take(holder, amount):
                    continue
                granted.set_result(None)
                has_granted = True
                queue = self._waiting.pop(holder)
                queue.popleft()
                if queue:  # this holder is the last one now
                    self._waiting[holder] = queue
