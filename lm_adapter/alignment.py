"""Which placeholder ids of a prompt belong to which item.

Owns the reading of a prompt's placeholders; what is made of it belongs to ``placeholders``. Pure numpy.

The alignment reads *runs* of equal placeholder ids, never single ids, so that an expanded run is not taken
for many items:

1. One form for the whole prompt: all expanded, else one id per item, else one id per frame. The three need
   different numbers of ids unless they mean the same, so at most one of them fits. All expanded uses the most
   ids that the items can, one id per item the least, so that no other reading uses as many; one id per frame
   lies between, and is an error where items of several forms fit the runs in another way.
2. Forms mixed item by item: dynamic programming over (run, next frame). Readings that put the same items
   into the same runs expand to the same prompt and count as one; two that differ are an error.

Terms: a *unit* is what one run of rows belongs to: an image, a clip whose frames share one run (Kimi), or one
frame of a clip whose frames stand apart (Qwen3-VL, with timestamps between them). A *boundary* is the unit
that comes next after a run; the boundaries of all runs are a reading.
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
    """What one item asks of the prompt: its placeholder id, and the rows of each of its units in order."""

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
    """The items' units in one row: rows and placeholder id of each, and per item the index after its last."""

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
    """For each run the unit after its last one.

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
    # A frame in each run, as frames with timestamps stand, is the only way then.
    if len(runs) < len(units.rows) and _has_other_reading(runs, units, boundaries):
        raise _ambiguous(runs, items)
    return boundaries


def _align_uniform(runs: Sequence[Run], pieces: Sequence[tuple[int, int]], units: _Units) -> list[int] | None:
    """Boundaries when the pieces (ids used, unit after) fill the runs exactly, one after the other."""
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
    """Boundaries when each item takes the form it needs; a reading is the boundaries it puts after the
    runs."""
    num_units = len(units.rows)
    least, most = _bounds(units)
    ids_left = sum(run.length for run in runs)
    readings = {0: 1}  # boundary -> number of readings that lead there, as far as two
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
    """Ids that the units from each on can use at least and at most."""
    num_units = len(units.rows)
    least, most = [0] * (num_units + 1), [0] * (num_units + 1)
    for unit in reversed(range(num_units)):
        most[unit] = most[unit + 1] + units.rows[unit]
        least[unit] = 1 + least[units.item_ends.get(unit, unit + 1)]
    return least, most


class _State(NamedTuple):
    """After a run. is_expanded: of the item that goes on behind it, None where none does; is_other: whether
    a boundary so far is not the known reading's."""

    unit: int
    is_expanded: bool | None
    is_other: bool


def _has_other_reading(runs: Sequence[Run], units: _Units, known: Sequence[int]) -> bool:
    """Whether items, each in a form of its own but for all of its frames, fit the runs with other boundaries
    than ``known``."""
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
    """The units that can come next after ``run`` when unit ``first`` opens it, each with the form of the item
    that goes on with it: whether it is expanded. by_item: all frames of an item have one form; without it,
    forms are None.

    uses[unit, form] is a bit set: bit n says that the units from ``first`` to before ``unit`` can use exactly
    n ids.
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
