"""The free ranges of an arena: best fit over coalesced holes, in units of 256 bytes.

Owns offsets only and never touches the memory. A search and a coalescing step are O(log n) in the number of
holes; keeping the holes sorted moves a few machine words per change. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping

from encoder_service.errors import InternalError

ALIGNMENT_BYTES = 256

# A hole's sort key: its size in units in the high bits, its first unit in the low bits. Among holes of equal
# size, the one at the lowest address is used first.
_FIRST_BITS = 48
_FIRST_MASK = (1 << _FIRST_BITS) - 1


class RangeAllocator:
    """Allocates ranges of [0, size_bytes). Both ends of a range are multiples of ALIGNMENT_BYTES."""

    def __init__(self, size_bytes: int) -> None:
        """size_bytes is rounded down to the alignment. Raises InternalError if nothing remains."""
        num_units = size_bytes // ALIGNMENT_BYTES
        if num_units < 1:
            raise InternalError(
                f"an arena of {size_bytes} bytes is smaller than the alignment of {ALIGNMENT_BYTES} bytes",
                found=size_bytes,
                needed=ALIGNMENT_BYTES,
            )
        self.size_bytes = num_units * ALIGNMENT_BYTES
        self._free_units = num_units
        self._holes: list[int] = []
        self._hole_units: dict[int, int] = {}  # first unit -> units
        self._hole_before: dict[int, int] = {}  # the unit after a hole -> its first unit
        self._taken: dict[int, int] = {}  # first unit -> units
        self._add_hole(0, num_units)

    def __len__(self) -> int:
        """Number of allocated ranges."""
        return len(self._taken)

    @property
    def free_bytes(self) -> int:
        return self._free_units * ALIGNMENT_BYTES

    @property
    def largest_hole_bytes(self) -> int:
        """The largest allocation that would succeed now."""
        return (self._holes[-1] >> _FIRST_BITS) * ALIGNMENT_BYTES if self._holes else 0

    def capacity_bytes(self, offset: int) -> int:
        """Bytes of the range allocated at ``offset``; 0 if none starts there."""
        units, remainder = divmod(offset, ALIGNMENT_BYTES)
        return 0 if remainder else self._taken.get(units, 0) * ALIGNMENT_BYTES

    def allocate(self, num_bytes: int) -> int | None:
        """The offset of a new range of at least num_bytes; None if no hole is large enough."""
        if num_bytes < 1:
            raise InternalError(
                f"a range of {num_bytes} bytes was requested, the minimum is 1", found=num_bytes
            )
        num_units = -(-num_bytes // ALIGNMENT_BYTES)
        position = bisect_left(self._holes, num_units << _FIRST_BITS)
        if position == len(self._holes):
            return None
        first = self._holes[position] & _FIRST_MASK
        hole_units = self._remove_hole(first)
        if hole_units > num_units:
            self._add_hole(first + num_units, hole_units - num_units)
        self._taken[first] = num_units
        self._free_units -= num_units
        return first * ALIGNMENT_BYTES

    def free(self, offset: int) -> None:
        """Frees a range. Raises InternalError if no range starts at ``offset``."""
        if not self.capacity_bytes(offset):
            raise InternalError(
                f"no range starts at offset {offset}; {len(self._taken)} are handed out", offset=offset
            )
        first = offset // ALIGNMENT_BYTES
        num_units = self._taken.pop(first)
        self._free_units += num_units
        behind = first + num_units
        if behind in self._hole_units:
            num_units += self._remove_hole(behind)
        before = self._hole_before.get(first)
        if before is not None:
            num_units += self._remove_hole(before)
            first = before
        self._add_hole(first, num_units)

    def plan(self) -> FreeingPlan:
        """A plan that computes the holes that freeing ranges would leave."""
        return FreeingPlan(self._taken, self._hole_units, self._hole_before)

    def _add_hole(self, first: int, num_units: int) -> None:
        insort(self._holes, _key(first, num_units))
        self._hole_units[first] = num_units
        self._hole_before[first + num_units] = first

    def _remove_hole(self, first: int) -> int:
        """Removes the hole that starts at unit ``first`` and returns its size in units."""
        num_units = self._hole_units.pop(first)
        del self._hole_before[first + num_units]
        del self._holes[bisect_left(self._holes, _key(first, num_units))]
        return num_units


class FreeingPlan:
    """The holes that an allocator would have if some of its ranges were freed. Does not change the allocator
    and becomes invalid when the allocator changes."""

    def __init__(
        self, taken: Mapping[int, int], hole_units: Mapping[int, int], hole_before: Mapping[int, int]
    ) -> None:
        self._taken, self._real_units, self._real_before = taken, hole_units, hole_before
        # New holes. They include adjacent real holes, so the real ones are looked up second.
        self._units: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def free(self, offset: int) -> tuple[int, int]:
        """Adds the range that starts at ``offset`` to the freed ones. Returns the offset and the size in
        bytes of the hole that would contain it. O(1)."""
        first = offset // ALIGNMENT_BYTES
        num_units = self._taken[first]
        behind = first + num_units
        num_units += self._units.pop(behind, 0) or self._real_units.get(behind, 0)
        before = self._before.pop(first, None)
        if before is not None:
            num_units += self._units.pop(before)
            first = before
        elif (before := self._real_before.get(first)) is not None:
            num_units += self._real_units[before]
            first = before
        self._units[first] = num_units
        self._before[first + num_units] = first
        return first * ALIGNMENT_BYTES, num_units * ALIGNMENT_BYTES


def _key(first: int, num_units: int) -> int:
    return num_units << _FIRST_BITS | first
