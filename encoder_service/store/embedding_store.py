"""The embedding store: finished rows by namespace and key, in device memory and in pinned host memory.

Owns which tier an item's rows are in and how they move. ``reserve`` gives the engine memory to write to,
``commit`` makes the rows findable, ``hold`` keeps them in place while this process reads them. Rows that the
device is about to evict are copied to the host beforehand. Rows that are only on the host are copied back for
a reader on a GPU. Each tier limits its bytes and evicts by itself (``tier``). An isolated namespace has its
own arenas, because a process that maps an arena can read all of it. Main and deepstack rows are one tensor
and stay together.

Used from the event loop only, except ``wait_for_copies`` and ``close``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import structlog
import torch

from encoder_service.config import Settings
from encoder_service.errors import ConfigurationError, Draining, InternalError, StoreFull
from encoder_service.store.arena import Arena, Slot, TierName
from encoder_service.store.copies import Copier
from encoder_service.store.cuda_memory import CudaMemory
from encoder_service.store.host_memory import HostMemory
from encoder_service.store.tier import Entry, Name, Tier
from encoder_service.types import EncodedItem

log = structlog.get_logger(__name__)

# Share of an arena that all reservations together may take. It keeps a long queue from evicting rows in use.
RESERVED_SHARE = 1 / 2
# READY_SHARE: share of the device arena that can be overwritten at once: free, or also on the host.
# RECHECK_SHARE: share that is written before this is checked again.
READY_SHARE = 1 / 4
RECHECK_SHARE = 1 / 32
# Most copies ahead of evictions that one step of the event loop begins, or lists when they have ended.
MAX_MOVES = 64
# Share of a host arena that copies made ahead of an eviction may take. With a larger share, in a small arena,
# each copy would evict an earlier one.
SPILLED_SHARE = 1 / 2
# Largest item that is delivered by its location, as a share of the arena. Larger ones are sent inline.
ANNOUNCED_SHARE = 1 / 4
RETRY_AFTER_MS = 200
DEFAULT_DEVICE_ARENA_BYTES = 2 << 30
# Arena bytes per slot of the control page. The rows of an image take more.
BYTES_PER_SLOT = 16 * 1024
MIN_SLOTS, MAX_SLOTS = 64, 65_536


@dataclass(frozen=True)
class Location:
    """Where rows are in an arena. generation: odd; if the slot's generation differs, the rows are gone."""

    arena_id: bytes
    instance: int
    slot_index: int
    generation: int
    offset_bytes: int
    tier: TierName


class PinnedRows:
    """An item whose rows stay in place until ``drop``. tier: None for rows outside the store."""

    def __init__(self, item: EncodedItem, tier: Tier | None = None, entry: Entry | None = None) -> None:
        """tier, entry: where the rows are. The caller must have added a holder of the entry's slot."""
        self.item = item
        self.tier: TierName | None = None if tier is None else tier.arena.kind
        self._tier = tier
        self._entry = entry

    def share(self) -> PinnedRows:
        """The same rows with a separate hold. Raises InternalError after ``drop``."""
        if self._tier is None:
            return PinnedRows(self.item)
        if self._entry is None:
            raise InternalError("rows that were dropped cannot be shared")
        self._tier.arena.hold(self._entry.slot)
        return PinnedRows(self.item, self._tier, self._entry)

    def drop(self) -> None:
        """Ends the hold. Idempotent."""
        entry, self._entry = self._entry, None
        if entry is not None and self._tier is not None:
            self._tier.arena.drop(entry.slot)

    def announce(self) -> Location:
        """The location of the rows, for a reader in another process. From now on they are among the last to
        be evicted, until ``EmbeddingStore.touch`` or for ANNOUNCED_PROTECTION_S. Raises InternalError for
        rows in their own memory, and after ``drop``."""
        if self._tier is None or self._entry is None:
            raise InternalError("these rows are not in an arena and have no location")
        arena, slot = self._tier.arena, self._entry.slot
        self._tier.announce(self._entry)
        return Location(
            arena.arena_id, arena.instance, slot.index, arena.generation(slot), slot.offset_bytes, arena.kind
        )


