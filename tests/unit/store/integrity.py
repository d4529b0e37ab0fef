"""Checks that the parts of a store agree with one another. Each raises AssertionError if they do not."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from encoder_service.store.allocator import ALIGNMENT_BYTES
from encoder_service.store.arena import PROBE_BYTES, Arena
from encoder_service.store.directory import Directory
from encoder_service.store.embedding_store import EmbeddingStore
from encoder_service.store.tier import Tier
from vision_encoder.layout.control_page import WORD_BYTES
from vision_encoder.layout.directory import (
    FIRST_CELL_WORD,
    MAX_PROBES,
    RECORD,
    cell_matches,
    cell_slot,
    name_hash,
    read_record,
    record_offset,
)


def table_of(directory: Directory) -> bytes:
    """A copy of what readers map."""
    fd = directory.export_fd()
    try:
        return os.pread(fd, directory.size_bytes, 0)
    finally:
        os.close(fd)


def check_directory(directory: Directory, generation_of: Callable[[int], int]) -> None:
    """Every cell leads to a whole record of its slot's generation, and every search for a name finds it."""
    table = table_of(directory)
    cells = np.frombuffer(table, np.uint64, directory.num_cells, FIRST_CELL_WORD * WORD_BYTES)
    mask = directory.num_cells - 1
    taken = np.flatnonzero(cells).tolist()
    assert len(taken) == len(directory) == len({cell_slot(int(cells[cell])) for cell in taken})
    for cell in taken:
        word = int(cells[cell])
        start = record_offset(directory.num_slots, cell_slot(word))
        sequence = int.from_bytes(table[start : start + WORD_BYTES], "little")
        record = read_record(table[start : start + RECORD.size], sequence)
        assert record is not None, f"cell {cell} leads to a record that is not whole"
        assert record.slot_index == cell_slot(word)
        assert record.generation == generation_of(record.slot_index)
        hashed = name_hash(record.key, record.tag)
        assert cell_matches(word, hashed)
        steps = (cell - hashed) & mask
        assert steps < MAX_PROBES, f"a name is {steps} cells behind the start of its search"
        assert all(cells[(hashed + step) & mask] for step in range(steps)), "a search ends early"


def check_arena(arena: Arena) -> None:
    """Slots, holders, indexes, bytes and directory agree."""
    slots = sorted(arena.slots(), key=lambda slot: slot.offset_bytes)
    end_bytes = used_bytes = PROBE_BYTES
    for slot in slots:
        assert arena.num_holders(slot) > 0
        assert slot.offset_bytes >= end_bytes, "two slots overlap"
        aligned_bytes = -(-slot.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end_bytes, used_bytes = slot.offset_bytes + aligned_bytes, used_bytes + aligned_bytes
    assert end_bytes <= PROBE_BYTES + arena.capacity_bytes
    assert used_bytes + arena.free_bytes == PROBE_BYTES + arena.capacity_bytes
    in_use = {slot.index for slot in slots}
    assert len(in_use) == len(slots), "two slots have one index"
    for index in range(arena.num_slots):
        is_free = arena.closed or index not in in_use
        assert not (is_free and arena.page.generation(index) % 2), f"slot {index} is free and readable"
    if arena.closed:
        assert len(arena.directory) == 0
    else:
        check_directory(arena.directory, arena.page.generation)


def check_tier(tier: Tier) -> None:
    """The arena is consistent and every entry has its own readable slot."""
    check_arena(tier.arena)
    entries = list(tier.entries())
    slots = {entry.slot for entry in entries}
    assert len(slots) == len(entries) == len(tier), "two entries have one slot"
    assert tier.num_bytes == sum(slot.num_bytes for slot in slots)
    for entry in entries:
        assert tier.find(entry.name) is entry
        assert entry.name[1] == entry.item.key
        assert tier.arena.generation(entry.slot) % 2 == 1
        view = tier.arena.view(entry.slot, entry.item.rows.shape, entry.item.rows.dtype)
        assert view.data_ptr() == entry.item.rows.data_ptr()
    # In tables as sparse as those of tests, every record finds a cell.
    assert len(tier.arena.directory) == sum(entry.item.clip is None for entry in entries)


def check_store(store: EmbeddingStore) -> None:
    """The tiers are consistent and items are in their namespaces' arenas."""
    for namespace, arena in store.arenas():
        partition = store.partition(namespace or "")
        (tier,) = (tier for tier in partition.tiers() if tier.arena is arena)
        check_tier(tier)
        for entry in tier.entries():
            assert store.partition(entry.name[0]) is partition, f"{entry.name[0]!r} in {namespace!r}"


def num_holds(store: EmbeddingStore) -> int:
    """The holds of callers. The hold that every item and reservation has of its own slot does not count."""
    return sum(
        sum(arena.num_holders(slot) for slot in arena.slots()) - len(arena) for _, arena in store.arenas()
    )
