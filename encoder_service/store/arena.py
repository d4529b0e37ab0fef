"""The arena: one bounded piece of device or host memory, shared read-only with other processes, cut in slots.

Owns the slots: their bytes, their generations, how many hold each, and that the directory lists none that is
not readable. A slot lives from ``allocate`` until its last holder drops it; the store's entry, a delivery in
progress, a writer and a lease are holders alike, so no memory is reused while any of them counts on it. Where
the bytes come from is the memory's (``cuda_memory``, ``host_memory``), which bytes are free the allocator's,
what importers see of it the control page's and the directory's. Which rows are worth keeping is the store's.
Not thread-safe: used from the event loop only, but for views, which are plain tensors.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch

from encoder_service.errors import InternalError
from encoder_service.store.allocator import ALIGNMENT_BYTES, FreeingPlan, RangeAllocator
from encoder_service.store.control_page import ControlPage, Probe
from encoder_service.store.directory import Directory, Listing, namespace_tag
from encoder_service.store.integrity import Checked
from encoder_service.types import EncodedItem

log = structlog.get_logger(__name__)

PROBE_BYTES = 4096
MAX_TAGS = 1024
"""Of namespaces, remembered; they are made again when asked for."""


class ArenaMemory(Protocol):
    """Bytes that other processes can map; ``HostMemory`` and ``CudaMemory`` are the two.

    kind: "host" or "device". device_uuid: "GPU-..." as NVML writes it, empty for the host. tensor: uint8
    [size_bytes] over the memory; a tensor made from it keeps the memory mapped beyond ``close``.
    export_fd: a new descriptor, the caller's to close. synchronize: waits for work in flight on the memory.
    """

    @property
    def kind(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def device_uuid(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def tensor(self) -> torch.Tensor: ...
    def export_fd(self) -> int: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class ArenaGeometry:
    """What an importer needs besides the descriptors. arena_id, instance: random, new with every arena
    ever made, so that a descriptor of one is never taken for another's. device_uuid: empty for the host."""

    arena_id: bytes
    instance: int
    kind: str
    size_bytes: int
    device_uuid: str
    num_slots: int
    page_bytes: int
    probe: Probe
    directory_bytes: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """A range of the arena and its place in the control page, for one tenancy: a later tenant of the same
    bytes has another Slot."""

    index: int
    offset_bytes: int
    num_bytes: int


