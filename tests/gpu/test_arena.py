"""The arena on a GPU and its mappings in this process; those of other processes: test_shared_rows."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from encoder_service.store.arena import Arena, Slot
from encoder_service.store.cuda_memory import CudaMemory, device_uuid
from encoder_service.store.host_memory import HostMemory
from lm_adapter.shm import mapping
from lm_adapter.shm.device import DeviceMemory
from tests.unit.store.integrity import check_arena

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
SIZE = 64 << 20


@contextmanager
def arena_of(size_bytes: int = SIZE, max_slots: int = 64) -> Iterator[Arena]:
    arena = Arena(CudaMemory(size_bytes, CUDA), max_slots=max_slots)
    try:
        yield arena
        check_arena(arena)
    finally:
        arena.close()


def filled(arena: Arena, num_bytes: int) -> tuple[Slot, str]:
    """A published slot of random rows, and their SHA-256."""
    slot = arena.allocate(num_bytes)
    assert slot is not None
    rows = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    arena.view(slot, (num_bytes,), torch.uint8).copy_(rows)
    torch.cuda.synchronize()
    arena.publish(slot)
    return slot, hashlib.sha256(bytes(rows.numpy())).hexdigest()


def map_device(arena: Arena, device: torch.device) -> DeviceMemory:
    """The arena through its descriptor, in this process."""
    descriptors = arena.export_all()
    try:
        return DeviceMemory(descriptors[0], arena.size_bytes, device)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes(tensor.cpu().numpy())).hexdigest()


@pytest.mark.whole_device
def test_device_memory_is_beside_torchs_own() -> None:
    torch.zeros(1, device=CUDA)
    torch.cuda.synchronize()
    gc.collect()  # of earlier tests
    allocated = torch.cuda.memory_allocated(CUDA), torch.cuda.memory_reserved(CUDA)
    free_bytes, _ = torch.cuda.mem_get_info(CUDA)
    memory = CudaMemory(SIZE + 1, CUDA)
    assert memory.size_bytes > SIZE
    assert memory.size_bytes % (2 << 20) == 0
    assert memory.device_uuid == device_uuid(0)
    assert memory.device_uuid.startswith(("GPU-", "MIG-"))
    assert not bool(memory.tensor.cpu().any())
    assert free_bytes - torch.cuda.mem_get_info(CUDA)[0] >= SIZE
    view = memory.tensor[256:512]
    memory.close()
    memory.close()
    view.fill_(3)
    torch.cuda.synchronize()
    del view
    gc.collect()
    assert (torch.cuda.memory_allocated(CUDA), torch.cuda.memory_reserved(CUDA)) == allocated
    # Other processes may use the GPU too: a margin of half the arena.
    assert torch.cuda.mem_get_info(CUDA)[0] >= free_bytes - SIZE // 2


@pytest.mark.whole_device
def test_no_descriptor_and_no_memory_stays_behind() -> None:
    # The first export and mapping open what the driver keeps for itself.
    with arena_of() as arena:
        map_device(arena, CUDA).unmap()
    gc.collect()
    free_bytes, _ = torch.cuda.mem_get_info(CUDA)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with arena_of() as arena:
            map_device(arena, CUDA).unmap()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert torch.cuda.mem_get_info(CUDA)[0] >= free_bytes - 2 * SIZE


def test_p23_the_same_process_maps_it_too_on_every_gpu() -> None:
    with arena_of() as arena:
        slot, digest = filled(arena, 3_000_000)
        for index in range(torch.cuda.device_count()):
            mapped = map_device(arena, torch.device("cuda", index))
            rows = mapped.copy(slot.offset_bytes, slot.num_bytes)
            assert rows.device == torch.device("cuda", index)
            assert sha256(rows) == digest
            mapped.unmap()


def test_pinned_host_memory_feeds_the_gpu() -> None:
    memory = HostMemory(SIZE, pin=True)
    arena = Arena(memory, max_slots=4)
    slot = arena.allocate(8 << 20)
    assert slot is not None
    rows = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8, device=CUDA)
    view = arena.view(slot, (8 << 20,), torch.uint8)
    assert view.is_pinned()
    view.copy_(rows, non_blocking=True)
    torch.cuda.synchronize()
    arena.publish(slot)
    descriptors = arena.export_all()
    mapped = mapping.HostMemory(descriptors[0], memory.size_bytes)
    for descriptor in descriptors:
        os.close(descriptor)
    copied = torch.from_numpy(mapped.copy(slot.offset_bytes, slot.num_bytes)).to(CUDA)
    assert torch.equal(copied, rows)
    mapped.unmap()
    del view
    arena.close()
    gc.collect()
    torch.zeros(1, device=CUDA).add_(1)
    torch.cuda.synchronize()
