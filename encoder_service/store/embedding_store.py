"""The embedding store: finished rows by namespace and key, bounded in bytes, each namespace with its fair
share (``shares``), in which a scan does not push out what is asked for again (``use_order``).

Owns the rows it holds: each entry has its own storage, so that eviction returns memory and no view keeps a
batch alive. Main and deepstack rows are one tensor and come and go together. ``arena_store`` is the same for
rows that other processes read; ``RowStore`` is what both offer. Not thread-safe: used from the event loop
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch

from encoder_service.store.arena import Arena, Slot
from encoder_service.store.shares import FairShares, Name
from encoder_service.types import EncodedItem

Tier: TypeAlias = Literal["device", "host"]

# What an entry costs besides its rows: key, grid, tensor and table overhead, rounded up.
ENTRY_OVERHEAD_BYTES = 1024


@dataclass
class StoreCounters:
    """refused: items that were not kept, for their size or because readers or other namespaces' shares hold
    the room they need. evicted_for_others: evictions for another namespace, which were above a share."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    refused: int = 0
    evicted_for_others: int = 0


@dataclass(eq=False)
class Held:
    """An item whose rows stay where they are until ``drop``. arena, slot: where other processes may read
    them; None for rows that are this process's own."""

    item: EncodedItem
    arena: Arena | None = None
    slot: Slot | None = None

    def share(self) -> Held:
        """The same rows for one holder more, while this one holds them."""
        if self.arena is not None:
            assert self.slot is not None, "rows that were given up may be another's by now"
            self.arena.hold(self.slot)
        return Held(self.item, self.arena, self.slot)

    def drop(self) -> None:
        """The holder reads no more. Twice is once."""
        slot, self.slot = self.slot, None
        if slot is not None and self.arena is not None:
            self.arena.drop(slot)


@dataclass(frozen=True, eq=False)
class Writing:
    """Room that was made for an item's rows: ``copy`` on any thread, then the store's ``finish_put`` or
    ``cancel_put``, but never while ``copy`` still runs."""

    namespace: str
    item: EncodedItem
    slot: Slot
    target: torch.Tensor

    def copy(self) -> None:
        self.target.copy_(self.item.rows)


