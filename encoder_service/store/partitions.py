"""Which arena a namespace's rows lie in: one of its own where it is isolated, else the one that all share.

Owns the mapping and the sums over it. Whoever maps an arena can read all of it, so an isolated namespace's
rows are never written where another's readers could see them. Not thread-safe: used from the event loop
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from encoder_service.store.arena import Arena
from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.embedding_store import Held, StoreCounters, Writing
from encoder_service.store.host_memory import HostMemory
from encoder_service.types import EncodedItem

# One place in the control page for so many bytes, eight bytes each: rows of an image take more.
BYTES_PER_SLOT = 16 * 1024
MIN_SLOTS, MAX_SLOTS = 64, 65_536


class PartitionedStore:
    """See ``embedding_store.RowStore``. isolated: by namespace."""

    def __init__(self, shared: ArenaStore, isolated: Mapping[str, ArenaStore]) -> None:
        self._shared = shared
        self._isolated = dict(isolated)

    def __len__(self) -> int:
        return sum(map(len, self.parts()))

    def parts(self) -> Iterator[ArenaStore]:
        """All of them, the shared one first."""
        return (part for _, part in self.named_parts())

    def named_parts(self) -> Iterator[tuple[str | None, ArenaStore]]:
        """Each with the only namespace that sees it; None: every one that is not isolated."""
        yield None, self._shared
        yield from self._isolated.items()

    def part(self, namespace: str) -> ArenaStore:
        return self._isolated.get(namespace, self._shared)

    @property
    def max_bytes(self) -> int:
        return sum(part.max_bytes for part in self.parts())

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts())

    @property
    def counters(self) -> StoreCounters:
        """Sums, as of now."""
        found = StoreCounters()
        for part in self.parts():
            for name, count in vars(part.counters).items():
                setattr(found, name, getattr(found, name) + count)
        return found

    def get(self, namespace: str, key: bytes) -> EncodedItem | None:
        return self.part(namespace).get(namespace, key)

    def peek(self, namespace: str, key: bytes) -> EncodedItem | None:
        return self.part(namespace).peek(namespace, key)

    def hold(self, namespace: str, key: bytes, *, is_lookup: bool = True) -> Held | None:
        return self.part(namespace).hold(namespace, key, is_lookup=is_lookup)

    def begin_put(self, namespace: str, item: EncodedItem) -> Writing | None:
        return self.part(namespace).begin_put(namespace, item)

    def finish_put(self, writing: Writing) -> None:
        self.part(writing.namespace).finish_put(writing)

    def cancel_put(self, writing: Writing) -> None:
        self.part(writing.namespace).cancel_put(writing)

    def close(self) -> None:
        """Closes every arena. Twice is once."""
        for part in self.parts():
            part.close()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every part is sound and no isolated item lies in another's arena."""
        for namespace, part in self.named_parts():
            part.check_integrity()
            for found in part.namespaces():
                assert self.part(found) is part, f"rows of {found!r} lie in the arena of {namespace!r}"


def open_host_partitions(shared_bytes: int, isolated: Mapping[str, int]) -> PartitionedStore:
    """Arenas in host memory: takes and zeroes all of it, which is a matter of seconds for gigabytes. Raises
    ConfigurationError when the host lacks the memory."""
    opened: list[ArenaStore] = []
    try:
        for num_bytes in (shared_bytes, *isolated.values()):
            opened.append(ArenaStore(host_arena(num_bytes)))  # noqa: PERF401  # known when one fails
    except BaseException:
        for part in opened:
            part.close()
        raise
    return PartitionedStore(opened[0], dict(zip(isolated, opened[1:], strict=True)))


def host_arena(num_bytes: int) -> Arena:
    """An arena whose control page has places for as many items as its bytes are good for."""
    num_slots = min(MAX_SLOTS, max(MIN_SLOTS, num_bytes // BYTES_PER_SLOT))
    return Arena(HostMemory(num_bytes), max_slots=num_slots)
