"""The embedding store: finished rows by namespace and key, bounded in bytes, least recently used out first.

Owns the rows it holds: each entry has its own storage, so that eviction returns memory and no view keeps a
batch alive. Main and deepstack rows are one tensor and come and go together. Not thread-safe: used from
the event loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from encoder_service.types import EncodedItem

# What an entry costs besides its rows: key, grid, tensor and table overhead, rounded up.
ENTRY_OVERHEAD_BYTES = 1024


@dataclass
class StoreCounters:
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    refused: int = 0


class EmbeddingStore:
    """Rows by (namespace, key). A namespace never sees another's entries."""

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
