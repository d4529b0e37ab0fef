"""Which arena a namespace's rows lie in: one of its own where it is isolated, else the one that all share.

Owns the mapping and the sums over it. Whoever maps an arena can read all of it, so an isolated namespace's
rows are never written where another's readers could see them. Not thread-safe: used from the event loop
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from encoder_service.store.arena import Arena
from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.cuda_memory import CudaMemory
from encoder_service.store.embedding_store import Held, StoreCounters, Tier, Writing
from encoder_service.store.host_memory import HostMemory
from encoder_service.store.integrity import Checked
from encoder_service.types import EncodedItem

# One place in the control page for so many bytes, eight bytes each: rows of an image take more.
BYTES_PER_SLOT = 16 * 1024
MIN_SLOTS, MAX_SLOTS = 64, 65_536


class PartitionedStore(Checked):
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

    @property
    def isolated(self) -> frozenset[str]:
        """The namespaces that have an arena of their own."""
        return frozenset(self._isolated)

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

    def hold_in(self, tier: Tier, namespace: str, key: bytes) -> Held | None:
        """``hold`` of rows that are in this kind of memory. Not finding them is no miss: whoever asks goes on
        to ``hold``."""
        part = self.part(namespace)
        is_there = part.arena.geometry.kind == tier and part.peek(namespace, key) is not None
        return part.hold(namespace, key) if is_there else None

    def reserve(self, namespace: str, item: EncodedItem) -> None:
        """None: the engine's rows come through memory of its own."""

    def begin_put(self, namespace: str, item: EncodedItem) -> Writing | None:
        return self.part(namespace).begin_put(namespace, item)

    def finish_put(self, writing: Writing) -> None:
        self.part(writing.namespace).finish_put(writing)

    def cancel_put(self, writing: Writing) -> None:
        self.part(writing.namespace).cancel_put(writing)

    async def placed(self, held: Held, namespace: str, tier: Tier) -> Held:
        """Where they are: there is one tier."""
        del namespace, tier
        return held

    def close(self) -> None:
        """Closes every arena. Twice is once."""
        for part in self.parts():
            part.close()

    def integrity_steps(self) -> Iterator[None]:
        """Every part is sound, and no isolated item lies in another's arena."""
        for namespace, part in self.named_parts():
            yield from part.integrity_steps()
            for found in part.namespaces():
                assert self.part(found) is part, f"rows of {found!r} lie in the arena of {namespace!r}"


def open_partitions(
    make_arena: Callable[[int], Arena],
    shared_bytes: int,
    isolated: Mapping[str, int],
    weights: Mapping[str, float] | None = None,
) -> PartitionedStore:
    """An arena that namespaces share by ``weights`` (``shares.FairShares``), and one for each isolated one of
    its bytes. Raises what ``make_arena`` does; nothing is left open then."""
    opened: list[ArenaStore] = []
    try:
        opened.append(ArenaStore(make_arena(shared_bytes), weights=weights))
        for num_bytes in isolated.values():
            opened.append(ArenaStore(make_arena(num_bytes)))  # noqa: PERF401  # known when one fails
    except BaseException:
        for part in opened:
            part.close()
        raise
    return PartitionedStore(opened[0], dict(zip(isolated, opened[1:], strict=True)))


def open_host_partitions(
    shared_bytes: int,
    isolated: Mapping[str, int],
    weights: Mapping[str, float] | None = None,
    *,
    pin: bool = False,
) -> PartitionedStore:
    """``open_partitions`` of ``host_arena``s. Raises ConfigurationError."""
    return open_partitions(
        partial(host_arena, pin=True) if pin else host_arena, shared_bytes, isolated, weights
    )


def open_device_partitions(
    device: torch.device,
    shared_bytes: int,
    isolated: Mapping[str, int],
    weights: Mapping[str, float] | None = None,
) -> PartitionedStore:
    """``open_partitions`` of ``device_arena``s. Raises ConfigurationError."""
    return open_partitions(partial(device_arena, device=device), shared_bytes, isolated, weights)


def host_arena(num_bytes: int, *, pin: bool = False) -> Arena:
    """An arena in host memory: takes and zeroes all of it, which is a matter of seconds for gigabytes. pin:
    for copies by a GPU. Raises ConfigurationError when the host lacks the memory."""
    return Arena(HostMemory(num_bytes, pin=pin), max_slots=_num_slots(num_bytes))


def device_arena(num_bytes: int, device: torch.device) -> Arena:
    """An arena in a GPU's memory. Raises ConfigurationError where that cannot be had or exported."""
    return Arena(CudaMemory(num_bytes, device), max_slots=_num_slots(num_bytes))


def _num_slots(num_bytes: int) -> int:
    """Places in the control page for as many items as the bytes are good for."""
    return min(MAX_SLOTS, max(MIN_SLOTS, num_bytes // BYTES_PER_SLOT))
