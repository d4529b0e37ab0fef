"""One tier of the store: rows by namespace and key in one arena, and the order of their eviction.

Owns the entries and the order of eviction. Rows that this process holds are never evicted. The others are
evicted in this order, least recently used first:

1. rows that the next tier holds as well, so that nothing is lost;
2. rows that it does not hold;
3. rows that were announced to a reader in another process within ANNOUNCED_PROTECTION_S and that no reader
   has reported as read, the oldest announcement first.

Of the first rows in this order that would leave a large enough range, those outside it stay.

Not thread-safe: used from the event loop only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from encoder_service.store.arena import Arena, Slot
from encoder_service.types import EncodedItem

ANNOUNCED_PROTECTION_S = 10.0

Name: TypeAlias = tuple[str, bytes]
"""Namespace and key."""


@dataclass(eq=False, slots=True)
class Entry:
    """Rows in a tier. item.rows: a view of the slot; the entry is one holder of the slot. announced_s: when
    the location was last announced to a reader; None once a reader has reported the rows as read."""

    name: Name
    item: EncodedItem
    slot: Slot
    announced_s: float | None = None


class Tier:
    """The entries of one arena."""

    def __init__(
        self, arena: Arena, behind: Tier | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes over the arena: ``close`` closes it. behind: the tier that rows are copied to before they are
        evicted; None for the last tier."""
        self.arena = arena
        self.num_bytes = 0
        self.num_evictions = 0
        self.num_unread_evictions = 0
        """Number of evicted rows whose announcement was still protected."""
        self._behind = behind
        self._clock = clock
        self._entries: OrderedDict[Name, Entry] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: Name) -> bool:
        return name in self._entries

    def entries(self) -> Iterator[Entry]:
        """All entries, the least recently used first."""
        return iter(self._entries.values())

    def find(self, name: Name) -> Entry | None:
        return self._entries.get(name)

    def use(self, entry: Entry) -> None:
        """Makes the entry the most recently used. Does nothing if it was removed."""
        if self._entries.get(entry.name) is entry:
            self._entries.move_to_end(entry.name)

    def announce(self, entry: Entry) -> None:
        """Records that the entry's location is announced to a reader in another process."""
        entry.announced_s = self._clock()
        self.use(entry)

    def touch(self, name: Name, generation: int) -> bool:
        """Records that a reader has read rows of this generation. Returns False if they are gone."""
        entry = self._entries.get(name)
        if entry is None or self.arena.generation(entry.slot) != generation:
            return False
        entry.announced_s = None
        self.use(entry)
        return True

    def num_unread(self) -> int:
        """Number of entries whose announcement is protected."""
        now_s = self._clock()
        return sum(_is_protected(entry, now_s) for entry in self._entries.values())

    def allocate(self, num_bytes: int) -> Slot | None:
        """A slot, after evicting what it needs. None, without any eviction, if the arena is smaller or if
        held rows leave no range of that size."""
        slot = self.arena.allocate(num_bytes)
        if slot is not None or num_bytes > self.arena.capacity_bytes or self.arena.closed:
            return slot
        victims = self._evictable(num_bytes)
        if victims is None:
            return None
        now_s = self._clock()
        for entry in victims:
            self.num_unread_evictions += _is_protected(entry, now_s)
            self.remove(entry)
        self.num_evictions += len(victims)
        return self.arena.allocate(num_bytes)

    def insert(self, name: Name, item: EncodedItem, slot: Slot) -> Entry:
        """Publishes and lists a slot whose rows are complete, replacing rows of the same name. The entry
        takes over the caller's hold of the slot. item.rows: a view of the slot."""
        self.arena.publish(slot)
        before = self._entries.get(name)
        if before is not None:
            self.remove(before)
        entry = self._entries[name] = Entry(name, item, slot)
        self.num_bytes += slot.num_bytes
        self.arena.index(slot, name[0], item)
        return entry

    def remove(self, entry: Entry) -> None:
        """Unlists the rows. Their slot is freed when its last holder drops it."""
        del self._entries[entry.name]
        self.num_bytes -= entry.slot.num_bytes
        self.arena.unindex(entry.slot)
        self.arena.drop(entry.slot)

    def next_evicted(self, num_bytes: int) -> list[Entry]:
        """The entries that would be evicted next, in order, up to num_bytes in total."""
        victims: list[Entry] = []
        for entry in self._eviction_order():
            if num_bytes <= 0:
                break
            victims.append(entry)
            num_bytes -= entry.slot.num_bytes
        return victims

    def close(self) -> None:
        """Removes every entry and closes the arena. Idempotent."""
        for entry in list(self._entries.values()):
            self.remove(entry)
        self.arena.close()

    def _evictable(self, num_bytes: int) -> list[Entry] | None:
        """The entries whose eviction leaves a range of num_bytes (and a free index): of the first ones in
        eviction order with which there is one, those inside it. None if evicting all does not."""
        passed: list[Entry] = []
        plan, lacks_index = self.arena.freeing_plan(), self.arena.largest_free_bytes >= num_bytes
        for entry in self._eviction_order():
            if lacks_index:
                return [entry]
            passed.append(entry)
            begin, size_bytes = plan.free(entry.slot.offset_bytes)
            if size_bytes >= num_bytes:
                return [each for each in passed if begin <= each.slot.offset_bytes < begin + size_bytes]
        return None

    def _eviction_order(self) -> Iterator[Entry]:
        """Entries that nothing else holds, in the order that the module docstring gives."""
        now_s = self._clock()
        only_here: list[Entry] = []
        unread: list[tuple[float, int, Entry]] = []
        for order, entry in enumerate(self._entries.values()):
            if self.arena.num_holders(entry.slot) > 1:
                continue
            if entry.announced_s is not None and _is_protected(entry, now_s):
                unread.append((entry.announced_s, order, entry))
            elif self._behind is None or entry.name in self._behind:
                yield entry
            else:
                only_here.append(entry)
        yield from only_here
        yield from (entry for _, _, entry in sorted(unread))


def _is_protected(entry: Entry, now_s: float) -> bool:
    return entry.announced_s is not None and now_s - entry.announced_s < ANNOUNCED_PROTECTION_S
