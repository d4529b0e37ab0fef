"""The embedding store in shared memory: each item's rows in a slot of an arena that other processes map.

Owns which rows are worth their slot: in the order of ``use_order``, each namespace with its fair share, but
never rows that a delivery or a lease still holds, since that would free nothing. When those fill the arena,
new rows are refused and nothing is evicted for them in vain. Whose rows go for whom is ``shares``', which
namespaces share an arena ``partitions``'. Not thread-safe: used from the event loop only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from encoder_service.store.allocator import ALIGNMENT_BYTES
from encoder_service.store.arena import Arena, Slot
from encoder_service.store.embedding_store import Held, StoreCounters, Tier, Writing
from encoder_service.store.integrity import Checked
from encoder_service.store.shares import FairShares, Name
from encoder_service.types import EncodedItem


@dataclass(frozen=True, eq=False, slots=True)
class _Entry:
    """item.rows: a view of the slot, of which the entry is one holder."""

    item: EncodedItem
    slot: Slot


class ArenaStore(Checked):
    """See ``embedding_store.RowStore``. Takes the arena over: ``close`` closes it. weights: see
    ``shares.FairShares``."""

    def __init__(self, arena: Arena, *, weights: Mapping[str, float] | None = None) -> None:
        self.arena = arena
        self.shares = FairShares(arena.capacity_bytes, weights)
        self.num_bytes = 0
        self.counters = StoreCounters()
        self._entries: dict[Name, _Entry] = {}
        # A place in the control page is worth this much of the arena, so that many small rows are no way
        # around a share.
        self._place_bytes = arena.capacity_bytes // arena.geometry.num_slots

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def max_bytes(self) -> int:
        return self.arena.capacity_bytes

    def namespaces(self) -> set[str]:
        """Those that have rows here."""
        return self.shares.namespaces()

    def get(self, namespace: str, key: bytes) -> EncodedItem | None:
        """The item, now the most recently used, or None. Its rows may be read while somebody holds them."""
        entry = self._entries.get((namespace, key))
        if entry is None:
            self.counters.misses += 1
            return None
        self.shares.use(namespace, key)
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

    def reserve(self, namespace: str, item: EncodedItem) -> None:
        """None: which arenas an engine writes to is ``tiers``'."""

    async def placed(self, held: Held, namespace: str, tier: Tier) -> Held:
        """Where they are: there is one tier."""
        del namespace, tier
        return held

    def begin_put(self, namespace: str, item: EncodedItem) -> Writing | None:
        """A slot for the item's rows, evicting what ``shares`` says and nobody reads. None when it is larger
        than the arena, or than what readers and other namespaces' shares leave of it."""
        slot = self._make_room(namespace, item.spec.num_bytes)
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
        cost_bytes = self._cost_bytes(writing.slot.num_bytes)
        self.shares.unreserve(writing.namespace, cost_bytes)
        self.arena.publish(writing.slot)
        if name in self._entries:
            self._remove(name)
        given = writing.item
        item = EncodedItem(  # dataclasses.replace takes four times as long
            given.key,
            given.content_digest,
            given.grid,
            writing.target,
            given.num_deepstack_levels,
            given.clip,
        )
        entry = self._entries[name] = _Entry(item, writing.slot)
        self.arena.enter(writing.slot, writing.namespace, entry.item)
        self.shares.keep(*name, cost_bytes)
        self.num_bytes += writing.slot.num_bytes

    def cancel_put(self, writing: Writing) -> None:
        """Gives the slot back."""
        self.shares.unreserve(writing.namespace, self._cost_bytes(writing.slot.num_bytes))
        self.arena.drop(writing.slot)

    def next_victims(self, namespace: str, num_bytes: int) -> list[Name]:
        """What would go, first to last, for num_bytes more of the namespace's. What somebody reads now would
        not, and stands for none of it."""
        names: list[Name] = []
        for name in self.shares.victims(namespace, num_bytes, self._is_unread):
            names.append(name)
            num_bytes -= self._entries[name].slot.num_bytes
            if num_bytes <= 0:
                break
        return names

    def close(self) -> None:
        """Forgets every item and closes the arena. Twice is once."""
        for name in list(self._entries):
            self._remove(name)
        self.arena.close()

    def integrity_steps(self) -> Iterator[None]:
        """The arena is sound, and every entry's rows are readable in a slot of their own."""
        yield from self.arena.integrity_steps()
        yield from self.shares.integrity_steps()
        assert sum(map(self.shares.num_entries, self.namespaces())) == len(self._entries)
        num_bytes, num_images, seen = 0, 0, bytearray(self.arena.geometry.num_slots)
        for (_, key), entry in self._entries.items():
            assert key == entry.item.key
            assert self.arena.published(entry.slot)
            view = self.arena.view(entry.slot, entry.item.rows.shape, entry.item.rows.dtype)
            assert view.data_ptr() == entry.item.rows.data_ptr()
            assert not seen[entry.slot.index], f"slot {entry.slot.index} is two entries'"
            seen[entry.slot.index] = 1
            num_bytes += entry.slot.num_bytes
            num_images += entry.item.clip is None
            yield
        assert self.num_bytes == num_bytes
        num_listed, num_missing = len(self.arena.directory), self.arena.directory.num_unlisted
        assert num_images - num_missing <= num_listed <= num_images

    def _make_room(self, namespace: str, num_bytes: int) -> Slot | None:
        """A slot, whose cost is reserved for the namespace until ``finish_put`` or ``cancel_put``."""
        if num_bytes > self.max_bytes:
            return None
        slot = self.arena.allocate(num_bytes)
        if slot is None:
            victims = self._evictable(namespace, num_bytes)
            if victims is None:
                return None
            for name in victims:
                self._remove(name)
                self.counters.evicted_for_others += name[0] != namespace
            self.counters.evictions += len(victims)
            slot = self.arena.allocate(num_bytes)
            assert slot is not None
        self.shares.reserve(namespace, self._cost_bytes(num_bytes))
        return slot

    def _evictable(self, namespace: str, num_bytes: int) -> list[Name] | None:
        """What goes for num_bytes of the namespace's; None when what may go leaves no hole of that size."""
        if self.arena.closed:
            return None
        names: list[Name] = []
        plan, largest_bytes = self.arena.freeing_plan(), self.arena.largest_hole_bytes
        for name in self.shares.victims(namespace, self._cost_bytes(num_bytes), self._is_unread):
            names.append(name)
            largest_bytes = max(largest_bytes, plan.free(self._entries[name].slot.offset_bytes))
            # Also where only places in the control page lacked: a victim leaves one.
            if largest_bytes >= num_bytes:
                return names
        return None

    def _is_unread(self, name: Name) -> bool:
        return self.arena.num_holders(self._entries[name].slot) == 1

    def _cost_bytes(self, num_bytes: int) -> int:
        """What a slot counts against its namespace's share."""
        return max(_aligned(num_bytes), self._place_bytes)

    def _remove(self, name: Name) -> None:
        entry = self._entries.pop(name)
        self.shares.forget(*name)
        self.num_bytes -= entry.slot.num_bytes
        self.arena.strike(entry.slot)
        self.arena.drop(entry.slot)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
