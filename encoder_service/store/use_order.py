"""The order in which one namespace's entries should go: a scan does not push out what is asked for again.

Owns the entries' bytes and their order, nothing else: which namespace has to give is ``shares``'. Pure
Python, no torch, no clock.

This is 2Q (Johnson and Shasha, VLDB 1994) with entries of different sizes. What is new is on probation. What
is asked for again, or comes back soon after it went, is kept, in an order of its own. Probation gives while
it has more than its part, so that what is asked for once goes before what is not; each of the two gives the
least recently used first. Nobody is refused: rows need room for their delivery in any case, and what a policy
would not admit is what goes next instead.

A use soon after the entry came does not count as being asked for again: a prefetch is followed by the call
that wanted it, several callers ask for one image at a time, and a scan that does either is still a scan.
``bench/cache_policies.py`` compares this with other policies; docs/caching.md has the figures.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from encoder_service.store.integrity import Checked

# Of the entries' bytes, what probation may have.
PROBATION_PART = 1 / 3
# An entry is young until so much has come after it, over the entries' bytes.
YOUNG_PART = 0.1

Going: TypeAlias = tuple[bytes, int, int]
"""An entry's key, its last use and its bytes."""


@dataclass(slots=True)
class _Entry:
    """used: its last use. came_at: bytes that had come up to and with it."""

    used: int
    num_bytes: int
    came_at: int


class UseOrder(Checked):
    """Entries by key. Uses are numbered by the caller, each above those before."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._new: OrderedDict[bytes, _Entry] = OrderedDict()
        self._kept: OrderedDict[bytes, _Entry] = OrderedDict()
        self._new_bytes = 0
        self._came_bytes = 0
        # Keys of what went, as many as the bytes of what is here are good for, and their bytes.
        self._gone: OrderedDict[bytes, int] = OrderedDict()
        self._gone_bytes = 0

    def __len__(self) -> int:
        return len(self._new) + len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        return key in self._new or key in self._kept

    def add(self, key: bytes, used: int, num_bytes: int) -> None:
        """A new entry, or one that comes back."""
        self._came_bytes += num_bytes
        entry = _Entry(used, num_bytes, self._came_bytes)
        self.num_bytes += num_bytes
        gone_bytes = self._gone.pop(key, None)
        if gone_bytes is None:
            self._new[key] = entry
            self._new_bytes += num_bytes
        else:
            self._gone_bytes -= gone_bytes
            self._kept[key] = entry

    def use(self, key: bytes, used: int) -> None:
        """It was asked for."""
        entry = self._kept.get(key)
        if entry is not None:
            self._kept.move_to_end(key)
        elif self._came_bytes - (entry := self._new[key]).came_at < YOUNG_PART * self.num_bytes:
            self._new.move_to_end(key)
        else:
            self._kept[key] = self._new.pop(key)
            self._new_bytes -= entry.num_bytes
        entry.used = used

    def remove(self, key: bytes) -> int:
        """It is gone, and remembered for a while. Its bytes."""
        entry = self._kept.pop(key, None)
        if entry is None:
            entry = self._new.pop(key)
            self._new_bytes -= entry.num_bytes
        self.num_bytes -= entry.num_bytes
        self._gone[key] = entry.num_bytes
        self._gone_bytes += entry.num_bytes
        while self._gone_bytes > self.num_bytes:
            self._gone_bytes -= self._gone.popitem(last=False)[1]
        return entry.num_bytes

    def going(self, is_evictable: Callable[[bytes], bool]) -> Iterator[Going]:
        """What should go, first to last, each as if those before it were gone. To be used up before anything
        changes here. One step for each entry on the way that is not evictable."""
        waiting, kept = _evictable(self._new, is_evictable), _evictable(self._kept, is_evictable)
        first_new, first_kept = next(waiting, None), next(kept, None)
        new_bytes, left_bytes = self._new_bytes, self.num_bytes
        while True:
            if first_new is not None and (first_kept is None or new_bytes > PROBATION_PART * left_bytes):
                yield first_new
                new_bytes -= first_new[2]
                left_bytes -= first_new[2]
                first_new = next(waiting, None)
            elif first_kept is not None:
                yield first_kept
                left_bytes -= first_kept[2]
                first_kept = next(kept, None)
            else:
                return

    def integrity_steps(self) -> Iterator[None]:
        """Bytes and orders agree."""
        found_bytes = []
        for order, other in ((self._new, self._kept), (self._kept, self._new)):
            num_bytes, last_used = 0, -1
            for key, entry in order.items():
                assert key not in other
                assert key not in self._gone
                assert last_used < entry.used, "entries are not in the order of their use"
                last_used, num_bytes = entry.used, num_bytes + entry.num_bytes
                yield
            found_bytes.append(num_bytes)
        gone_bytes = 0
        for num_bytes in self._gone.values():
            gone_bytes += num_bytes
            yield
        assert self._new_bytes == found_bytes[0]
        assert self.num_bytes == sum(found_bytes)
        assert self._gone_bytes == gone_bytes
        assert self._gone_bytes <= self.num_bytes


def _evictable(order: OrderedDict[bytes, _Entry], is_evictable: Callable[[bytes], bool]) -> Iterator[Going]:
    return ((key, entry.used, entry.num_bytes) for key, entry in order.items() if is_evictable(key))
