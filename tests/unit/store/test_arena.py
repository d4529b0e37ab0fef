"""The arena in host memory: slots, generations, descriptors, and what an importer can and cannot do."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import resource
from collections.abc import Iterator

import pytest
import torch

from encoder_service.errors import ConfigurationError, InternalError
from encoder_service.store.arena import PROBE_BYTES, Arena, Slot
from encoder_service.store.host_memory import HostMemory, SealedFile, available_bytes
from tests.reference_reader import reader_of
from tests.unit.store.integrity import check_arena
from vision_encoder.layout.control_page import LayoutError, PageHeader, pack_header, read_header

SIZE = 1 << 18
MAX_SLOTS = 32


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(HostMemory(SIZE), max_slots=MAX_SLOTS)
    yield arena
    check_arena(arena)
    arena.close()


def slot_of(arena: Arena, num_bytes: int) -> Slot:
    slot = arena.allocate(num_bytes)
    assert slot is not None
    return slot


@contextlib.contextmanager
def descriptor(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def test_a_slot_is_freed_by_its_last_holder(arena: Arena) -> None:
    free_bytes = arena.free_bytes
    slot = slot_of(arena, 1000)
    arena.hold(slot)
    arena.drop(slot)
    assert arena.num_holders(slot) == 1
    check_arena(arena)
    arena.drop(slot)
    assert (arena.num_holders(slot), len(arena), arena.free_bytes) == (0, 0, free_bytes)


def test_a_freed_slot_is_refused_even_when_its_range_is_allocated_again(arena: Arena) -> None:
    slots = [slot_of(arena, 512) for _ in range(MAX_SLOTS)]
    arena.drop(slots[3])
    again = slot_of(arena, 512)
    assert (again.index, again.offset_bytes) == (slots[3].index, slots[3].offset_bytes)
    for use in (
        arena.hold,
        arena.drop,
        arena.publish,
        arena.generation,
        lambda slot: arena.view(slot, (1,), torch.uint8),
    ):
        with pytest.raises(InternalError, match=f"offset {slots[3].offset_bytes} was freed; 32 slots"):
            use(slots[3])
    assert arena.num_holders(again) == 1


def test_full_of_bytes_or_of_slots_gives_none(arena: Arena) -> None:
    assert arena.allocate(arena.capacity_bytes + 1) is None
    whole = slot_of(arena, arena.capacity_bytes)
    assert arena.allocate(1) is None
    assert arena.largest_free_bytes == 0
    arena.drop(whole)
    slots = [slot_of(arena, 1) for _ in range(MAX_SLOTS)]
    assert arena.allocate(1) is None
    for slot in slots:
        arena.drop(slot)
    assert arena.largest_free_bytes == arena.free_bytes


def test_views_have_shape_and_dtype_without_a_copy(arena: Arena) -> None:
    slot = slot_of(arena, 4 * 6 * 2)
    rows = torch.randn(4, 6).bfloat16()
    view = arena.view(slot, (4, 6), torch.bfloat16)
    assert view.data_ptr() % 256 == 0
    view.copy_(rows)
    assert torch.equal(arena.view(slot, (24,), torch.bfloat16), rows.flatten())
    with torch.inference_mode():
        arena.view(slot, (4, 6), torch.bfloat16).zero_()
    assert not view.any()
    with pytest.raises(InternalError, match=r"\(5, 6\) of torch.bfloat16 are 60 bytes, slot 0 has 48"):
        arena.view(slot, (5, 6), torch.bfloat16)


def test_a_first_view_in_inference_mode_leaves_later_ones_writable(arena: Arena) -> None:
    slot = slot_of(arena, 4 * 6 * 2)
    with torch.inference_mode():
        arena.view(slot, (4, 6), torch.bfloat16).fill_(1)
    view = arena.view(slot, (4, 6), torch.bfloat16)
    assert bool((view == 1).all())
    view.zero_()


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(InternalError, match=f"an arena of {PROBE_BYTES} bytes has no room"):
        Arena(HostMemory(PROBE_BYTES), max_slots=1)


# Generations


def test_p21_generations_change_before_reuse_and_never_return(arena: Arena) -> None:
    seen: set[int] = set()
    with reader_of(arena) as reader:
        for _ in range(MAX_SLOTS * 20):
            slot = slot_of(arena, 100)
            assert not reader.is_current(slot.index, arena.generation(slot))
            generation = arena.publish(slot)
            assert generation % 2 == 1
            assert reader.is_current(slot.index, generation)
            arena.drop(slot)
            assert not reader.is_current(slot.index, generation)
            assert generation not in seen
            seen.add(generation)


def test_generations_start_at_random() -> None:
    pages = [Arena(HostMemory(SIZE), max_slots=4) for _ in range(2)]
    starts = [arena.page.generation(index) for arena in pages for index in range(4)]
    assert len(set(starts)) == len(starts)
    assert all(start % 2 == 0 for start in starts)
    for arena in pages:
        arena.close()


def test_a_slot_is_published_once(arena: Arena) -> None:
    slot = slot_of(arena, 100)
    arena.publish(slot)
    with pytest.raises(InternalError, match="slot 0 is published already"):
        arena.publish(slot)
    with pytest.raises(InternalError, match="slot 32 of 32 does not exist"):
        arena.page.generation(MAX_SLOTS)


# Descriptors and importers


def test_no_descriptor_lets_an_importer_write_or_resize(arena: Arena) -> None:
    sizes = arena.size_bytes, arena.page.size_bytes, arena.directory.size_bytes
    for exported, size_bytes in zip(arena.export_all(), sizes, strict=True):
        with descriptor(exported) as fd:
            assert not os.get_inheritable(fd)
            with pytest.raises(PermissionError):
                mmap.mmap(fd, size_bytes)
            with pytest.raises(OSError):
                os.write(fd, b"x")
            with pytest.raises(OSError):
                os.ftruncate(fd, 0)
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)


def test_not_even_a_reopened_descriptor_writes() -> None:
    memory = HostMemory(SIZE)
    with descriptor(memory.export_fd()) as fd:
        try:
            # Succeeds for root: neither mapping nor writing may.
            writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        except PermissionError:
            pass
        else:
            with descriptor(writable):
                for use in (
                    lambda: mmap.mmap(writable, SIZE),
                    lambda: os.write(writable, b"x"),
                    lambda: os.ftruncate(writable, 0),
                ):
                    with pytest.raises(PermissionError):
                        use()
    memory.close()


def test_p35_a_page_of_another_layout_is_refused(arena: Arena) -> None:
    """Every byte of the header is checked, and the size."""
    good = pack_header(PageHeader(arena.arena_id, arena.instance, MAX_SLOTS, arena.probe))
    with descriptor(arena.page.export_fd()) as fd:
        page = os.pread(fd, arena.page.size_bytes, 0)
    assert page.startswith(good)
    assert read_header(page, len(page)).arena_id == arena.arena_id
    for position in range(len(good)):
        damaged = bytearray(page)
        damaged[position] ^= 1
        with pytest.raises(LayoutError):
            read_header(bytes(damaged), len(page))
    for size_bytes in (0, 8, len(page) - 1, len(page) + 8):
        with pytest.raises(LayoutError):
            read_header(page, size_bytes)


# The end


def test_readers_see_the_close_and_views_stay_valid() -> None:
    arena = Arena(HostMemory(SIZE), max_slots=MAX_SLOTS)
    slot = slot_of(arena, 100)
    view = arena.view(slot, (100,), torch.uint8).fill_(9)
    generation = arena.publish(slot)
    with reader_of(arena) as reader:
        assert not reader.closed
        arena.close()
        arena.close()
        assert arena.closed
        assert reader.closed
        assert not reader.is_current(slot.index, generation)
        assert arena.allocate(1) is None
        for use in (arena.export_all, lambda: arena.view(slot, (1,), torch.uint8)):
            with pytest.raises(InternalError, match="closed"):
                use()
        arena.drop(slot)
        check_arena(arena)
        assert bool((view == 9).all())
        # The importer's own mapping outlives the exporter's.
        assert set(reader.data[slot.offset_bytes : slot.offset_bytes + 100]) == {9}


def num_mappings() -> int:
    """Mappings of arenas in this process."""
    with open("/proc/self/maps") as file:
        return sum("memfd:vision-encoder" in line for line in file)


def test_a_closed_arena_leaves_no_descriptor_and_no_mapping() -> None:
    gc.collect()
    descriptors, mappings = len(os.listdir("/proc/self/fd")), num_mappings()
    for _ in range(20):
        arena = Arena(HostMemory(SIZE), max_slots=8)
        view = arena.view(slot_of(arena, 100), (100,), torch.uint8)
        arena.close()
    del arena
    gc.collect()
    assert num_mappings() == mappings + 1, "the last view keeps its memory mapped"
    del view
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors, "others may go meanwhile"
    assert num_mappings() <= mappings


def test_memory_that_the_host_lacks_is_refused_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, the kernel would kill processes once the pages are written."""
    taken: list[str] = []
    monkeypatch.setattr(os, "memfd_create", lambda name, flags: taken.append(name))
    available = available_bytes()
    assert 0 < available < os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    with pytest.raises(ConfigurationError, match=r"bytes of host memory are more than the \d+"):
        HostMemory(1 << 61)
    assert taken == []


def test_memory_that_the_kernel_refuses_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        ConfigurationError, match=r"8192 bytes .* could not be allocated: No space left"
    ) as caught:
        SealedFile("test", 8192)
    assert caught.value.details["errno"] == "ENOSPC"
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_an_older_kernel_seals_the_size_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    add_seals = fcntl.fcntl

    def without_future_write(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_ADD_SEALS and argument & 0x10:
            raise OSError(errno.EINVAL, "Invalid argument")
        return add_seals(fd, command, argument)

    monkeypatch.setattr("encoder_service.store.host_memory.fcntl.fcntl", without_future_write)
    memory = HostMemory(SIZE)
    with descriptor(memory.export_fd()) as fd:
        assert add_seals(fd, fcntl.F_GET_SEALS) == (
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        with pytest.raises(PermissionError):
            mmap.mmap(fd, SIZE)
    memory.close()


def test_shared_memory_has_its_pages_before_the_first_rows() -> None:
    """A first copy of rows would otherwise wait for the kernel, about half a millisecond a MiB."""
    memory = HostMemory(8 << 20)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory.tensor.numpy().fill(1)
    num_faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert num_faults < memory.size_bytes // mmap.PAGESIZE // 4
    memory.close()
