"""Ranges of an arena: they never overlap, holes are coalesced, and every byte is accounted for."""

from __future__ import annotations

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from encoder_service.errors import InternalError
from encoder_service.store.allocator import ALIGNMENT_BYTES, RangeAllocator

SIZE = 64 * ALIGNMENT_BYTES


def test_the_smallest_hole_that_fits_is_taken() -> None:
    allocator = RangeAllocator(SIZE)
    offsets = [allocator.allocate(units * ALIGNMENT_BYTES) for units in (8, 1, 3, 1, 5, 1)]
    for index in (0, 2, 4):
        offset = offsets[index]
        assert offset is not None
        allocator.free(offset)
    assert allocator.allocate(3 * ALIGNMENT_BYTES) == offsets[2]
    assert allocator.allocate(4 * ALIGNMENT_BYTES) == offsets[4]
    assert allocator.allocate(8 * ALIGNMENT_BYTES) == offsets[0]


def test_a_size_off_the_alignment_is_rounded_down() -> None:
    allocator = RangeAllocator(2 * ALIGNMENT_BYTES + 255)
    assert allocator.size_bytes == 2 * ALIGNMENT_BYTES
    assert allocator.allocate(2 * ALIGNMENT_BYTES + 1) is None


def test_mistakes_are_refused_with_numbers() -> None:
    allocator = RangeAllocator(SIZE)
    with pytest.raises(InternalError, match="0 bytes was requested, the minimum is 1"):
        allocator.allocate(0)
    offset = allocator.allocate(600)
    assert offset == 0
    for wrong in (256, 100, -256, SIZE):
        with pytest.raises(InternalError, match=f"offset {wrong}; 1 are"):
            allocator.free(wrong)
    allocator.free(0)
    with pytest.raises(InternalError, match="offset 0; 0 are"):
        allocator.free(0)
    with pytest.raises(InternalError, match="255 bytes is smaller than the alignment of 256"):
        RangeAllocator(255)


def test_thousands_of_holes_stay_cheap() -> None:
    """20000 ranges, every second one freed, then 20000 changes among 10000 holes."""
    allocator = RangeAllocator(20_000 * 4096)
    offsets = [allocator.allocate(4096) for _ in range(20_000)]
    for offset in offsets[::2]:
        allocator.free(offset or 0)
    assert (allocator.free_bytes, allocator.largest_hole_bytes) == (10_000 * 4096, 4096)
    started = time.process_time()
    for _ in range(10_000):
        offset = allocator.allocate(4096)
        assert offset is not None
        allocator.free(offset)
    assert time.process_time() - started < 2.0


class AllocatorMachine(RuleBasedStateMachine):
    """Compares the allocator with the simplest model: the set of allocated units."""

    ranges = Bundle("ranges")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = RangeAllocator(SIZE)
        self.taken: set[int] = set()
        self.units_of: dict[int, range] = {}

    def largest_hole_units(self) -> int:
        largest = current = 0
        for unit in range(SIZE // ALIGNMENT_BYTES):
            current = 0 if unit in self.taken else current + 1
            largest = max(largest, current)
        return largest

    @rule(target=ranges, num_bytes=st.integers(1, SIZE // 3))
    def allocate(self, num_bytes: int) -> object:
        num_units = -(-num_bytes // ALIGNMENT_BYTES)
        fits = self.largest_hole_units() >= num_units
        offset = self.allocator.allocate(num_bytes)
        assert (offset is not None) == fits
        if offset is None:
            return multiple()
        assert offset % ALIGNMENT_BYTES == 0
        first = offset // ALIGNMENT_BYTES
        units = range(first, first + num_units)
        assert self.taken.isdisjoint(units)
        assert units.stop * ALIGNMENT_BYTES <= SIZE
        self.taken.update(units)
        self.units_of[offset] = units
        return offset

    @rule(offset=consumes(ranges))
    def free(self, offset: int) -> None:
        self.allocator.free(offset)
        self.taken.difference_update(self.units_of.pop(offset))

    @rule(data=st.data())
    def look_ahead(self, data: st.DataObject) -> None:
        plan, taken = self.allocator.plan(), set(self.taken)
        for offset in data.draw(st.permutations(sorted(self.units_of))):
            units = self.units_of[offset]
            taken.difference_update(units)
            start, stop = units.start, units.stop
            while start > 0 and start - 1 not in taken:
                start -= 1
            while stop < SIZE // ALIGNMENT_BYTES and stop not in taken:
                stop += 1
            assert plan.free(offset) == (start * ALIGNMENT_BYTES, (stop - start) * ALIGNMENT_BYTES)

    @invariant()
    def counts_agree(self) -> None:
        assert SIZE - self.allocator.free_bytes == len(self.taken) * ALIGNMENT_BYTES
        assert self.allocator.largest_hole_bytes == self.largest_hole_units() * ALIGNMENT_BYTES
        assert len(self.allocator) == len(self.units_of)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
