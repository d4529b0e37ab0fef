"""Policies of a cache that is bounded by the sum of its entries' sizes, for ``cache_policies.py``.

Owns models of published policies, written for sizes that differ, and what drives the service's own code
(``FairShares``). Each is told of one request after the other and says whether it was a hit. None may refuse
an item: its rows need room for their delivery in any case, so that what a policy would not admit is what
goes next.

Sources: 2Q (Johnson and Shasha, VLDB 1994), ARC (Megiddo and Modha, FAST 2003), SLRU (Karedla, Love and
Wherry, 1994), TinyLFU (Einziger, Friedman and Manes, ACM TOS 2017), S3-FIFO (Yang et al., SOSP 2023), SIEVE
(Zhang et al., NSDI 2024).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Protocol

from encoder_service.store.shares import FairShares


class Policy(Protocol):
    def request(self, key: int, size: int) -> bool:
        """Whether the item was there; it is afterwards."""


class Lru:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self.entries: OrderedDict[int, int] = OrderedDict()

    def request(self, key: int, size: int) -> bool:
        if key in self.entries:
            self.entries.move_to_end(key)
            return True
        while self.used + size > self.capacity:
            self.used -= self.entries.popitem(last=False)[1]
        self.entries[key] = size
        self.used += size
        return False


class Fifo(Lru):
    def request(self, key: int, size: int) -> bool:
        return key in self.entries or super().request(key, size)


class Sieve:
    """A hand that goes from old to new, skips and unmarks what was used, and stays where it evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self.sizes: dict[int, int] = {}
        self.visited: set[int] = set()
        # Linked lists towards the newer and the older neighbour; -1 is no neighbour.
        self.newer: dict[int, int] = {}
        self.older: dict[int, int] = {}
        self.head = self.tail = self.hand = -1

    def request(self, key: int, size: int) -> bool:
        if key in self.sizes:
            self.visited.add(key)
            return True
        while self.used + size > self.capacity:
            self._evict()
        self.sizes[key] = size
        self.used += size
        self.older[key], self.newer[key] = self.head, -1
        if self.head != -1:
            self.newer[self.head] = key
        self.head = key
        if self.tail == -1:
            self.tail = key
        return False

    def _evict(self) -> None:
        at = self.tail if self.hand == -1 else self.hand
        while at in self.visited:
            self.visited.discard(at)
            at = self.newer[at] if self.newer[at] != -1 else self.tail
        self.hand = newer = self.newer.pop(at)
        older = self.older.pop(at)
        if newer != -1:
            self.older[newer] = older
        else:
            self.head = older
        if older != -1:
            self.newer[older] = newer
        else:
            self.tail = newer
        self.used -= self.sizes.pop(at)


class S3Fifo:
    """A small queue that lets through what was used again, a main one with reinsertion, and the keys of what
    the small one let go, as many as the main one's sizes are good for."""

    def __init__(self, capacity: int, small_share: float = 0.1) -> None:
        self.capacity, self.small_capacity = capacity, capacity * small_share
        self.small: OrderedDict[int, int] = OrderedDict()
        self.main: OrderedDict[int, int] = OrderedDict()
        self.ghost: OrderedDict[int, int] = OrderedDict()
        self.small_used = self.main_used = self.ghost_used = 0
        self.uses: dict[int, int] = {}

    def request(self, key: int, size: int) -> bool:
        if key in self.uses:
            self.uses[key] = min(3, self.uses[key] + 1)
            return True
        while self.small_used + self.main_used + size > self.capacity:
            self._evict()
        if key in self.ghost:
            self.ghost_used -= self.ghost.pop(key)
            self.main[key] = size
            self.main_used += size
        else:
            self.small[key] = size
            self.small_used += size
        self.uses[key] = 0
        return False

    def _evict(self) -> None:
        if self.small and (self.small_used >= self.small_capacity or not self.main):
            key, size = self.small.popitem(last=False)
            self.small_used -= size
            if self.uses[key] > 0:
                self.uses[key] = 0
                self.main[key] = size
                self.main_used += size
                return
            del self.uses[key]
            self.ghost[key] = size
            self.ghost_used += size
            while self.ghost_used > self.capacity - self.small_capacity:
                self.ghost_used -= self.ghost.popitem(last=False)[1]
            return
        key, size = self.main.popitem(last=False)
        if self.uses[key] > 0:
            self.uses[key] -= 1
            self.main[key] = size
            return
        self.main_used -= size
        del self.uses[key]


