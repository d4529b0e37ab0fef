"""Shares of a bounded resource, so that no caller takes all of it.

Owns the one rule by which every limit of the service is divided, and the queue of those that wait for a
part. Owners of a limit (admission, worker threads, URL fetches, connections, ...) say what a unit is and
which error a refusal becomes.

The rule: the last quarter of a limit is left to holders that hold nothing yet, or that stay within an eighth
of it. One holder alone can therefore take three quarters, and another one always finds room. A holder is a
path, such as ``("peer 10.0.0.7", "namespace a")``: the rule applies at every step of the path, to what the
step above may take. A caller without a token that invents namespaces thus shares what its address may take.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

Holder: TypeAlias = tuple[str, ...]

# A quarter of a limit is left to holders of little; an eighth is little.
RESERVED, LITTLE = 4, 8
# For limits that only one caller uses: the whole limit is its share.
WHOLE: Holder = ()


class Shares:
    """A limit, and what each holder has of it. Not thread-safe: used from one thread."""

    def __init__(self, limit: int, *, num_reserved: int | None = None) -> None:
        """num_reserved: of the limit, left to holders of little; None for a quarter."""
        self.limit = limit
        self.num_used = 0
        self._num_reserved = limit // RESERVED if num_reserved is None else num_reserved
        self._held: Counter[Holder] = Counter()

    def held_by(self, holder: Holder) -> int:
        """What the holder has, those below it in its path included."""
        return self._held[holder]

    def room(self, holder: Holder) -> int:
        """The largest amount that ``take`` would give now. 0 or less: none."""
        limit, used, reserved = self.limit, self.num_used, self._num_reserved
        room = limit - used
        for length in range(1, len(holder) + 1):
            held = self._held[holder[:length]]
            if held:
                room = min(room, max(limit - reserved - used, max(1, limit // LITTLE) - held))
            limit, used = limit - reserved, held
            reserved = limit // RESERVED
        return room

    def fill(self) -> float:
        """From 0 to 1: the used share of the limit, or of what some holder may take of it if that is more."""
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
        """Takes ``amount`` for the holder, and returns whether there was room."""
        if amount > self.room(holder):
            return False
        self._add(holder, amount)
        return True

    def add(self, holder: Holder, amount: int) -> None:
        """Counts what the holder has anyway, also above the limit."""
        self._add(holder, amount)

    def give_back(self, holder: Holder, amount: int = 1) -> None:
        """Gives back what ``take`` or ``add`` took."""
        self._add(holder, -amount)
        assert self.num_used >= 0

    def _add(self, holder: Holder, amount: int) -> None:
        self.num_used += amount
        for length in range(1, len(holder) + 1):
            step = holder[:length]
            self._held[step] += amount
            if not self._held[step]:
                del self._held[step]


class WaitingShares:
    """A limit whose holders wait for their part. Those that wait are served in turns by holder, each holder's
    own in their order; one that does not fit yet delays its own holder only. Used on one event loop."""

    def __init__(self, limit: int, *, num_reserved: int | None = None) -> None:
        """num_reserved: as of ``Shares``."""
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

    async def acquire(self, holder: Holder, amount: int = 1) -> int:
        """Waits for ``amount``, cut to the limit, and returns what was taken, for ``release``."""
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
        """Gives back what ``acquire`` took, and serves those that wait."""
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
        self._serve()  # those behind it may fit

    def _serve(self) -> None:
        """Grants what fits: one of each holder in turn, until none fits."""
        has_granted = True
        while has_granted and self._waiting:
            has_granted = False
            for holder in list(self._waiting):
                granted, amount = self._waiting[holder][0]
                # A waiter that was cancelled in this pass of the loop leaves by itself.
                if granted.cancelled() or not self._shares.take(holder, amount):
                    continue
                granted.set_result(None)
                has_granted = True
                queue = self._waiting.pop(holder)
                queue.popleft()
                if queue:  # behind the others
                    self._waiting[holder] = queue
