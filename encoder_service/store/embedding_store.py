"""The embedding store: finished rows by namespace and key, bounded in bytes, least recently used out first.

Owns the rows it holds: each entry has its own storage, so that eviction returns memory and no view keeps a
batch alive. Main and deepstack rows are one tensor and come and go together. ``arena_store`` is the same for
rows that other processes read; ``RowStore`` is what both offer. Not thread-safe: used from the event loop
only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import torch

from encoder_service.store.arena import Arena, Slot
from encoder_service.types import EncodedItem

# What an entry costs besides its rows: key, grid, tensor and table overhead, rounded up.
ENTRY_OVERHEAD_BYTES = 1024


@dataclass
class StoreCounters:
    """refused: items that were not kept, for their size or because readers hold the room they need."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    refused: int = 0


@dataclass(eq=False)
class Held:
    """An item whose rows stay where they are until ``drop``. arena, slot: where other processes may read
    them; None for rows that are this process's own."""

    item: EncodedItem
    arena: Arena | None = None
    slot: Slot | None = None

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

    def begin_put(self, namespace: str, item: EncodedItem) -> Writing | None:
        """Keeps the item or makes room for it, evicting the least recently used. None when nothing is left
        to do: it is kept without a copy, or there is no room for it."""

    def finish_put(self, writing: Writing) -> None:
        """The rows are there: from now on the item is found."""

    def cancel_put(self, writing: Writing) -> None:
        """The rows will not be there."""

    def check_integrity(self) -> None:
        """Raises AssertionError unless bytes and entries agree."""


class EmbeddingStore:
    """The store of a service that shares no memory; see ``RowStore``."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.counters = StoreCounters()
        self._entries: OrderedDict[tuple[str, bytes], EncodedItem] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, namespace: str, key: bytes) -> EncodedItem | None:
        """The item, now the most recently used, or None."""
        entry = self._entries.get((namespace, key))
        if entry is None:
            self.counters.misses += 1
            return None
        self._entries.move_to_end((namespace, key))
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
        """Keeps the item, evicting the least recently used until it fits. False when it is larger than
        the whole store and was not kept."""
        cost = entry_bytes(item)
        if cost > self.max_bytes:
            self.counters.refused += 1
            return False
        previous = self._entries.pop((namespace, item.key), None)
        if previous is not None:
            self.num_bytes -= entry_bytes(previous)
        while self.num_bytes + cost > self.max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self.num_bytes -= entry_bytes(evicted)
            self.counters.evictions += 1
        self._entries[namespace, item.key] = item
        self.num_bytes += cost
        return True

    def begin_put(self, namespace: str, item: EncodedItem) -> None:
        """``put``: the item comes with its own storage, there is nothing to copy."""
        self.put(namespace, item)

    def finish_put(self, writing: Writing) -> None:
        raise AssertionError(f"nothing was given to write {writing.slot.num_bytes} bytes to")

    def cancel_put(self, writing: Writing) -> None:
        raise AssertionError(f"nothing was given to write {writing.slot.num_bytes} bytes to")

    def check_integrity(self) -> None:
        """Raises AssertionError unless the byte count is exact, bounded, and every entry owns its rows."""
        assert self.num_bytes == sum(entry_bytes(entry) for entry in self._entries.values())
        assert self.num_bytes <= self.max_bytes
        for (_, key), entry in self._entries.items():
            assert key == entry.key
            assert entry.rows.untyped_storage().nbytes() == entry.spec.num_bytes


def entry_bytes(item: EncodedItem) -> int:
    """What an item costs in the store, in bytes."""
    return item.spec.num_bytes + ENTRY_OVERHEAD_BYTES