class Probation:
    """What is new is on probation, least recently used first out while it has more than its part; what is
    used again, or comes back soon after it went, is protected, with an order of its own. ghost_share: sizes
    of keys remembered, over the capacity; 0 makes it SLRU without its bound on the protected, else it is 2Q
    with promotion at the first use."""

    def __init__(self, capacity: int, part: float = 0.1, ghost_share: float = 1.0) -> None:
        self.capacity, self.part, self.ghost_capacity = capacity, part, capacity * ghost_share
        self.new: OrderedDict[int, int] = OrderedDict()
        self.kept: OrderedDict[int, int] = OrderedDict()
        self.ghost: OrderedDict[int, int] = OrderedDict()
        self.new_used = self.kept_used = self.ghost_used = 0

    def request(self, key: int, size: int) -> bool:
        if key in self.kept:
            self.kept.move_to_end(key)
            return True
        if key in self.new:
            self.new_used -= self.new.pop(key)
            self.kept[key] = size
            self.kept_used += size
            return True
        while self.new_used + self.kept_used + size > self.capacity:
            self._evict()
        if key in self.ghost:
            self.ghost_used -= self.ghost.pop(key)
            self.kept[key] = size
            self.kept_used += size
        else:
            self.new[key] = size
            self.new_used += size
        return False

    def _evict(self) -> None:
        if self.new and (not self.kept or self.new_used > self.part * self.capacity):
            key, size = self.new.popitem(last=False)
            self.new_used -= size
            self.ghost[key] = size
            self.ghost_used += size
            while self.ghost_used > self.ghost_capacity:
                self.ghost_used -= self.ghost.popitem(last=False)[1]
        else:
            self.kept_used -= self.kept.popitem(last=False)[1]


class Arc(Probation):
    """Probation whose part follows what comes back: larger when what probation let go does, smaller when what
    protection let go does. least, most: of the capacity; without bounds of them it is ARC as published."""

    def __init__(self, capacity: int, least: float = 0.0, most: float = 1.0) -> None:
        super().__init__(capacity)
        self.least, self.most = least * capacity, most * capacity
        self.kept_ghost: OrderedDict[int, int] = OrderedDict()
        self.kept_ghost_used = 0
        self.target = 0.0

    def request(self, key: int, size: int) -> bool:
        if key in self.ghost:
            self.target = min(
                self.capacity, self.target + size * max(1.0, self.kept_ghost_used / max(1, self.ghost_used))
            )
        elif key in self.kept_ghost:
            self.target = max(
                0.0, self.target - size * max(1.0, self.ghost_used / max(1, self.kept_ghost_used))
            )
            self.kept_ghost_used -= self.kept_ghost.pop(key)
            self.ghost[key] = size
            self.ghost_used += size
        self.target = min(max(self.target, self.least), self.most)
        return super().request(key, size)

    def _evict(self) -> None:
        if self.new and (not self.kept or self.new_used > self.target):
            key, size = self.new.popitem(last=False)
            self.new_used -= size
            self.ghost[key] = size
            self.ghost_used += size
            while self.ghost and self.ghost_used + self.new_used > self.capacity:
                self.ghost_used -= self.ghost.popitem(last=False)[1]
        else:
            key, size = self.kept.popitem(last=False)
            self.kept_used -= size
            self.kept_ghost[key] = size
            self.kept_ghost_used += size
            while self.kept_ghost and self.kept_ghost_used + self.kept_used > self.capacity:
                self.kept_ghost_used -= self.kept_ghost.popitem(last=False)[1]