@dataclass(frozen=True, eq=False)
class Reservation:
    """Memory for an item's rows, held until ``commit``, ``cancel`` or ``abandon``. destination: [R, W] in the
    rows' dtype, uninitialised. is_limited: whether it counts towards RESERVED_SHARE."""

    namespace: str
    expected: EncodedItem
    destination: torch.Tensor
    tier: Tier
    slot: Slot
    is_limited: bool


@dataclass
class StoreCounters:
    """refused: reservations for which there was no room. copies_to_host, copies_to_device: items copied
    between tiers. The tiers count evictions."""

    refused: int = 0
    copies_to_host: int = 0
    copies_to_device: int = 0


class Partition:
    """The tiers of one isolated namespace, or of all others. device: None if rows are on the host only."""

    def __init__(
        self, host: Arena, device: Arena | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.host = Tier(host, clock=clock)
        self.device = None if device is None else Tier(device, self.host, clock=clock)
        self.written_bytes = 0
        """Bytes written to the device since the last check of what to copy ahead."""

    def tiers(self) -> Iterator[Tier]:
        """All tiers, the device's first."""
        if self.device is not None:
            yield self.device
        yield self.host

    def tier(self, name: TierName) -> Tier | None:
        return self.host if name == "host" else self.device


class EmbeddingStore:
    """Rows by namespace and key. A namespace never sees the entries of another."""

    def __init__(
        self,
        shared: Partition,
        isolated: Mapping[str, Partition] | None = None,
        *,
        on_copy_error: Callable[[Exception], bool],
        max_private_bytes: int = 1 << 30,
    ) -> None:
        """Takes over the arenas. shared: the partition of all namespaces that are not isolated.
        on_copy_error: receives the error of every failed copy between tiers and returns whether the device
        has failed. max_private_bytes: limit of copies for which the host arena has no room; a single copy may
        be larger."""
        self._partitions: dict[str | None, Partition] = {None: shared}
        self._partitions.update(isolated or {})
        self._on_copy_error = on_copy_error
        self._max_private_bytes = max_private_bytes
        self._copier = Copier()
        self._moves: dict[tuple[Name, Tier], asyncio.Task[None]] = {}
        self._spills: dict[Tier, asyncio.Task[None]] = {}
        self._private: WeakValueDictionary[int, EncodedItem] = WeakValueDictionary()  # by id
        self._private_copies: set[asyncio.Task[None]] = set()
        self._abandoned: list[object] = []
        self._reserved_bytes: dict[Tier, int] = {}
        self.counters = StoreCounters()
        self._is_frozen = False

    # -- lookup ----------------------------------------------------------------------------------------

    def hold(self, namespace: str, key: bytes) -> PinnedRows | None:
        """The rows with a hold, from the device tier if they are in both tiers. Counts as a use."""
        for tier in self.partition(namespace).tiers():
            entry = tier.find((namespace, key))
            if entry is not None:
                tier.use(entry)
                return _held(tier, entry)
        return None

    def peek(self, namespace: str, key: bytes) -> EncodedItem | None:
        """The item without a hold. Its rows may change as soon as the event loop runs something else."""
        for tier in self.partition(namespace).tiers():
            entry = tier.find((namespace, key))
            if entry is not None:
                return entry.item
        return None

    # -- writing ---------------------------------------------------------------------------------------

    def reserve(self, namespace: str, expected: EncodedItem) -> Reservation | None:
        """Memory for the rows in the device arena, or else in the host arena. expected: the item, with a meta
        tensor of the rows' shape and dtype. Evicts what is needed and never waits. None if the rows are
        larger than the arenas, or if held and reserved rows leave no room."""
        for tier in self.partition(namespace).tiers():
            reserved_bytes = self._reserved_bytes.get(tier, 0)
            needed_bytes = reserved_bytes + expected.spec.num_bytes
            if reserved_bytes and needed_bytes > tier.arena.capacity_bytes * RESERVED_SHARE:
                continue
            reservation = self._reserve_in(tier, namespace, expected, is_limited=True)
            if reservation is not None:
                self._reserved_bytes[tier] = needed_bytes
                return reservation
        self.counters.refused += 1
        return None

    def commit(self, reservation: Reservation) -> PinnedRows:
        """Publishes and lists complete rows, and returns them held for the caller. The event of the work that
        wrote them must have passed. Raises Draining after ``close``."""
        tier, expected = reservation.tier, reservation.expected
        if tier.arena.closed:
            self.cancel(reservation)
            raise Draining("the service stopped before the item was delivered")
        self._unreserve(reservation)
        item = replace(expected, rows=reservation.destination)
        held = _held(tier, tier.insert((reservation.namespace, item.key), item, reservation.slot))
        partition = self.partition(reservation.namespace)
        if tier is partition.device:
            self._copy_next_victims(partition, reservation.slot.num_bytes)
        return held

    def cancel(self, reservation: Reservation) -> None:
        """Returns the memory. Nothing may write to it any more."""
        self._unreserve(reservation)
        reservation.tier.arena.drop(reservation.slot)

    def abandon(self, reservation: Reservation) -> None:
        """Gives up the slot for good, because a failed device may still write to it. Includes ``freeze``."""
        self.freeze()
        self._unreserve(reservation)

    async def insert(self, namespace: str, item: EncodedItem) -> PinnedRows:
        """Copies rows from their own memory into the store if it has room. Otherwise, and after a failed
        copy, holds the rows where they are."""
        source = PinnedRows(item)
        for tier in self.partition(namespace).tiers():
            try:
                is_moved = await self._move(source, namespace, tier)
            except Exception:
                log.exception("rows could not be copied into the store")
                break
            entry = tier.find((namespace, item.key)) if is_moved else None
            if entry is not None:
                return _held(tier, entry)
        return source

    # -- moving between tiers --------------------------------------------------------------------------

    async def ensure_tier(self, held: PinnedRows, namespace: str, tier: TierName) -> PinnedRows:
        """The same rows in ``tier``. Takes over ``held``, which is returned or dropped, even when this
        raises.

        "host" gives rows in host memory, as a separate copy if the host arena has no room. Raises StoreFull
        if such copies take too much memory, Draining after ``freeze``, and the error of a failed copy.
        "device" returns ``held`` itself if the device arena has no room or the copy failed."""
        if held.tier == tier or (tier == "host" and held.tier is None):
            return held
        try:
            in_tier = await self._find_in(held, namespace, tier)
        except BaseException:
            held.drop()
            raise
        if in_tier is not held:
            held.drop()
        return in_tier

    def touch(self, namespace: str, key: bytes, generation: int) -> bool:
        """Records that another process has read rows of this generation. Returns False if they are gone."""
        name, partition = (namespace, key), self.partition(namespace)
        touched = [tier.touch(name, generation) for tier in partition.tiers()]
        return any(touched)

    def max_announced_bytes(self, tier: TierName, namespace: str = "") -> int:
        """The size of the largest rows that are announced in this tier; 0 if there is no such tier."""
        of_kind = self.partition(namespace).tier(tier)
        return 0 if of_kind is None else int(of_kind.arena.capacity_bytes * ANNOUNCED_SHARE)

    # -- figures ---------------------------------------------------------------------------------------

    def partition(self, namespace: str) -> Partition:
        """The tiers that hold the namespace's rows."""
        return self._partitions.get(namespace) or self._partitions[None]

    def arenas(self) -> list[tuple[str | None, Arena]]:
        """All arenas, each with the only namespace that may map it; None for the arenas that all namespaces
        that are not isolated share."""
        return [(name, tier.arena) for name, part in self._partitions.items() for tier in part.tiers()]

    @property
    def num_bytes(self) -> int:
        return sum(tier.num_bytes for tier in self._tiers())

    @property
    def max_bytes(self) -> int:
        return sum(tier.arena.capacity_bytes for tier in self._tiers())

    def num_items(self, tier: TierName) -> int:
        """Number of entries in one tier. An item in both tiers counts in each."""
        return sum(len(entries) for entries in self._tiers() if entries.arena.kind == tier)

    def num_unread(self) -> int:
        """Number of announced rows that are still protected and that no reader has reported as read."""
        return sum(tier.num_unread() for tier in self._tiers())

    @property
    def num_evictions(self) -> int:
        """Number of entries evicted from either tier."""
        return sum(tier.num_evictions for tier in self._tiers())

    @property
    def num_unread_evictions(self) -> int:
        """Number of announced rows evicted while protected, before a reader reported them as read."""
        return sum(tier.num_unread_evictions for tier in self._tiers())

    @property
    def is_copying(self) -> bool:
        """Whether rows are being copied between tiers, or out of the arenas for one caller."""
        return bool(self._moves or self._spills or self._private_copies)

    # -- end -------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Called at the end and after a device fault. From now on nothing is reserved or copied and no slot
        is reused. Rows are delivered from where they are."""
        self._is_frozen = True

    def wait_for_copies(self) -> None:
        """Waits for copies in progress and for all work on the device. Blocks, forever if the device hangs.
        May be called on any thread, after ``freeze``. Raises the device's error."""
        self._copier.close()
        for tier in self._tiers():
            tier.arena.synchronize()

    def close(self) -> None:
        """Waits for copies in progress, removes every item and closes every arena. Idempotent."""
        self.freeze()
        self._copier.close()
        for tier in self._tiers():
            tier.close()

    # -- inside ----------------------------------------------------------------------------------------

    def _tiers(self) -> Iterator[Tier]:
        for partition in self._partitions.values():
            yield from partition.tiers()

    def _reserve_in(
        self, tier: Tier, namespace: str, expected: EncodedItem, *, is_limited: bool
    ) -> Reservation | None:
        slot = None if self._is_frozen else tier.allocate(expected.spec.num_bytes)
        if slot is None:
            return None
        destination = tier.arena.view(slot, expected.rows.shape, expected.rows.dtype)
        return Reservation(namespace, expected, destination, tier, slot, is_limited)

    def _unreserve(self, reservation: Reservation) -> None:
        if reservation.is_limited:
            self._reserved_bytes[reservation.tier] -= reservation.expected.spec.num_bytes

    async def _find_in(self, held: PinnedRows, namespace: str, tier_name: TierName) -> PinnedRows:
        """``held`` itself, or the same rows in the tier with a separate hold."""
        tier, name = self.partition(namespace).tier(tier_name), (namespace, held.item.key)
        if tier is None:
            return held
        try:
            if name in tier or await self._move(held, namespace, tier):
                entry = tier.find(name)  # None if it was evicted again in the meantime
                if entry is not None:
                    tier.use(entry)
                    return _held(tier, entry)
        except Exception:
            if tier_name == "host":
                raise
            log.exception("rows could not be copied to the device")
        return held if tier_name == "device" else await self._private_rows(held)

    async def _move(self, held: PinnedRows, namespace: str, tier: Tier) -> bool:
        """Copies rows into a tier, once for all concurrent callers. Returns False if there is no room."""
        move = self._moves.get(((namespace, held.item.key), tier))
        if move is None:
            begun = self._begin_move(held, namespace, tier)
            if begun is None:
                return False
            move = self._start_moves([begun], tier)
        await asyncio.shield(move)  # the cancellation of one caller does not end the copy for the others
        return True

    def _begin_move(
        self, held: PinnedRows, namespace: str, tier: Tier
    ) -> tuple[PinnedRows, Reservation] | None:
        """Holds both ends of a copy. None if the tier has no room."""
        source = held.share()  # held before the reservation, which could evict it
        reservation = self._reserve_in(tier, namespace, held.item, is_limited=False)
        if reservation is None:
            source.drop()
            return None
        return source, reservation

    def _start_moves(self, moves: Sequence[tuple[PinnedRows, Reservation]], tier: Tier) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._run_moves(moves, tier))
        names = [((target.namespace, target.expected.key), tier) for _, target in moves]
        self._moves.update(dict.fromkeys(names, task))

        def forget(_: asyncio.Task[None]) -> None:
            for name in names:
                del self._moves[name]

        task.add_done_callback(forget)
        task.add_done_callback(_retrieve_error)
        return task

    async def _run_moves(self, moves: Sequence[tuple[PinnedRows, Reservation]], tier: Tier) -> None:
        """Runs the copies and ends their holds. After a failure the holds stay for good, because the device
        may still read one end and write the other."""
        await self._copy([(target.destination, source.item.rows) for source, target in moves])
        for source, reservation in moves:
            source.drop()
            if tier.arena.closed:
                self.cancel(reservation)
            else:
                self.commit(reservation).drop()
        if tier.arena.kind == "device":
            self.counters.copies_to_device += len(moves)
        else:
            self.counters.copies_to_host += len(moves)

    async def _private_rows(self, held: PinnedRows) -> PinnedRows:
        """A copy in pageable host memory for one caller. Raises StoreFull, Draining."""
        if self._is_frozen:
            raise Draining("the service stopped before the rows were delivered")
        num_bytes = held.item.spec.num_bytes
        private_bytes = sum(item.spec.num_bytes for item in self._private.values())
        if private_bytes and private_bytes + num_bytes > self._max_private_bytes:
            raise StoreFull(
                f"rows that the host arena has no room for take {private_bytes} bytes until they are "
                f"delivered, at most {self._max_private_bytes} are allowed; these have {num_bytes}",
                retry_after_ms=RETRY_AFTER_MS,
                held_bytes=private_bytes,
                needed_bytes=num_bytes,
                max_bytes=self._max_private_bytes,
            )
        item = replace(held.item, rows=torch.empty(held.item.rows.shape, dtype=held.item.rows.dtype))
        self._private[id(item)] = item  # counts towards the limit until the last reference is gone
        task = asyncio.get_running_loop().create_task(self._copy_private(item, held.share()))
        self._private_copies.add(task)
        task.add_done_callback(self._private_copies.discard)
        task.add_done_callback(_retrieve_error)
        # A caller that leaves does not end the copy, which reads and writes memory.
        await asyncio.shield(task)
        return PinnedRows(item)

    async def _copy_private(self, item: EncodedItem, source: PinnedRows) -> None:
        try:
            await self._copy([(item.rows, source.item.rows)])
        except BaseException:  # the device may still write to the rows, so they are never freed
            self._abandoned.append(item.rows)
            raise
        source.drop()
        self.counters.copies_to_host += 1

    async def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        try:
            await self._copier.copy(pairs)
        except Exception as error:
            if self._on_copy_error(error):
                self.freeze()
            raise

    def _copy_next_victims(self, partition: Partition, written_bytes: int) -> None:
        """After every RECHECK_SHARE of the device arena that is written, starts to copy the rows that will be
        evicted next to the host."""
        device = partition.device
        assert device is not None
        partition.written_bytes += written_bytes
        if (
            partition.written_bytes >= device.arena.capacity_bytes * RECHECK_SHARE
            and device not in self._spills
            and not self._is_frozen
        ):
            partition.written_bytes = 0
            spill = asyncio.get_running_loop().create_task(self._spill(device, partition.host))
            self._spills[device] = spill
            spill.add_done_callback(lambda _: self._spills.pop(device))

    async def _spill(self, device: Tier, host: Tier) -> None:
        """Copies to the host the rows that the device tier evicts next. Works in batches, since rows are held
        during their copy."""
        capacity_bytes = device.arena.capacity_bytes
        ready_bytes = min(capacity_bytes * READY_SHARE, host.arena.capacity_bytes * SPILLED_SHARE)
        lacking_bytes = int(ready_bytes) - device.arena.free_bytes
        entries = deque(device.next_evicted(lacking_bytes))
        try:
            while entries:
                moves, num_bytes = list[tuple[PinnedRows, Reservation]](), 0
                while entries and len(moves) < MAX_MOVES and num_bytes < capacity_bytes * RECHECK_SHARE:
                    entry = entries.popleft()
                    if (
                        entry.name in host
                        or (entry.name, host) in self._moves
                        or device.find(entry.name) is not entry
                    ):
                        continue
                    source = _held(device, entry)
                    begun = self._begin_move(source, entry.name[0], host)
                    source.drop()
                    if begun is not None:
                        moves.append(begun)
                        num_bytes += entry.slot.num_bytes
                if moves:
                    await asyncio.shield(self._start_moves(moves, host))
        except Exception:  # the rows are still on the device, so nothing is lost
            log.exception("rows could not be copied to the host ahead of their eviction")


