"""Assigns the placeholder ids of a prompt to its items.

Owns the alignment of placeholder ids with items; ``placeholders`` expands the prompt from it. Pure numpy.

The alignment works on *runs* of equal placeholder ids, never on single ids, so that an expanded run is not
taken for several items. All items of a prompt have the same form: expanded, one id per item, or one id per
frame with text between the frames of a clip. Each form needs a different total number of ids unless two forms
are the same, so at most one of them fits.

Terms: a *unit* is the owner of one run of rows: an image, a clip whose frames share one run (Kimi), or one
frame of a clip with timestamps between its frames (Qwen3-VL). The *boundary* of a run is the index of the
first unit after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest

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


class _Piece(NamedTuple):
    """The ids of one unit, or of one item with all its units. after: the next unit."""

    placeholder_id: int
    item: int
    num_ids: int
    after: int


def align(runs: Sequence[Run], items: Sequence[PromptItem]) -> list[int]:
    """The boundary of each run: the index of the first unit after it.

    Raises InvalidRequest with reason PLACEHOLDER_MISMATCH.
    """
    expanded: list[_Piece] = []
    per_item: list[_Piece] = []
    unit = 0
    for index, item in enumerate(items):
        if not item.unit_rows or min(item.unit_rows) < 1:
            raise InvalidRequest(
                f"item {index} has units of {list(item.unit_rows)} rows, each needs 1 or more"
            )
        for rows in item.unit_rows:
            unit += 1
            expanded.append(_Piece(item.placeholder_id, index, rows, unit))
        per_item.append(_Piece(item.placeholder_id, index, 1, unit))
    per_frame = [piece._replace(num_ids=1) for piece in expanded]
    for pieces, are_apart in ((expanded, False), (per_item, False), (per_frame, True)):
        boundaries = _align_pieces(runs, pieces, are_apart=are_apart)
        if boundaries is not None:
            return boundaries
    raise _mismatch(runs, items)


def _align_pieces(runs: Sequence[Run], pieces: Sequence[_Piece], *, are_apart: bool) -> list[int] | None:
    """The boundaries if the pieces fill the runs exactly in order, else None. are_apart: whether a run may
    hold one piece of an item only."""
    if sum(piece.num_ids for piece in pieces) != sum(run.length for run in runs):
        return None
    boundaries: list[int] = []
    left_over = iter(pieces)
    after = 0
    for run in runs:
        left, before = run.length, -1
        while left > 0:
            piece = next(left_over)
            if piece.num_ids > left or piece.placeholder_id != run.placeholder_id:
                return None
            if are_apart and piece.item == before:
                return None
            left, before, after = left - piece.num_ids, piece.item, piece.after
        boundaries.append(after)
    return boundaries


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
