"""The arena: device or host memory of fixed size, divided into slots, that other processes map read-only.

Owns the slots: their bytes, their generations, the number of holders of each within this process, and the
order of the writer's steps (``drop``, ``allocate``, ``publish``, ``index``). A slot lives from ``allocate``
until its last holder drops it. Holders are the store's entry, a write in progress, a copy between tiers and a
delivery. Readers in other processes hold nothing: they copy the rows and then compare the generation
(``vision_encoder.layout.control_page``). ``tier`` decides which rows are kept.

Not thread-safe: used from the event loop only. Views are plain tensors and may be used on any thread.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol, TypeAlias

import structlog
import torch

from encoder_service.errors import InternalError
from encoder_service.store.allocator import ALIGNMENT_BYTES, FreeingPlan, RangeAllocator
from encoder_service.store.control_page import ControlPage
from encoder_service.store.directory import Directory
from encoder_service.types import EncodedItem
from vision_encoder.layout.control_page import PageHeader, Probe
from vision_encoder.layout.directory import Record, namespace_tag

log = structlog.get_logger(__name__)

TierName: TypeAlias = Literal["device", "host"]

PROBE_BYTES = 4096


class ArenaMemory(Protocol):
    """Memory that other processes can map. Implemented by ``HostMemory`` and ``CudaMemory``.

    device_uuid: "GPU-..." as NVML writes it; empty for the host. tensor: uint8 [size_bytes] over the memory,
    from the start of its storage; a tensor made from it keeps the memory mapped after ``close``. export_fd:
    returns a new descriptor, which the caller closes. synchronize: waits for work in progress on the memory.
    """

    @property
    def kind(self) -> TierName: ...
    @property
    def device_uuid(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def tensor(self) -> torch.Tensor: ...
    def export_fd(self) -> int: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """A range of the arena and its index in the control page, for one content. Later content in the same
    bytes has another Slot."""

    index: int
    offset_bytes: int
    num_bytes: int


class Arena:
    """Slots in shared memory. A process that maps an arena can read all of it."""

    def __init__(self, memory: ArenaMemory, *, max_slots: int) -> None:
        """Takes over the memory: ``close`` closes it. max_slots: slots of the control page. A probe takes
        PROBE_BYTES of the memory. Raises InternalError if no room remains beside it."""
        self._memory = memory
        self._allocator = RangeAllocator(memory.size_bytes)
        self._vectors: dict[torch.dtype, torch.Tensor] = {}
        self._holders: dict[Slot, int] = {}
        self._free_indexes = deque(range(max_slots))
        self._closed = False
        self.kind = memory.kind
        self.device_uuid = memory.device_uuid
        self.size_bytes = memory.size_bytes
        self.num_slots = max_slots
        self.probe = self._write_probe(os.urandom(PROBE_BYTES))
        # Both are random for every arena, so that descriptors of two arenas cannot be confused.
        self.arena_id = arena_id = os.urandom(16)
        self.instance = int.from_bytes(os.urandom(8), "little")
        self.page = ControlPage(PageHeader(self.arena_id, self.instance, max_slots, self.probe))
        self.directory = Directory(arena_id=self.arena_id, instance=self.instance, num_slots=max_slots)
        self._tag = lru_cache(maxsize=1024)(lambda namespace: namespace_tag(arena_id, namespace))

    def __len__(self) -> int:
        """Number of slots in use."""
        return len(self._holders)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def capacity_bytes(self) -> int:
        """The size of the largest slot that an empty arena can hold."""
        return self._allocator.size_bytes - PROBE_BYTES

    @property
    def free_bytes(self) -> int:
        return self._allocator.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest contiguous free range."""
        return self._allocator.largest_hole_bytes

    def freeing_plan(self) -> FreeingPlan:
        """A plan that computes the holes that freeing slots, given by offset, would leave."""
        return self._allocator.plan()

    # -- the writer's steps ----------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> Slot | None:
        """A slot with an even generation and one holder, the caller. None if no range or no index is free, or
        if the arena is closed."""
        if self._closed or not self._free_indexes:
            return None
        offset = self._allocator.allocate(num_bytes)
        if offset is None:
            return None
        slot = Slot(self._free_indexes.popleft(), offset, num_bytes)
        self._holders[slot] = 1
        return slot

    def publish(self, slot: Slot) -> int:
        """Makes the slot's generation odd and returns it. Call once per slot, when its rows are complete and
        the event of the work that wrote them has passed."""
        self._check(slot)
        return self.page.publish(slot.index)

    def index(self, slot: Slot, namespace: str, item: EncodedItem) -> None:
        """Lists a published slot in the directory, replacing an entry of the same name, until ``unindex`` or
        until its last holder drops it. A clip with timestamps is not listed, because a directory record has
        no room for them."""
        generation = self.generation(slot)
        if generation % 2 == 0:
            raise InternalError(f"slot {slot.index} has no readable rows to list", slot=slot.index)
        if item.clip is not None:
            return
        spec = item.spec
        self.directory.put(
            Record(
                key=item.key,
                tag=self._tag(namespace),
                generation=generation,
                offset_bytes=slot.offset_bytes,
                rows_bytes=spec.num_bytes,
                grid=item.grid,
                num_rows=spec.num_rows,
                width=spec.width,
                dtype=str(spec.dtype).removeprefix("torch."),
                num_deepstack_levels=spec.num_deepstack_levels,
                content_digest=item.content_digest,
                slot_index=slot.index,
            )
        )

    def unindex(self, slot: Slot) -> None:
        """Removes the slot from the directory if it is listed."""
        self._check(slot)
        self.directory.remove(slot.index)

    def hold(self, slot: Slot) -> None:
        """Adds a holder. Raises InternalError for a slot that was freed."""
        self._check(slot)
        self._holders[slot] += 1

    def drop(self, slot: Slot) -> None:
        """Removes a holder. The last one frees the slot: the generation becomes even, and only then the range
        returns to the allocator."""
        self._check(slot)
        self._holders[slot] -= 1
        if self._holders[slot]:
            return
        if not self._closed:
            self.page.retire(slot.index)
            self.directory.remove(slot.index)
        del self._holders[slot]
        self._free_indexes.append(slot.index)
        self._allocator.free(slot.offset_bytes)

    # -- slots -----------------------------------------------------------------------------------------

    def generation(self, slot: Slot) -> int:
        self._check(slot)
        return self.page.generation(slot.index)

    def slots(self) -> list[Slot]:
        """The slots in use."""
        return list(self._holders)

    def num_holders(self, slot: Slot) -> int:
        """Number of holders; 0 for a slot that was freed."""
        return self._holders.get(slot, 0)

    def view(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The slot's first bytes as a tensor, without a copy. Valid while the slot is held. Raises
        InternalError if the slot is smaller or was freed, or if the arena is closed."""
        self._check(slot)
        strides = [*itertools.accumulate(shape[:0:-1], operator.mul, initial=1)][::-1]
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > slot.num_bytes:
            raise InternalError(
                f"{tuple(shape)} of {dtype} are {num_bytes} bytes, slot {slot.index} has {slot.num_bytes}",
                found=num_bytes,
                allowed=slot.num_bytes,
            )
        # One operation of torch, because each releases the interpreter's lock, which decoding threads take.
        return self._whole(dtype).as_strided(shape, strides, slot.offset_bytes // dtype.itemsize)

    def _whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The memory as a vector. Raises InternalError if the arena is closed."""
        if dtype not in self._vectors:
            with torch.inference_mode(False):  # the caller's would hold for all later views
                self._vectors[dtype] = self._memory.tensor.view(dtype)
        return self._vectors[dtype]

    # -- the arena as a whole --------------------------------------------------------------------------

    def export_all(self) -> tuple[int, int, int]:
        """Descriptors of the memory, the control page and the directory, which the caller closes. Raises
        InternalError after ``close`` and for memory that is not exported; OSError if the process has no
        descriptors left."""
        descriptors: list[int] = []
        try:
            for owner in (self._memory, self.page, self.directory):
                descriptors.append(owner.export_fd())  # noqa: PERF401  # closed when a later one fails
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        data, page, directory = descriptors
        return data, page, directory

    def synchronize(self) -> None:
        """Waits for work in progress on the memory. Blocks. May be called on any thread."""
        self._memory.synchronize()

    def close(self) -> None:
        """Retires every slot, sets the closed flag and releases the memory. Holders may still drop their
        slots. Tensors stay valid: the memory is unmapped with the last of them. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.page.close()
        self.directory.close()
        try:
            self._memory.synchronize()
        except Exception as error:  # a failed device runs no more work, so the memory can be closed
            log.warning("the device of an arena failed before its end", error=str(error).partition("\n")[0])
        self._vectors.clear()
        self._memory.close()

    def _check(self, slot: Slot) -> None:
        if slot not in self._holders:
            raise InternalError(
                f"slot {slot.index} at offset {slot.offset_bytes} was freed; {len(self)} slots are in use",
                slot=slot.index,
                offset_bytes=slot.offset_bytes,
            )

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