def _held(tier: Tier, entry: Entry) -> PinnedRows:
    tier.arena.hold(entry.slot)
    return PinnedRows(entry.item, tier, entry)


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Marks the task's error as retrieved. Waiters get it; without waiters it must not be reported."""
    if not task.cancelled():
        task.exception()


def host_arena(num_bytes: int, *, pin: bool = False, is_exported: bool = True) -> Arena:
    """An arena in host memory; see ``HostMemory``. Raises ConfigurationError."""
    return Arena(HostMemory(num_bytes, pin=pin, is_exported=is_exported), max_slots=_num_slots(num_bytes))


def device_arena(num_bytes: int, device: torch.device) -> Arena:
    """An arena in GPU memory. Raises ConfigurationError if it cannot be allocated or exported."""
    return Arena(CudaMemory(num_bytes, device), max_slots=_num_slots(num_bytes))


def open_store(settings: Settings, *, on_copy_error: Callable[[Exception], bool]) -> EmbeddingStore:
    """The store with the arenas that the settings ask for. They are exported only if there is a broker.
    Blocks: gigabytes of host memory take seconds. Raises ConfigurationError and then leaves nothing open."""
    device, pin = torch.device(settings.device), torch.device(settings.device).type == "cuda"
    is_exported = bool(settings.broker_path)
    host_bytes: dict[str | None, int] = {None: settings.arena_bytes}
    host_bytes.update({name: sizes[0] for name, sizes in settings.isolated_namespaces.items()})
    with ExitStack() as undo:
        on_device = _device_arenas(settings, device)
        for arena in on_device.values():
            undo.callback(arena.close)
        partitions: dict[str | None, Partition] = {}
        for name, num_bytes in host_bytes.items():
            arena = host_arena(num_bytes, pin=pin, is_exported=is_exported)
            undo.callback(arena.close)
            partitions[name] = Partition(arena, on_device.get(name))
        undo.pop_all()
    return EmbeddingStore(
        partitions[None],
        {name: partition for name, partition in partitions.items() if name is not None},
        on_copy_error=on_copy_error,
        max_private_bytes=settings.max_undelivered_bytes,
    )


