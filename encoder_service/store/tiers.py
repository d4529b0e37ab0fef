"""Two tiers of finished rows: the device's memory, where the engine leaves them, over pinned host memory.

Owns which tier an item's rows are in and how they get from one to the other: what the device tier is about
to evict is copied to the host beforehand, a reader on a GPU gets rows that are only on the host brought back,
and whoever cannot read device memory gets them from the host. Each tier bounds its bytes and evicts by
itself; an item in both is evicted from one without a loss. Not thread-safe: used from the event loop only,
but for the copies, which threads of its own make.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import structlog
import torch

from encoder_service.errors import Draining, StoreFull
from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.embedding_store import Held, StoreCounters, Tier, Writing
from encoder_service.store.integrity import Checked
from encoder_service.store.mover import Move, Mover, read_failure
from encoder_service.store.partitions import PartitionedStore
from encoder_service.types import CacheTier, EncodedItem

log = structlog.get_logger(__name__)

# The part of a device arena that is to be free, or to be on the host as well and so free at once; and how
# much has to be written before that is looked at again.
READY_SHARE = 0.25
LOOK_SHARE = 1 / 32
# At most this part of a host arena is for that: in a smaller one, what is copied next would take the place of
# what was copied just before, every time.
SPILLED_SHARE = 0.5
RETRY_AFTER_MS = 200


@dataclass
class TierCounters:
    """Items copied: spilled ahead of their eviction, promoted for a reader on a GPU, lowered for a reader
    that needs them on the host. unplaced: items for which their device arena had no room. lowered_unkept:
    lowered into memory of their own, since the host tier had no room."""

    spilled: int = 0
    promoted: int = 0
    lowered: int = 0
    lowered_unkept: int = 0
    unplaced: int = 0


class TieredStore(Checked):
    """See ``embedding_store.RowStore``. Closes both tiers. device: without the isolated namespaces that have
    no device memory of their own; their rows are on the host only. max_unkept_bytes: of copies for readers,
    for which the host tier has no room, and one copy; one that is read at a time is made once."""

    def __init__(
        self, host: PartitionedStore, device: PartitionedStore, *, max_unkept_bytes: int = 1 << 30
    ) -> None:
        self.host = host
        self.device = device
        self.tier_counters = TierCounters()
        self.on_copy_error: Callable[[Exception], None] = lambda _: None
        """Told of every copy that failed, which may be the first that is heard of a device's fault."""
        self._max_unkept_bytes = max_unkept_bytes
        self._host_only = frozenset(host.isolated) - frozenset(device.isolated)
        self._mover = Mover()
        self._moves: dict[tuple[str, bytes, Tier], asyncio.Task[bool]] = {}
        self._unkept_copies: dict[tuple[str, bytes], asyncio.Task[EncodedItem]] = {}
        self._unkept: WeakValueDictionary[tuple[str, bytes], EncodedItem] = WeakValueDictionary()
        self._spilling: dict[ArenaStore, asyncio.Task[None]] = {}
        self._written_bytes: dict[ArenaStore, int] = {}
        self._counters = StoreCounters()
        self._closed = False

    def __len__(self) -> int:
        """Entries; an item in both tiers has two."""
        return len(self.host) + len(self.device)

    @property
    def max_bytes(self) -> int:
        return self.host.max_bytes + self.device.max_bytes

    @property
    def num_bytes(self) -> int:
        return self.host.num_bytes + self.device.num_bytes

    @property
    def counters(self) -> StoreCounters:
        """Hits, misses and refusals of the two together; evictions of each."""
        tiers = self.host.counters, self.device.counters
        return replace(
            self._counters,
            evictions=sum(each.evictions for each in tiers),
            evicted_for_others=sum(each.evicted_for_others for each in tiers),
        )

    def named_parts(self) -> Iterator[tuple[str | None, ArenaStore]]:
        """Those of the device, then those of the host; see ``PartitionedStore.named_parts``."""
        yield from self.device.named_parts()
        yield from self.host.named_parts()

    def parts(self) -> Iterator[ArenaStore]:
        return (part for _, part in self.named_parts())

    def part(self, tier: Tier, namespace: str) -> ArenaStore | None:
        """Where a tier keeps a namespace's rows; None where it does not."""
        if tier == "host":
            return self.host.part(namespace)
        return None if namespace in self._host_only else self.device.part(namespace)

    # -- what the pipeline asks ------------------------------------------------------------------------

    def get(self, namespace: str, key: bytes) -> EncodedItem | None:
        found = self._first(namespace, key)
        self._count(found is not None)
        return None if found is None else found.get(namespace, key)

    def peek(self, namespace: str, key: bytes) -> EncodedItem | None:
        found = self._first(namespace, key)
        return None if found is None else found.peek(namespace, key)

    def hold(self, namespace: str, key: bytes, *, is_lookup: bool = True) -> Held | None:
        """From the device tier where the rows are in both."""
        found = self._first(namespace, key)
        if is_lookup:
            self._count(found is not None)
        return None if found is None else found.hold(namespace, key, is_lookup=is_lookup)

    def hold_in(self, tier: Tier, namespace: str, key: bytes) -> Held | None:
        """See ``PartitionedStore.hold_in``."""
        part = self.part(tier, namespace)
        if part is None or part.peek(namespace, key) is None:
            return None
        self._count(True)
        return part.hold(namespace, key)

    def reserve(self, namespace: str, item: EncodedItem) -> Writing | None:
        """Room on the device for rows that the engine will write: of item.rows only shape and dtype count.
        None where there is none; the rows then come through the host and ``begin_put``."""
        part = self.part("device", namespace)
        if part is None:
            return None
        writing = part.begin_put(namespace, item)
        self.tier_counters.unplaced += writing is None
        return writing

    def begin_put(self, namespace: str, item: EncodedItem) -> Writing | None:
        """Rows that are on the host stay there until somebody wants them on the device."""
        writing = self.host.begin_put(namespace, item)
        self._counters.refused += writing is None
        return writing

    def finish_put(self, writing: Writing) -> None:
        part = self._owner(writing)
        part.finish_put(writing)
        if part is self.part("device", writing.namespace):
            self._see_to_room(part, writing)

    def cancel_put(self, writing: Writing) -> None:
        self._owner(writing).cancel_put(writing)

    async def placed(self, held: Held, namespace: str, tier: Tier) -> Held:
        """The same rows in ``tier``, held in place of ``held``, which is given up. A reader that needs the
        host gets them there, in memory of their own where the host tier has no room; where the device tier
        has none, or they could not be copied to it, ``held`` itself is the answer. When it is cancelled or
        raises, ``held`` is still the caller's. Raises StoreFull when such copies take too much memory,
        Draining after ``close``, what copying to the host failed with."""
        if tier_of(held) == tier or (tier == "host" and held.arena is None):
            return held
        part = self.part(tier, namespace)
        if part is None:
            return held
        key = held.item.key
        try:
            is_there = part.peek(namespace, key) is not None or await self._moved(namespace, key, tier)
        except Exception:
            if tier == "host":
                raise
            log.exception("rows could not be copied to the device")
            return held
        # None also when they were evicted between the copy and now.
        found = part.hold(namespace, key) if is_there else None
        if found is None:
            return held if tier == "device" else await self._lowered_unkept(held, namespace)
        held.drop()
        return found

    # -- upkeep ----------------------------------------------------------------------------------------

    def refuse_copies(self) -> None:
        """From now on nothing is moved, and rows are delivered where they are or not at all."""
        self._closed = True

    def wait_for_copies(self) -> None:
        """For those under way, and for everything else that works on the device. Blocks, for ever where the
        device hangs; on any thread, after ``refuse_copies``. Raises what the device failed with."""
        self._mover.close()
        for part in self.device.parts():
            part.arena.synchronize()

    def close(self) -> None:
        """Waits for the copies under way, forgets every item and closes every arena. Twice is once."""
        self._closed = True
        self._mover.close()
        self.device.close()
        self.host.close()

    def integrity_steps(self) -> Iterator[None]:
        """Both tiers are sound, and no namespace's rows lie in device memory that is not for them."""
        yield from self.device.integrity_steps()
        yield from self.host.integrity_steps()
        for _, part in self.device.named_parts():
            assert not part.namespaces() & self._host_only

    def _first(self, namespace: str, key: bytes) -> ArenaStore | None:
        for tier in ("device", "host"):
            part = self.part(tier, namespace)
            if part is not None and part.peek(namespace, key) is not None:
                return part
        return None

    def _count(self, hit: bool) -> None:
        if hit:
            self._counters.hits += 1
        else:
            self._counters.misses += 1

    def _owner(self, writing: Writing) -> ArenaStore:
        """The part whose memory is written."""
        for tier in ("device", "host"):
            part = self.part(tier, writing.namespace)
            if part is not None and part.arena.num_holders(writing.slot):
                return part
        raise AssertionError(f"no arena of namespace {writing.namespace!r} gave this room")

    async def _moved(self, namespace: str, key: bytes, tier: Tier) -> bool:
        """Copies an item into ``tier``, once for all who ask meanwhile; whether it is there now."""
        task = self._moves.get((namespace, key, tier))
        if task is None:
            move = self._begin_move(namespace, key, tier)
            if move is None:
                return False
            task = self._start([move])
        return await asyncio.shield(task)  # a caller that leaves does not end it for the others

    def _start(self, moves: Sequence[Move]) -> asyncio.Task[bool]:
        """Their copies, for all who ask for one of them meanwhile."""
        task = asyncio.get_running_loop().create_task(self._carry_out(moves))
        names = [(move.writing.namespace, move.held.item.key, move.tier) for move in moves]
        self._moves.update(dict.fromkeys(names, task))

        def forget(_: asyncio.Task[bool]) -> None:
            for name in names:
                del self._moves[name]

        task.add_done_callback(forget)
        task.add_done_callback(read_failure)
        return task

    def _begin_move(self, namespace: str, key: bytes, tier: Tier) -> Move | None:
        """Holds both ends of a copy into ``tier``; None where there is nothing to copy, or no room."""
        target, source = self.part(tier, namespace), self.part(other(tier), namespace)
        if target is None or source is None or self._closed:
            return None
        held = source.hold(namespace, key, is_lookup=False)
        writing = None if held is None else target.begin_put(namespace, held.item)
        if held is None or writing is None:
            if held is not None:
                held.drop()
            return None
        return Move(tier, target, held, writing)

    async def _carry_out(self, moves: Sequence[Move]) -> bool:
        """Copies all of them in one go and lets go of their ends. True: what was asked for is there."""
        try:
            await self._copy([(move.writing.target, move.held.item.rows) for move in moves])
        except BaseException:
            for move in moves:
                move.target.cancel_put(move.writing)
            raise
        else:
            for move in moves:
                move.target.finish_put(move.writing)
        finally:
            for move in moves:
                move.held.drop()
        for move in moves:
            if move.tier == "device":
                self.tier_counters.promoted += 1
                self._see_to_room(move.target, move.writing)
            else:
                self.tier_counters.lowered += 1
        return True

    async def _lowered_unkept(self, held: Held, namespace: str) -> Held:
        """A copy in ordinary host memory, which all share who read these rows at a time. Raises StoreFull;
        Draining after ``close``."""
        name = (namespace, held.item.key)
        copying = self._unkept_copies.get(name)
        item = self._unkept.get(name) if copying is None else None
        if item is None:
            if copying is None:
                copying = self._begin_unkept(name, held)
            item = await asyncio.shield(copying)
        held.drop()
        return Held(item)

    def _begin_unkept(self, name: tuple[str, bytes], held: Held) -> asyncio.Task[EncodedItem]:
        if self._closed:
            raise Draining("the service stopped before the rows were delivered")
        num_bytes = held.item.spec.num_bytes
        unkept_bytes = sum(item.spec.num_bytes for item in self._unkept.values())
        if unkept_bytes and unkept_bytes + num_bytes > self._max_unkept_bytes:
            raise StoreFull(
                f"rows for which the host arena has no room take {unkept_bytes} bytes until they are read, "
                f"at most {self._max_unkept_bytes} may; these have {num_bytes}",
                retry_after_ms=RETRY_AFTER_MS,
                held_bytes=unkept_bytes,
                needed_bytes=num_bytes,
                max_bytes=self._max_unkept_bytes,
            )
        item = replace(held.item, rows=torch.empty(held.item.rows.shape, dtype=held.item.rows.dtype))
        self._unkept[name] = item  # counts from now on; nobody takes it before the copy has ended
        copying = asyncio.get_running_loop().create_task(self._copy_unkept(name, item, held.share()))
        self._unkept_copies[name] = copying
        copying.add_done_callback(lambda _: self._unkept_copies.pop(name))
        copying.add_done_callback(read_failure)
        return copying

    async def _copy_unkept(self, name: tuple[str, bytes], item: EncodedItem, source: Held) -> EncodedItem:
        try:
            await self._copy([(item.rows, source.item.rows)])
        except BaseException:
            self._unkept.pop(name, None)
            raise
        finally:
            source.drop()
        self.tier_counters.lowered_unkept += 1
        return item

    async def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        try:
            await self._mover.copy(pairs)
        except Exception as error:
            self.on_copy_error(error)
            raise

    def _see_to_room(self, part: ArenaStore, written: Writing) -> None:
        """After so much was written to a device arena, has what goes next copied to the host."""
        written_bytes = self._written_bytes.get(part, 0) + written.slot.num_bytes
        if written_bytes >= part.max_bytes * LOOK_SHARE and part not in self._spilling and not self._closed:
            written_bytes = 0
            spilling = asyncio.get_running_loop().create_task(self._spill(part, written.namespace))
            self._spilling[part] = spilling
            spilling.add_done_callback(lambda _: self._spilling.pop(part))
        self._written_bytes[part] = written_bytes

    async def _spill(self, part: ArenaStore, namespace: str) -> None:
        """Brings to the host what a namespace that goes on writing would evict next, a batch at a time: what
        is being copied cannot be evicted."""
        ready_bytes = min(part.max_bytes * READY_SHARE, self.host.part(namespace).max_bytes * SPILLED_SHARE)
        lacking_bytes = int(ready_bytes) - part.arena.free_bytes
        if lacking_bytes <= 0:
            return
        try:
            names = deque(part.next_victims(namespace, lacking_bytes))
            while names:
                moves, num_bytes = list[Move](), 0
                while names and (not moves or num_bytes < part.max_bytes * LOOK_SHARE):
                    name = names.popleft()
                    if self.host.peek(*name) is not None or (*name, "host") in self._moves:
                        continue
                    if (move := self._begin_move(*name, "host")) is not None:
                        moves.append(move)
                        num_bytes += move.held.item.spec.num_bytes
                if moves:
                    await asyncio.shield(self._start(moves))
                    self.tier_counters.spilled += len(moves)
        except Exception:  # the rows are still where they were
            log.exception("rows could not be copied to the host ahead of their eviction")


def tier_of(held: Held | None) -> Tier | None:
    """The tier that rows are held in; None for memory of their own."""
    if held is None or held.arena is None or held.slot is None:
        return None
    return "device" if held.arena.geometry.kind == "device" else "host"


def cache_tier(held: Held) -> CacheTier:
    """Which tier rows that are held were found in, as callers are told."""
    return CacheTier.DEVICE if tier_of(held) == "device" else CacheTier.HOST


def other(tier: Tier) -> Tier:
    return "host" if tier == "device" else "device"
