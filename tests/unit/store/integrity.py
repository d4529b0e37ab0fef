"""Whether the parts of a store agree with one another: each function raises AssertionError if they do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from encoder_service.store.allocator import _FIRST_BITS, _FIRST_MASK, ALIGNMENT_BYTES, RangeAllocator
from encoder_service.store.arena import Arena
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


def check_allocator(allocator: RangeAllocator) -> None:
    """Ranges and holes tile the arena, no two holes touch, and counts and indexes agree."""
    end, num_tiles, free_units, after_hole = 0, 0, 0, False
    num_units = allocator.size_bytes // ALIGNMENT_BYTES
    while end < num_units:
        taken, hole = allocator._taken.get(end), allocator._hole_units.get(end)
        assert (taken is None) != (hole is None), f"not one tile starts at unit {end}, where one ends"
        assert not (after_hole and hole is not None), f"two holes touch at unit {end}"
        units = taken if hole is None else hole
        assert units is not None
        assert units > 0
        free_units += hole or 0
        end, num_tiles, after_hole = end + units, num_tiles + 1, hole is not None
    assert end == num_units, f"the last tile ends at unit {end} of {num_units}"
    assert num_tiles == len(allocator._taken) + len(allocator._hole_units), "tiles lie on one another"
    assert allocator._free_units == free_units
    assert len(allocator._holes) == len(allocator._hole_units) == len(allocator._hole_before)
    assert allocator._holes == sorted(set(allocator._holes)), "the holes are not in order"
    for key in allocator._holes:
        first, units = key & _FIRST_MASK, key >> _FIRST_BITS
        assert allocator._hole_units.get(first) == units
        assert allocator._hole_before.get(first + units) == first


def check_directory(directory: Directory, generation_of: Callable[[int], int]) -> None:
    """Places and records agree, every name can be found, and every record has its slot's generation."""
    words, listed = directory._words, directory._listed
    cells = np.frombuffer(words, np.uint64, directory.num_cells, FIRST_CELL_WORD * WORD_BYTES)
    mask = directory.num_cells - 1
    taken = np.flatnonzero(cells).tolist()
    assert len(taken) == len(listed) == len(directory._slots)
    for cell in taken:
        word = int(cells[cell])
        record = listed.get(cell_slot(word))
        assert record is not None, f"cell {cell} leads to a slot that is not listed"
        hashed = name_hash(record.key, record.tag)
        assert cell_matches(word, hashed)
        steps = (cell - hashed) & mask
        assert steps < MAX_PROBES, f"a name is {steps} cells behind the start of its search"
        assert all(cells[(hashed + step) & mask] for step in range(steps)), "a search ends early"
    for slot_index, record in listed.items():
        assert directory._slots[record.tag, record.key] == slot_index == record.slot_index
        assert record.generation == generation_of(slot_index)
        start = record_offset(directory.num_slots, slot_index)
        data = directory._file.mapping[start : start + RECORD.size]
        assert read_record(data, words[start // WORD_BYTES]) == record


def check_arena(arena: Arena) -> None:
    """Slots, holders, indexes, bytes and directory agree."""
    check_allocator(arena._allocator)
    assert len(arena._allocator) == len(arena._holders) + 1, "the probe is one range"
    for slot, holders in arena._holders.items():
        assert holders > 0
        assert slot.num_bytes <= arena._allocator.capacity_bytes(slot.offset_bytes)
    indexes = [slot.index for slot in arena._holders] + list(arena._free_indexes)
    assert sorted(indexes) == list(range(arena.num_slots)), "an index is lost or is there twice"
    for index in range(arena.num_slots) if arena.closed else arena._free_indexes:
        assert arena.page.generation(index) % 2 == 0, f"slot {index} is free and readable"
    check_directory(arena.directory, arena.page.generation)


def check_tier(tier: Tier) -> None:
    """The arena is consistent and every entry has its own readable slot."""
    check_arena(tier.arena)
    slots = {entry.slot for entry in tier._entries.values()}
    assert len(slots) == len(tier._entries), "two entries have one slot"
    assert tier.num_bytes == sum(slot.num_bytes for slot in slots)
    num_images = 0
    for name, entry in tier._entries.items():
        assert name == entry.name
        assert name[1] == entry.item.key
        assert tier.arena.generation(entry.slot) % 2 == 1
        view = tier.arena.view(entry.slot, entry.item.rows.shape, entry.item.rows.dtype)
        assert view.data_ptr() == entry.item.rows.data_ptr()
        num_images += entry.item.clip is None
    num_listed = len(tier.arena.directory)
    assert num_listed == num_images  # in tables as sparse as those of tests, every record finds a cell


def check_store(store: EmbeddingStore) -> None:
    """The tiers are consistent and items are in their namespaces' arenas."""
    for namespace, partition in store._partitions.items():
        for tier in partition.tiers():
            check_tier(tier)
            for entry in tier._entries.values():
                assert store._partition(entry.name[0]) is partition, f"{entry.name[0]!r} in {namespace!r}"
    assert all(num_bytes >= 0 for num_bytes in store._reserved_bytes.values())


def num_holds(store: EmbeddingStore) -> int:
    """The holds of callers. The hold that every item and reservation has of its own slot does not count."""
    return sum(sum(arena._holders.values()) - len(arena) for _, arena in store.arenas())
