"""Assigns the placeholder ids of a prompt to its items.

Owns the alignment of placeholder ids with items; ``placeholders`` expands the prompt from it. Pure numpy.

The alignment works on *runs* of equal placeholder ids, never on single ids, so that an expanded run is not
taken for several items:

1. One form for the whole prompt. The forms are tried in this order: all items expanded, one id per item, one
   id per frame. Each form needs a different total number of ids unless two forms are the same, so at most
   one of them fits. The expanded form uses the largest total that the items allow and one id per item uses
   the smallest, so no mixed form has the same total. One id per frame lies between the two; it is an error
   if a mix of forms also fits the runs.
2. Mixed forms, chosen item by item: dynamic programming over (run, next frame). Readings that put the same
   items into the same runs expand to the same prompt and count as one. Two different readings are an error.

Terms: a *unit* is the owner of one run of rows: an image, a clip whose frames share one run (Kimi), or one
frame of a clip with timestamps between its frames (Qwen3-VL). The *boundary* of a run is the index of the
first unit after it. A *reading* is the list of the boundaries of all runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest

__all__ = ["Ids", "PromptItem", "Run", "align", "placeholder_runs"]

Ids: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PromptItem:
    """The placeholders that one item needs: their id, and the number of rows of each of its units."""

    placeholder_id: int
    unit_rows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.unit_rows)


class Run(NamedTuple):
    """Tokens [start, start + length) of the collapsed prompt, all of one placeholder id."""

    start: int
    length: int
    placeholder_id: int


def placeholder_runs(ids: Ids, known: set[int]) -> list[Run]:
    """Maximal runs of one placeholder id."""
    if not known or not len(ids):
        return []
    change = np.flatnonzero(np.diff(ids)) + 1
    starts = np.concatenate([[0], change])
    ends = np.concatenate([change, [len(ids)]])
    is_placeholder = np.isin(ids[starts], list(known))
    return [
        Run(int(start), int(end - start), int(ids[start]))
        for start, end in zip(starts[is_placeholder], ends[is_placeholder], strict=True)
    ]


@dataclass(frozen=True)
class _Units:
    """The units of all items in one list: rows and placeholder id of each unit, and where each item ends."""

    rows: tuple[int, ...]
    placeholder_ids: tuple[int, ...]
    item_ends: dict[int, int]  # first unit of an item -> unit after its last

    @classmethod
    def of(cls, items: Sequence[PromptItem]) -> _Units:
        rows: list[int] = []
        placeholder_ids: list[int] = []
        item_ends: dict[int, int] = {}
        for index, item in enumerate(items):
            if not item.unit_rows or min(item.unit_rows) < 1:
                raise InvalidRequest(
                    f"item {index} has units of {list(item.unit_rows)} rows, each needs 1 or more"
                )
            item_ends[len(rows)] = len(rows) + len(item.unit_rows)
            rows += item.unit_rows
            placeholder_ids += [item.placeholder_id] * len(item.unit_rows)
        return cls(tuple(rows), tuple(placeholder_ids), item_ends)


def align(runs: Sequence[Run], items: Sequence[PromptItem]) -> list[int]:
    """The boundary of each run: the index of the first unit after it.

    Raises InvalidRequest with reason PLACEHOLDER_MISMATCH or PLACEHOLDER_AMBIGUOUS.
    """
    units = _Units.of(items)
    expanded = [(rows, unit + 1) for unit, rows in enumerate(units.rows)]
    per_item = [(1, end) for end in units.item_ends.values()]
    per_frame = [(1, unit + 1) for unit in range(len(units.rows))]
    for pieces in (expanded, per_item):
        boundaries = _align_uniform(runs, pieces, units)
        if boundaries is not None:
            return boundaries
    boundaries = _align_uniform(runs, per_frame, units)
    if boundaries is None:
        return _align_mixed(runs, items, units)
    # With one run per unit (frames separated by timestamps) there is no other reading.
    if len(runs) < len(units.rows) and _has_other_reading(runs, units, boundaries):
        raise _ambiguous(runs, items)
    return boundaries


def _align_uniform(runs: Sequence[Run], pieces: Sequence[tuple[int, int]], units: _Units) -> list[int] | None:
    """The boundaries if the pieces (number of ids, next unit) fill the runs exactly in order, else None."""
    if sum(ids for ids, _ in pieces) != sum(run.length for run in runs):
        return None
    boundaries: list[int] = []
    piece = unit = 0
    for run in runs:
        left = run.length
        while left > 0:
            num_ids, after = pieces[piece]
            if num_ids > left or units.placeholder_ids[unit] != run.placeholder_id:
                return None
            left -= num_ids
            piece, unit = piece + 1, after
        boundaries.append(unit)
    return boundaries


def _align_mixed(runs: Sequence[Run], items: Sequence[PromptItem], units: _Units) -> list[int]:
    """The boundaries when each item may have its own form. Raises InvalidRequest if no reading fits the
    runs, or more than one."""
    num_units = len(units.rows)
    least, most = _bounds(units)
    ids_left = sum(run.length for run in runs)
    readings = {0: 1}  # boundary -> number of readings that lead to it, capped at 2
    came_from: list[dict[int, int]] = []
    for run in runs:
        ids_left -= run.length
        reached: dict[int, int] = {}
        origin: dict[int, int] = {}
        for boundary, count in readings.items():
            for after, _ in _reach(run, boundary, None, units, by_item=False):
                if least[after] <= ids_left <= most[after]:
                    reached[after] = min(2, reached.get(after, 0) + count)
                    origin[after] = boundary
        readings = reached
        came_from.append(origin)
    count = readings.get(num_units, 0)
    if count == 0:
        raise _mismatch(runs, items)
    if count > 1:
        raise _ambiguous(runs, items)
    boundaries = [num_units]
    for origin in reversed(came_from):
        boundaries.append(origin[boundaries[-1]])
    return boundaries[-2::-1]


def _bounds(units: _Units) -> tuple[list[int], list[int]]:
    """For each unit, the smallest and the largest number of ids that it and all later units can use."""
    num_units = len(units.rows)
    least, most = [0] * (num_units + 1), [0] * (num_units + 1)
    for unit in reversed(range(num_units)):
        most[unit] = most[unit + 1] + units.rows[unit]
        least[unit] = 1 + least[units.item_ends.get(unit, unit + 1)]
    return least, most


class _State(NamedTuple):
    """The state of the search after a run.

    unit: the next unit. is_expanded: the form of the item that continues in the next run, None if no item
    continues. is_other: whether any boundary so far differs from the known reading."""

    unit: int
    is_expanded: bool | None
    is_other: bool


def _has_other_reading(runs: Sequence[Run], units: _Units, known: Sequence[int]) -> bool:
    """Whether the items fit the runs with other boundaries than ``known``, when each item has one form for
    all of its frames."""
    least, most = _bounds(units)
    ids_left = sum(run.length for run in runs)
    states = {_State(0, None, False)}
    for run, boundary in zip(runs, known, strict=True):
        ids_left -= run.length
        reached: set[_State] = set()
        for state in states:
            for unit, is_expanded in _reach(run, state.unit, state.is_expanded, units, by_item=True):
                if least[unit] <= ids_left <= most[unit]:
                    reached.add(_State(unit, is_expanded, state.is_other or unit != boundary))
        states = reached
    return any(state.is_other and state.unit == len(units.rows) for state in states)


def _reach(
    run: Run, first: int, first_form: bool | None, units: _Units, *, by_item: bool
) -> list[tuple[int, bool | None]]:
    """The possible boundaries of ``run`` when its first unit is ``first``, each with the form (whether
    expanded) of the item that continues after the run. by_item: all frames of an item have one form;
    otherwise the forms are None.

    uses[unit, form] is a bit set: bit n is set if the units from ``first`` up to but excluding ``unit`` can
    use exactly n ids.
    """
    full = (1 << (run.length + 1)) - 1
    uses: dict[tuple[int, bool | None], int] = {(first, first_form): 1}
    reached: list[tuple[int, bool | None]] = []
    forms = (None, False, True) if by_item else (None,)

    def add(unit: int, is_expanded: bool | None, ways: int) -> None:
        is_inside_item = unit < len(units.rows) and unit not in units.item_ends
        place = unit, (is_expanded if by_item and is_inside_item else None)
        if ways & full:
            uses[place] = uses.get(place, 0) | ways & full

    for unit in range(first, len(units.rows) + 1):
        if not uses:
            break
        for form in forms:
            ways = uses.pop((unit, form), 0)
            if ways >> run.length & 1:
                reached.append((unit, form))
            if not ways or unit == len(units.rows) or units.placeholder_ids[unit] != run.placeholder_id:
                continue
            if form is None and unit in units.item_ends:
                add(units.item_ends[unit], None, ways << 1)
            if form is not True:
                add(unit + 1, False, ways << 1)
            if form is not False:
                add(unit + 1, True, ways << units.rows[unit])
    return reached


def _ambiguous(runs: Sequence[Run], items: Sequence[PromptItem]) -> InvalidRequest:
    return InvalidRequest(
        f"{len(runs)} runs of placeholders with lengths {[run.length for run in runs][:16]} fit "
        f"{len(items)} items of {[item.num_rows for item in items][:16]} rows in more than one way; "
        "expand all items or none",
        reason="PLACEHOLDER_AMBIGUOUS",
        details={"runs": len(runs), "items": len(items)},
    )


def _mismatch(runs: Sequence[Run], items: Sequence[PromptItem]) -> InvalidRequest:
    known = sorted({run.placeholder_id for run in runs} | {item.placeholder_id for item in items})
    texts = []
    for placeholder_id in known:
        lengths = [run.length for run in runs if run.placeholder_id == placeholder_id]
        own = [item for item in items if item.placeholder_id == placeholder_id]
        texts.append(
            f"id {placeholder_id}: {sum(lengths)} placeholders found in {len(lengths)} runs, {len(own)} "
            f"items need {sum(item.num_rows for item in own)} rows (or {len(own)} placeholders, one each)"
        )
    return InvalidRequest(
        "placeholders do not match the items; " + "; ".join(texts),
        reason="PLACEHOLDER_MISMATCH",
        details={
            "found": sum(run.length for run in runs),
            "runs": len(runs),
            "needed": sum(item.num_rows for item in items),
            "items": len(items),
        },
    )
