"""The embedding store in shared memory: each item's rows in a slot of an arena that other processes map.

Owns which rows are worth their slot: least recently used out first, but never rows that a delivery or a
lease still holds, since that would free nothing. When those fill the arena, new rows are refused and
nothing is evicted for them in vain. Which namespaces share an arena is ``partitions``'. Not thread-safe:
used from the event loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from encoder_service.store.allocator import ALIGNMENT_BYTES
from encoder_service.store.arena import Arena, Slot
from encoder_service.store.embedding_store import Held, StoreCounters, Writing
from encoder_service.types import EncodedItem


@dataclass(frozen=True, eq=False, slots=True)
class _Entry:
    """item.rows: a view of the slot, of which the entry is one holder."""

    item: EncodedItem
    slot: Slot


class ArenaStore:
    """See ``embedding_store.RowStore``. Takes the arena over: ``close`` closes it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.num_bytes = 0
        self.counters = StoreCounters()
        self._entries: OrderedDict[tuple[str, bytes], _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def max_bytes(self) -> int:
        return self.arena.capacity_bytes

    def namespaces(self) -> set[str]:
        """Those that have rows here."""
        return {namespace for namespace, _ in self._entries}

    def get(self, namespace: str, key: bytes) -> EncodedItem | None:
        """The item, now the most recently used, or None. Its rows may be read while somebody holds them."""
        entry = self._entries.get((namespace, key))
        if entry is None:
            self.counters.misses += 1
            return None
        self._entries.move_to_end((namespace, key))
        self.counters.hits += 1
        return entry.item

    def peek(self, namespace: str, key: bytes) -> EncodedItem | None:
        """The item or None, without counting as a use."""
        entry = self._entries.get((namespace, key))
        return None if entry is None else entry.item

    def hold(self, namespace: str, key: bytes, *, is_lookup: bool = True) -> Held | None:
        """The item, whose slot has one holder more until ``Held.drop``, or None."""
        found = self.get(namespace, key) if is_lookup else self.peek(namespace, key)
        if found is None:
            return None
        slot = self._entries[namespace, key].slot
        self.arena.hold(slot)
        return Held(found, self.arena, slot)

    def put(self, namespace: str, item: EncodedItem) -> bool:
        """Keeps a copy of the item; False when there is no room for it."""
        writing = self.begin_put(namespace, item)
        if writing is None:
            return False
        writing.copy()
        self.finish_put(writing)
        return True

    def begin_put(self, namespace: str, item: EncodedItem) -> Writing | None:
        """A slot for the item's rows, evicting the least recently used that nobody reads. None when it is
        larger than the arena, or than what readers leave of it."""
        slot = self._make_room(item.spec.num_bytes)
        if slot is None:
            self.counters.refused += 1
            return None
        target = self.arena.view(slot, item.rows.shape, item.rows.dtype)
        return Writing(namespace, item, slot, target)

    def finish_put(self, writing: Writing) -> None:
        """Publishes the rows, in place of others under the same key. After ``close`` they are given up."""
        if self.arena.closed:
            self.cancel_put(writing)
            return
        name = (writing.namespace, writing.item.key)
        self.arena.publish(writing.slot)
        if name in self._entries:
            self._remove(name)
        self._entries[name] = _Entry(replace(writing.item, rows=writing.target), writing.slot)
        self.num_bytes += writing.slot.num_bytes

    def cancel_put(self, writing: Writing) -> None:
        """Gives the slot back."""
        self.arena.drop(writing.slot)

    def close(self) -> None:
        """Forgets every item and closes the arena. Twice is once."""
        for name in list(self._entries):
            self._remove(name)
        self.arena.close()

    def check_integrity(self) -> None:
        """Raises AssertionError unless the arena is sound and every entry's rows are readable in a slot of
        their own."""
        self.arena.check_integrity()
        assert self.num_bytes == sum(entry.slot.num_bytes for entry in self._entries.values())
        assert len({entry.slot for entry in self._entries.values()}) == len(self._entries)
        for (_, key), entry in self._entries.items():
            assert key == entry.item.key
            assert self.arena.published(entry.slot)
            view = self.arena.view(entry.slot, entry.item.rows.shape, entry.item.rows.dtype)
            assert view.data_ptr() == entry.item.rows.data_ptr()

    def _make_room(self, num_bytes: int) -> Slot | None:
        if num_bytes > self.max_bytes:
            return None
        slot = self.arena.allocate(num_bytes)
        while slot is None:
            # Where enough is free and only scattered, or places in the control page lack, one more goes.
            victims = self._evictable(max(1, num_bytes - self.arena.free_bytes))
            if victims is None:
                return None
            for name in victims:
                self._remove(name)
            self.counters.evictions += len(victims)
            slot = self.arena.allocate(num_bytes)
        return slot

    def _evictable(self, num_bytes: int) -> list[tuple[str, bytes]] | None:
        """The least recently used that free at least num_bytes together; None when no set of them does."""
        names, found_bytes = [], 0
        for name, entry in self._entries.items():
            if self.arena.num_holders(entry.slot) == 1:
                names.append(name)
                found_bytes += -(-entry.slot.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                if found_bytes >= num_bytes:
                    return names
        return None

    def _remove(self, name: tuple[str, bytes]) -> None:
        entry = self._entries.pop(name)
        self.num_bytes -= entry.slot.num_bytes
        self.arena.drop(entry.slot)
