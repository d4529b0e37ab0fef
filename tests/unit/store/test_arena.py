"""The arena in host memory: slots, generations, descriptors, and what an importer can and cannot do."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from encoder_service.errors import ConfigurationError, InternalError
from encoder_service.store import control_page
from encoder_service.store.arena import PROBE_BYTES, Arena, Slot
from encoder_service.store.control_page import ControlPage
from encoder_service.store.host_memory import HostMemory, SealedFile, available_bytes
from lm_adapter.transport.control_page import ControlPageReader
from lm_adapter.transport.mapping import Mapping, MappingFailed, map_host

SIZE = 1 << 18
MAX_SLOTS = 32


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(HostMemory(SIZE), max_slots=MAX_SLOTS)
    yield arena
    arena.check_integrity()
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


def mapping_of(arena: Arena) -> Mapping:
    with descriptor(arena.export_fd()) as fd:
        return map_host(fd, arena.geometry.size_bytes)


def reader_of(arena: Arena) -> ControlPageReader:
    with descriptor(arena.export_page_fd()) as fd:
        return ControlPageReader(fd, arena.geometry.page_bytes, arena_id=arena.arena_id)


# Slots


def test_a_slot_is_freed_by_its_last_holder(arena: Arena) -> None:
    free_bytes = arena.free_bytes
    slot = slot_of(arena, 1000)
    arena.hold(slot)
    assert not arena.drop(slot)
    assert arena.num_holders(slot) == 1
    arena.check_integrity()
    assert arena.drop(slot)
    assert (arena.num_holders(slot), len(arena), arena.free_bytes) == (0, 0, free_bytes)


def test_a_freed_slot_is_refused_even_when_its_place_is_taken_again(arena: Arena) -> None:
    slots = [slot_of(arena, 512) for _ in range(MAX_SLOTS)]
    arena.drop(slots[3])
    again = slot_of(arena, 512)
    assert (again.index, again.offset_bytes) == (slots[3].index, slots[3].offset_bytes)
    for use in (
        arena.hold,
        arena.drop,
        arena.publish,
        arena.revoke,
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
    assert arena.largest_hole_bytes == 0
    arena.drop(whole)
    slots = [slot_of(arena, 1) for _ in range(MAX_SLOTS)]
    assert arena.num_free_slots == 0
    assert arena.allocate(1) is None
    for slot in slots:
        arena.drop(slot)
    assert arena.num_free_slots == MAX_SLOTS
    assert arena.fragmentation == 0.0


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


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(InternalError, match=f"an arena of {PROBE_BYTES} bytes has no room"):
        Arena(HostMemory(PROBE_BYTES), max_slots=1)


# Generations


def test_p21_generations_change_before_reuse_and_never_return(arena: Arena) -> None:
    reader = reader_of(arena)
    seen: set[int] = set()
    for _ in range(MAX_SLOTS * 20):
        slot = slot_of(arena, 100)
        assert not arena.published(slot)
        assert not reader.unchanged(slot.index, arena.generation(slot))
        generation = arena.publish(slot)
        assert generation % 2 == 1
        assert reader.unchanged(slot.index, generation)
        revoked = arena.revoke(slot)
        assert revoked > generation
        assert not reader.unchanged(slot.index, generation)
        assert reader.unchanged(slot.index, revoked)
        arena.drop(slot)
        assert not reader.unchanged(slot.index, revoked)
        assert seen.isdisjoint({generation, revoked})
        seen.update({generation, revoked})
    reader.close()


def test_generations_start_at_random() -> None:
    pages = [Arena(HostMemory(SIZE), max_slots=4) for _ in range(2)]
    starts = [arena.page.generation(index) for arena in pages for index in range(4)]
    assert len(set(starts)) == len(starts)
    assert all(start % 2 == 0 for start in starts)
    for arena in pages:
        arena.close()


def test_a_slot_is_published_once_and_revoked_only_then(arena: Arena) -> None:
    slot = slot_of(arena, 100)
    with pytest.raises(InternalError, match="slot 0 has no rows to revoke"):
        arena.revoke(slot)
    arena.publish(slot)
    with pytest.raises(InternalError, match="slot 0 is published already"):
        arena.publish(slot)
    with pytest.raises(InternalError, match="slot 32 of 32 does not exist"):
        arena.page.generation(MAX_SLOTS)


# Descriptors and importers


def test_an_importer_reads_what_was_written_before_and_after_it_mapped(arena: Arena) -> None:
    slot = slot_of(arena, 3000)
    rows = torch.randn(25, 30)
    arena.view(slot, (25, 30), torch.float32).copy_(rows)
    mapping = mapping_of(arena)
    window = mapping.tensor[slot.offset_bytes : slot.offset_bytes + 3000].view(torch.float32)
    assert torch.equal(window, rows.flatten())
    arena.view(slot, (25, 30), torch.float32).mul_(2)
    assert torch.equal(window, rows.flatten() * 2)
    mapping.close()


def test_the_probe_matches_and_a_wrong_read_does_not(arena: Arena) -> None:
    mapping, reader = mapping_of(arena), reader_of(arena)
    assert (reader.probe.offset_bytes, reader.probe.num_bytes) == (0, PROBE_BYTES)
    assert reader.probe.sha256 == arena.geometry.probe.sha256
    data = bytes(mapping.tensor[:PROBE_BYTES].numpy())
    assert reader.probe.matches(data)
    assert not reader.probe.matches(data[:-1])
    assert not reader.probe.matches(bytes(PROBE_BYTES))
    mapping.close()
    reader.close()


def test_no_descriptor_lets_an_importer_write_or_resize(arena: Arena) -> None:
    for export, size_bytes in (
        (arena.export_fd, arena.geometry.size_bytes),
        (arena.export_page_fd, arena.geometry.page_bytes),
    ):
        with descriptor(export()) as fd:
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
    if not memory.write_sealed:
        pytest.skip("this kernel does not know F_SEAL_FUTURE_WRITE (Linux 5.1)")
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


def test_writing_through_a_mapping_kills_the_writer_alone(arena: Arena) -> None:
    slot = slot_of(arena, 1000)
    rows = arena.view(slot, (1000,), torch.uint8).fill_(7)
    code = (
        "import sys, torch\n"
        "from lm_adapter.transport.mapping import map_host\n"
        "mapping = map_host(int(sys.argv[1]), int(sys.argv[2]))\n"
        "assert mapping.tensor[int(sys.argv[3])] == 7\n"
        "print('read', flush=True)\n"
        "mapping.tensor[int(sys.argv[3])] = 8\n"
    )
    with descriptor(arena.export_fd()) as fd:
        completed = subprocess.run(
            [sys.executable, "-c", code, str(fd), str(SIZE), str(slot.offset_bytes)],
            env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
            pass_fds=[fd],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert completed.stdout == "read\n", completed.stderr
    assert completed.returncode == -11
    assert bool((rows == 7).all())


def test_descriptors_are_the_callers_to_close(arena: Arena) -> None:
    first, second = arena.export_fd(), arena.export_fd()
    assert first != second
    os.close(first)
    with descriptor(second) as fd:
        assert os.fstat(fd).st_size == SIZE


def test_memory_that_could_shrink_is_not_mapped() -> None:
    with descriptor(os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)) as fd:
        os.ftruncate(fd, 4096)
        with pytest.raises(MappingFailed, match="seals 0x0, 0x6 are needed"):
            map_host(fd, 4096)
    with SealedBytes() as fd:
        for size_bytes in (0, 4096, 16384):
            with pytest.raises(MappingFailed, match=f"has 8192 bytes, {size_bytes} were announced"):
                map_host(fd, size_bytes)
    with (
        descriptor(os.open("/proc/self/exe", os.O_RDONLY)) as fd,
        pytest.raises(MappingFailed, match="no memfd"),
    ):
        map_host(fd, os.fstat(fd).st_size)


class SealedBytes:
    """The descriptor of 8192 sealed bytes."""

    def __enter__(self) -> int:
        self.file = SealedFile("test", 8192)
        self.fd = self.file.export_fd()
        return self.fd

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        self.file.close()


@pytest.mark.parametrize(
    ("word", "what"),
    [(0, "magic number"), (1, "version"), (2, "checksum"), (4, "checksum"), (5, "checksum"), (9, "checksum")],
)
def test_a_damaged_page_is_refused(arena: Arena, word: int, what: str) -> None:
    arena.page._words[word] ^= 1
    with pytest.raises(MappingFailed, match=f"control page's {what} is"):
        reader_of(arena)


def test_another_arenas_page_is_refused(arena: Arena) -> None:
    with descriptor(arena.export_page_fd()) as fd:
        with pytest.raises(MappingFailed, match="control page's arena is"):
            ControlPageReader(fd, arena.geometry.page_bytes, arena_id=bytes(16))
        with pytest.raises(MappingFailed, match=r"has 384 bytes, 376 were announced"):
            ControlPageReader(fd, arena.geometry.page_bytes - 8, arena_id=arena.arena_id)
    with SealedBytes() as fd, pytest.raises(MappingFailed, match="control page's magic number is 0"):
        ControlPageReader(fd, 8192, arena_id=arena.arena_id)


def test_both_sides_agree_on_the_pages_layout(arena: Arena) -> None:
    from lm_adapter.transport import control_page as reader_side

    assert reader_side._HEADER.format == control_page.HEADER.format
    assert reader_side._VERSION == control_page.VERSION
    reader = reader_of(arena)
    assert (reader.num_slots, reader.instance) == (MAX_SLOTS, arena.geometry.instance)
    assert control_page.HEADER.size == control_page.CHECKSUM_WORD * control_page.WORD_BYTES
    before = reader.heartbeat
    arena.page.beat()
    assert reader.heartbeat == before + 1
    slot = slot_of(arena, 1)
    generation = arena.publish(slot)
    for index in (-1, MAX_SLOTS, 1 << 40):
        assert not reader.unchanged(index, generation)
    reader.close()
    reader.close()
    assert reader.closed
    assert not reader.unchanged(slot.index, generation)


# The end


def test_closing_tells_importers_and_leaves_views_valid() -> None:
    memory = HostMemory(SIZE)
    arena = Arena(memory, max_slots=MAX_SLOTS)
    slot = slot_of(arena, 100)
    view = arena.view(slot, (100,), torch.uint8).fill_(9)
    generation = arena.publish(slot)
    mapping, reader = mapping_of(arena), reader_of(arena)
    assert not reader.closed
    arena.close()
    arena.close()
    assert arena.closed
    assert reader.closed
    assert not reader.unchanged(slot.index, generation)
    assert arena.allocate(1) is None
    for use in (arena.export_fd, arena.export_page_fd, lambda: arena.view(slot, (1,), torch.uint8)):
        with pytest.raises(InternalError, match="closed"):
            use()
    assert arena.drop(slot)
    arena.check_integrity()
    assert memory.mapped
    assert bool((view == 9).all())
    del view
    gc.collect()
    assert not memory.mapped
    # The importer's own mapping outlives the exporter's.
    assert bool((mapping.tensor[slot.offset_bytes : slot.offset_bytes + 100] == 9).all())
    mapping.close()
    reader.close()


def test_publishing_after_the_end_is_refused() -> None:
    arena = Arena(HostMemory(SIZE), max_slots=1)
    slot = slot_of(arena, 1)
    arena.close()
    with pytest.raises(InternalError, match="slot 0 cannot be published, its arena is closed"):
        arena.publish(slot)


def test_a_mapping_stays_until_its_last_view_is_gone(arena: Arena) -> None:
    mapping = mapping_of(arena)
    view = mapping.tensor[10:20].view(2, 5)
    mapping.close()
    mapping.close()
    with pytest.raises(MappingFailed, match=f"{SIZE} bytes was closed"):
        _ = mapping.tensor
    assert mapping.mapped
    assert view.sum() >= 0
    del view
    gc.collect()
    assert not mapping.mapped


def test_mapping_again_and_again_leaves_no_descriptor_and_no_mapping(arena: Arena) -> None:
    mapping_of(arena).close()
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    mappings = num_mappings()
    for _ in range(50):
        reader_of(arena).close()
        mapping_of(arena).close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert num_mappings() == mappings


def num_mappings() -> int:
    """Of this module's memfds in this process."""
    with open("/proc/self/maps") as file:
        return sum("memfd:vision-encoder" in line for line in file)