class Arena(Checked):
    """Slots in shared memory. An arena serves one namespace's readers or those of all that share it:
    whoever maps it can read all of it."""

    def __init__(
        self, memory: ArenaMemory, *, max_slots: int, random_bytes: Callable[[int], bytes] = os.urandom
    ) -> None:
        """Takes the memory over: ``close`` closes it. max_slots bounds the control page. The first
        PROBE_BYTES hold the probe. Raises InternalError for memory that has no room beside it."""
        self._memory = memory
        self._allocator = RangeAllocator(memory.size_bytes)
        self._holders: dict[Slot, int] = {}
        self._slots: list[Slot | None] = [None] * max_slots
        self._free_indexes = deque(range(max_slots))
        self._closed = False
        self.num_changes = 0
        """Another number after every change of a slot."""
        probe = self._write_probe(random_bytes(PROBE_BYTES))
        self.arena_id = random_bytes(16)
        instance = int.from_bytes(random_bytes(8), "little")
        self.page = ControlPage(arena_id=self.arena_id, instance=instance, num_slots=max_slots, probe=probe)
        self.directory = Directory(arena_id=self.arena_id, instance=instance, num_slots=max_slots)
        self._tags: dict[str, int] = {}
        self.geometry = ArenaGeometry(
            arena_id=self.arena_id,
            instance=instance,
            kind=memory.kind,
            size_bytes=memory.size_bytes,
            device_uuid=memory.device_uuid,
            num_slots=max_slots,
            page_bytes=self.page.size_bytes,
            probe=probe,
            directory_bytes=self.directory.size_bytes,
        )

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._holders)

    @property
    def device(self) -> torch.device:
        return self._memory.device

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def capacity_bytes(self) -> int:
        """The largest slot that an empty arena gives."""
        return self._allocator.size_bytes - PROBE_BYTES

    @property
    def free_bytes(self) -> int:
        return self._allocator.free_bytes

    @property
    def largest_hole_bytes(self) -> int:
        return self._allocator.largest_hole_bytes

    def freeing_plan(self) -> FreeingPlan:
        """For looking ahead at the holes that slots would leave, by their offset."""
        return self._allocator.plan()

    @property
    def fragmentation(self) -> float:
        """See ``RangeAllocator.fragmentation``."""
        return self._allocator.fragmentation

    @property
    def num_free_slots(self) -> int:
        """Slots that the control page has room for besides those in use."""
        return len(self._free_indexes)

    def allocate(self, num_bytes: int) -> Slot | None:
        """A slot with one holder, the caller, and no readable rows yet; None when no hole or no place in
        the control page is left."""
        if self._closed or not self._free_indexes:
            return None
        offset = self._allocator.allocate(num_bytes)
        if offset is None:
            return None
        slot = Slot(self._free_indexes.popleft(), offset, num_bytes)
        self.num_changes += 1
        self._slots[slot.index] = slot
        self._holders[slot] = 1
        return slot

    def publish(self, slot: Slot) -> int:
        """The slot's rows are complete, on the device too; their generation. Once per slot."""
        self._check(slot)
        self.num_changes += 1
        return self.page.publish(slot.index)

    def enter(self, slot: Slot, namespace: str, item: EncodedItem) -> None:
        """Lists the slot, whose rows are the item's and published, in the directory, in place of another of
        this name. It is listed until ``strike`` or its last holder drops it. A clip of which more is known
        than a record holds is not: its readers are told with their lease."""
        generation = self.generation(slot)
        if generation % 2 == 0:
            raise InternalError(f"slot {slot.index} has no readable rows to list", slot=slot.index)
        if item.clip is not None:  # a listing has no room for a clip's timestamps: it is read under a lease
            return
        spec = item.spec
        listing = Listing(
            self._tag(namespace),
            item.key,
            item.content_digest,
            spec.num_bytes,
            item.grid,
            spec.num_rows,
            spec.width,
            str(spec.dtype).removeprefix("torch."),
            spec.num_deepstack_levels,
        )
        self.num_changes += 1
        self.directory.put(slot.index, generation, slot.offset_bytes, listing)

    def strike(self, slot: Slot) -> None:
        """The directory lists the slot no more, where it did."""
        self._check(slot)
        self.num_changes += 1
        self.directory.remove(slot.index)

    def published(self, slot: Slot) -> bool:
        """Whether the slot's rows may be read."""
        return self.generation(slot) % 2 == 1

    def generation(self, slot: Slot) -> int:
        """The slot's generation now."""
        self._check(slot)
        return self.page.generation(slot.index)

    def revoke(self, slot: Slot) -> int:
        """Makes every reader's generation of the slot stale while the rows stay; the new generation."""
        self._check(slot)
        self.num_changes += 1
        generation = self.page.revoke(slot.index)
        self.directory.set_generation(slot.index, generation)
        return generation

    def num_holders(self, slot: Slot) -> int:
        """0 for a slot that was freed."""
        return self._holders.get(slot, 0)

    def hold(self, slot: Slot) -> None:
        """One more holder. Raises InternalError for a slot that was freed."""
        self._check(slot)
        self.num_changes += 1
        self._holders[slot] += 1

    def drop(self, slot: Slot) -> bool:
        """One holder less; the last one frees the slot. Whether it did."""
        self._check(slot)
        self.num_changes += 1
        self._holders[slot] -= 1
        if self._holders[slot]:
            return False
        if not self._closed:
            self.page.retire(slot.index)
            self.directory.remove(slot.index)
        del self._holders[slot]
        self._slots[slot.index] = None
        self._free_indexes.append(slot.index)
        self._allocator.free(slot.offset_bytes)
        return True

    def view(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The slot's first bytes as a tensor, without a copy. It holds the memory's mapping, not the slot:
        valid as long as the caller, or someone for it, holds the slot. Raises InternalError when the slot
        is smaller, was freed, or the arena is closed."""
        self._check(slot)
        num_bytes = dtype.itemsize
        for extent in shape:
            num_bytes *= extent
        if num_bytes > slot.num_bytes:
            raise InternalError(
                f"{tuple(shape)} of {dtype} are {num_bytes} bytes, slot {slot.index} has {slot.num_bytes}",
                found=num_bytes,
                allowed=slot.num_bytes,
            )
        end = slot.offset_bytes + num_bytes
        return self._memory.tensor[slot.offset_bytes : end].view(dtype).view(*shape)

    def export_fd(self) -> int:
        """A descriptor of the memory for a namespace's reader; the caller closes it."""
        return self._memory.export_fd()

    def export_page_fd(self) -> int:
        """A descriptor of the control page; the caller closes it."""
        return self.page.export_fd()

    def export_all(self) -> tuple[int, int, int]:
        """Descriptors of the memory, the control page and the directory; the caller closes them."""
        return self.export_fd(), self.export_page_fd(), self.directory.export_fd()

    def synchronize(self) -> None:
        """Waits for work in flight on the memory. Blocks; on any thread."""
        self._memory.synchronize()

    def close(self) -> None:
        """Retires every slot, tells importers, and gives the memory up. Holders may still drop theirs, and
        tensors stay valid: the memory goes with the last of them. Twice is once."""
        if self._closed:
            return
        self._closed = True
        self.num_changes += 1
        self.page.close()
        self.directory.close()
        try:
            self._memory.synchronize()
        except Exception as error:  # a device that failed: nothing runs on it any more
            log.warning("an arena's device failed before it was closed", error=str(error).partition("\n")[0])
        self._memory.close()

    def integrity_steps(self) -> Iterator[None]:
        """Slots, holders, indexes and bytes agree."""
        yield from self._allocator.integrity_steps()
        for slot, holders in self._holders.items():
            assert self._slots[slot.index] is slot
            assert holders > 0
            assert slot.num_bytes <= self._allocator.capacity_bytes(slot.offset_bytes)
            yield
        assert len(self._slots) - self._slots.count(None) == len(self._holders)
        assert len(self._allocator) == len(self._holders) + 1, "the probe is one range"
        seen = bytearray(len(self._slots))
        for index in self._free_indexes:
            assert not seen[index], f"slot {index} is free twice"
            assert self._slots[index] is None, f"slot {index} is free and in use"
            assert self.page.generation(index) % 2 == 0, f"slot {index} is free and readable"
            seen[index] = 1
            yield
        assert len(self._free_indexes) + len(self._holders) == len(self._slots)
        for index in range(len(self._slots)) if self._closed else ():
            assert self.page.generation(index) % 2 == 0, f"slot {index} of a closed arena is readable"
            yield
        yield from self.directory.integrity_steps(self.page.generation)

    def _check(self, slot: Slot) -> None:
        if slot not in self._holders:
            raise InternalError(
                f"slot {slot.index} at offset {slot.offset_bytes} was freed; {len(self)} slots are in use",
                slot=slot.index,
                offset_bytes=slot.offset_bytes,
            )

    def _tag(self, namespace: str) -> int:
        tag = self._tags.get(namespace)
        if tag is None:
            if len(self._tags) >= MAX_TAGS:
                self._tags.clear()
            tag = self._tags[namespace] = namespace_tag(self.arena_id, namespace)
        return tag

    def _write_probe(self, data: bytes) -> Probe:
        offset = self._allocator.allocate(PROBE_BYTES)
        if offset is None or not self._allocator.free_bytes:
            raise InternalError(
                f"an arena of {self._memory.size_bytes} bytes has no room beside a probe of {PROBE_BYTES}; "
                f"the least is {PROBE_BYTES + ALIGNMENT_BYTES}",
                found=self._memory.size_bytes,
                needed=PROBE_BYTES + ALIGNMENT_BYTES,
            )
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._memory.tensor[offset : offset + PROBE_BYTES].copy_(rows)
        self._memory.synchronize()
        return Probe(offset, PROBE_BYTES, hashlib.sha256(data).digest())