class TinyLfu:
    """A window of one part in fifty before two segments; what leaves the window stays if it was asked for
    more often than what would go for it. Counts are exact here and halve every so many requests, which a
    sketch only comes close to."""

    def __init__(self, capacity: int, window: float = 0.02) -> None:
        self.capacity, self.window_capacity = capacity, capacity * window
        self.window: OrderedDict[int, int] = OrderedDict()
        self.probation: OrderedDict[int, int] = OrderedDict()
        self.protected: OrderedDict[int, int] = OrderedDict()
        self.window_used = self.main_used = self.protected_used = 0
        self.counts: dict[int, int] = {}
        self.num_counted = 0

    def request(self, key: int, size: int) -> bool:
        self._count(key)
        if key in self.window:
            self.window.move_to_end(key)
            return True
        if key in self.protected:
            self.protected.move_to_end(key)
            return True
        if key in self.probation:
            self.protected[key] = self.probation.pop(key)
            self.protected_used += size
            while self.protected_used > 0.8 * (self.capacity - self.window_capacity):
                lowered, lowered_size = self.protected.popitem(last=False)
                self.protected_used -= lowered_size
                self.probation[lowered] = lowered_size
            return True
        self.window[key] = size
        self.window_used += size
        while self.window_used > self.window_capacity and len(self.window) > 1:
            self._admit(*self.window.popitem(last=False))
        while self.window_used + self.main_used > self.capacity:
            self._drop_victim()
        return False

    def _admit(self, key: int, size: int) -> None:
        self.window_used -= size
        lacking = self.main_used + size - (self.capacity - self.window_capacity)
        freed = 0
        victims: list[int] = []
        for order in (self.probation, self.protected):
            for victim, victim_size in order.items():
                if freed >= lacking:
                    break
                victims.append(victim)
                freed += victim_size
        if victims and self.counts.get(key, 0) <= max(self.counts.get(each, 0) for each in victims):
            return
        for _ in victims:
            self._drop_victim()
        self.probation[key] = size
        self.main_used += size

    def _drop_victim(self) -> None:
        if self.probation:
            self.main_used -= self.probation.popitem(last=False)[1]
        elif self.protected:
            size = self.protected.popitem(last=False)[1]
            self.main_used -= size
            self.protected_used -= size
        else:
            self.window_used -= self.window.popitem(last=False)[1]

    def _count(self, key: int) -> None:
        self.counts[key] = min(15, self.counts.get(key, 0) + 1)
        self.num_counted += 1
        if self.num_counted >= 10 * max(100, len(self.window) + len(self.probation) + len(self.protected)):
            self.counts = {each: count // 2 for each, count in self.counts.items() if count > 1}
            self.num_counted = 0


class Service:
    """``FairShares`` as the stores use it, with one namespace."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self.shares = FairShares(capacity)
        self.sizes: dict[bytes, int] = {}

    def request(self, key: int, size: int) -> bool:
        name = key.to_bytes(8, "big")
        if name in self.sizes:
            self.shares.use("", name)
            return True
        lacking = self.used + size - self.capacity
        if lacking > 0:
            victims = []
            for _, victim in self.shares.victims("", size, lambda _: True):
                victims.append(victim)
                lacking -= self.sizes[victim]
                if lacking <= 0:
                    break
            for victim in victims:
                self.used -= self.sizes.pop(victim)
                self.shares.forget("", victim)
        self.shares.keep("", name, size)
        self.sizes[name] = size
        self.used += size
        return False


class Farthest:
    """Evicts what is asked for again last: not a policy, which cannot know, but a bound for them as far as
    sizes are alike."""

    def __init__(self, capacity: int, keys: list[int]) -> None:
        self.capacity, self.used, self.at = capacity, 0, 0
        self.sizes: dict[int, int] = {}
        self.heap: list[tuple[int, int]] = []
        self.next_use: dict[int, int] = {}
        later: dict[int, deque[int]] = {}
        for at, key in enumerate(keys):
            later.setdefault(key, deque()).append(at)
        self.later = later

    def request(self, key: int, size: int) -> bool:
        uses = self.later[key]
        uses.popleft()
        next_use = uses[0] if uses else 1 << 60
        hit = key in self.sizes
        if not hit:
            while self.used + size > self.capacity:
                when, victim = heapq.heappop(self.heap)
                if self.next_use.get(victim) == -when:
                    self.used -= self.sizes.pop(victim)
                    del self.next_use[victim]
            self.sizes[key] = size
            self.used += size
        self.next_use[key] = next_use
        heapq.heappush(self.heap, (-next_use, key))
        return hit


POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "fifo": Fifo,
    "lru": Lru,
    "sieve": Sieve,
    "s3-fifo": S3Fifo,
    "slru": lambda capacity: Probation(capacity, 0.2, 0.0),
    "2q 10%": lambda capacity: Probation(capacity, 0.1),
    "2q 33%": lambda capacity: Probation(capacity, 1 / 3),
    "arc": Arc,
    "arc 20-50%": lambda capacity: Arc(capacity, 0.2, 0.5),
    "tinylfu": TinyLfu,
    "service": Service,
}
BOUND = "farthest"