class RowStore(Protocol):
    """Rows by (namespace, key). A namespace never sees another's entries."""

    @property
    def max_bytes(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def counters(self) -> StoreCounters: ...
    def __len__(self) -> int: ...

    def get(self, namespace: str, key: bytes) -> EncodedItem | None:
        """The item, now the most recently used, or None. Its rows may be read while somebody holds them."""

    def peek(self, namespace: str, key: bytes) -> EncodedItem | None:
        """The item or None, without counting as a use."""

    def hold(self, namespace: str, key: bytes, *, is_lookup: bool = True) -> Held | None:
        """The item with its rows held for the caller, or None. is_lookup: counts as a hit or a miss."""

    def reserve(self, namespace: str, item: EncodedItem) -> Writing | None:
        """Room on the device that the engine writes an item's rows to, of which item.rows tells shape and
        dtype: then ``finish_put`` or ``cancel_put``. None where rows come through the host."""

    def begin_put(self, namespace: str, item: EncodedItem) -> Writing | None:
        """Keeps the item or makes room for it, evicting what ``shares`` says. None when nothing is left to
        do: it is kept without a copy, or there is no room for it."""

    def finish_put(self, writing: Writing) -> None:
        """The rows are there: from now on the item is found."""

    def cancel_put(self, writing: Writing) -> None:
        """The rows will not be there."""

    async def placed(self, held: Held, namespace: str, tier: Tier) -> Held:
        """Rows that are held, where a reader needs them, held in place of ``held``; that itself where there
        is no room or no such tier, but never on a device for a reader that needs the host."""

    def check_integrity(self) -> None:
        """Raises AssertionError unless bytes and entries agree."""


class EmbeddingStore:
    """The store of a service that shares no memory; see ``RowStore``. weights: see ``shares.FairShares``."""

    def __init__(self, max_bytes: int, *, weights: Mapping[str, float] | None = None) -> None:
        self.max_bytes = max_bytes
        self.shares = FairShares(max_bytes, weights)
        self.num_bytes = 0
        self.counters = StoreCounters()
        self._entries: dict[Name, EncodedItem] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, namespace: str, key: bytes) -> EncodedItem | None:
        """The item, now the most recently used, or None."""
        entry = self._entries.get((namespace, key))
        if entry is None:
            self.counters.misses += 1
            return None
        self.shares.use(namespace, key)
        self.counters.hits += 1
        return entry

    def peek(self, namespace: str, key: bytes) -> EncodedItem | None:
        """The item or None, without counting as a use."""
        return self._entries.get((namespace, key))

    def hold(self, namespace: str, key: bytes, *, is_lookup: bool = True) -> Held | None:
        """The item; a reference to its rows is all it takes to hold them."""
        item = self.get(namespace, key) if is_lookup else self.peek(namespace, key)
        return None if item is None else Held(item)

    def put(self, namespace: str, item: EncodedItem) -> bool:
        """Keeps the item in place of one under the same key, evicting what ``shares`` says. False when it was
        not kept, and nothing evicted: it is larger than the store or than what others' shares leave of it."""
        name, cost_bytes = (namespace, item.key), entry_bytes(item)
        previous = self._entries.get(name)
        more_bytes = cost_bytes - (0 if previous is None else entry_bytes(previous))
        victims = None
        if cost_bytes <= self.max_bytes:
            victims = self._evictable(name, more_bytes, self.num_bytes + more_bytes - self.max_bytes)
        if victims is None:
            self.counters.refused += 1
            return False
        for victim in victims:
            self._remove(victim)
            self.counters.evicted_for_others += victim[0] != namespace
        self.counters.evictions += len(victims)
        if previous is not None:
            self._remove(name)
        self._entries[name] = item
        self.shares.keep(*name, cost_bytes)
        self.num_bytes += cost_bytes
        return True

    def _evictable(self, name: Name, more_bytes: int, lacking_bytes: int) -> list[Name] | None:
        """What goes for more_bytes of the name's namespace; None when what may go does not free
        lacking_bytes."""
        if lacking_bytes <= 0:
            return []
        names = []
        for victim in self.shares.victims(name[0], more_bytes, lambda other: other != name):
            names.append(victim)
            lacking_bytes -= entry_bytes(self._entries[victim])
            if lacking_bytes <= 0:
                return names
        return None

    def _remove(self, name: Name) -> None:
        self.num_bytes -= entry_bytes(self._entries.pop(name))
        self.shares.forget(*name)

    def reserve(self, namespace: str, item: EncodedItem) -> None:
        """None: this store has no room on a device."""

    def begin_put(self, namespace: str, item: EncodedItem) -> None:
        """``put``: the item comes with its own storage, there is nothing to copy."""
        self.put(namespace, item)

    async def placed(self, held: Held, namespace: str, tier: Tier) -> Held:
        """Where they are: on the host."""
        del namespace, tier
        return held

    def finish_put(self, writing: Writing) -> None:
        raise AssertionError(f"nothing was given to write {writing.slot.num_bytes} bytes to")

    def cancel_put(self, writing: Writing) -> None:
        raise AssertionError(f"nothing was given to write {writing.slot.num_bytes} bytes to")

    def check_integrity(self) -> None:
        """Raises AssertionError unless the byte count is exact, bounded, and every entry owns its rows."""
        assert self.num_bytes == sum(entry_bytes(entry) for entry in self._entries.values())
        assert self.num_bytes <= self.max_bytes
        self.shares.check_integrity()
        assert sum(map(self.shares.num_bytes, self.shares.namespaces())) == self.num_bytes
        for (_, key), entry in self._entries.items():
            assert key == entry.key
            assert entry.rows.untyped_storage().nbytes() == entry.spec.num_bytes


def entry_bytes(item: EncodedItem) -> int:
    """What an item costs in the store, in bytes."""
    return item.spec.num_bytes + ENTRY_OVERHEAD_BYTES