def test_arenas_come_and_go_without_a_trace() -> None:
    gc.collect()
    descriptors, mappings = len(os.listdir("/proc/self/fd")), num_mappings()
    for _ in range(20):
        Arena(HostMemory(SIZE), max_slots=8).close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert num_mappings() == mappings


def test_memory_that_the_host_lacks_is_refused_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memfd takes all there is: without the check the kernel would end processes."""
    taken: list[str] = []
    monkeypatch.setattr(os, "memfd_create", lambda name, flags: taken.append(name))
    available = available_bytes()
    assert 0 < available < os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    with pytest.raises(ConfigurationError, match=r"bytes of shared host memory are more than the \d+"):
        HostMemory(1 << 61)
    assert taken == []


def test_memory_that_the_kernel_refuses_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigurationError, match=r"8192 bytes .* could not be had: No space left") as caught:
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
    assert not memory.write_sealed
    with descriptor(memory.export_fd()) as fd:
        assert add_seals(fd, fcntl.F_GET_SEALS) == (
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        with pytest.raises(PermissionError):
            mmap.mmap(fd, SIZE)
    memory.close()


def test_words_are_aligned_for_single_stores(arena: Arena) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena.page._file.mapping))
    assert address % 8 == 0
    assert isinstance(arena.page, ControlPage)