def _device_arenas(settings: Settings, device: torch.device) -> dict[str | None, Arena]:
    """The device arenas by isolated namespace; None is the key of the shared one. Empty if the settings ask
    for none, or if the device cannot export memory and the settings do not require it. Raises
    ConfigurationError."""
    requested_bytes = settings.device_arena_bytes
    # A CUDA device that does not exist is reported by the model's loader.
    is_requested = settings.broker_path and device.type == "cuda" and requested_bytes != 0
    if not is_requested or not torch.cuda.is_available():
        return {}
    shared_bytes = DEFAULT_DEVICE_ARENA_BYTES if requested_bytes is None else requested_bytes
    device_bytes: dict[str | None, int] = {None: shared_bytes}
    device_bytes.update({name: sizes[1] for name, sizes in settings.isolated_namespaces.items() if sizes[1:]})
    arenas: dict[str | None, Arena] = {}
    try:
        for name, num_bytes in device_bytes.items():
            arenas[name] = device_arena(num_bytes, device)
    except ConfigurationError as error:
        for arena in arenas.values():
            arena.close()
        if requested_bytes is not None or len(device_bytes) > 1:
            raise
        log.warning("rows are not kept in device memory", reason=error.message)
        return {}
    return arenas


def _num_slots(num_bytes: int) -> int:
    return min(MAX_SLOTS, max(MIN_SLOTS, num_bytes // BYTES_PER_SLOT))
