"""Where the visual tokens of a prompt go: placeholder ids aligned with items, then expanded.

Owns the alignment and the spans; positions belong to ``mrope``, rows to ``splice``. Pure numpy.

A prompt names its items by placeholder ids. Each item may stand there unexpanded (one id for the whole item,
or one id for each frame of a clip) or expanded (as many ids as it has rows), and items may touch without a
separator. The alignment reads *runs* of equal placeholder ids, never single ids, so that an expanded run is
not taken for many items:

1. One form for the whole prompt: all expanded, else one id per item, else one id per frame. The three need
   different numbers of ids unless they mean the same, so at most one of them fits.
2. Forms mixed item by item: dynamic programming over (run, next frame). Readings that put the same items
   into the same runs expand to the same prompt and count as one; two that differ are an error.

Terms: a *unit* is what one run of rows belongs to: an image, a clip whose frames share one run (Kimi), or one
frame of a clip whose frames stand apart (Qwen3-VL, with timestamps between them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest
from lm_adapter.types import Modality

__all__ = [
    "ExpandedPrompt",
    "ItemSpan",
    "PromptItem",
    "Segment",
    "expand_batch",
    "expand_placeholders",
    "interleave_timestamps",
    "prompt_item",
    "unit_rows",
]

Ids: TypeAlias = npt.NDArray[np.int64]


class Segment(NamedTuple):
    """A run of placeholder ids of one unit: tokens [start, start + length) of the expanded prompt."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class PromptItem:
    """What one item asks of the prompt: its placeholder id, and the rows of each of its units in order."""

    placeholder_id: int
    unit_rows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.unit_rows)


@dataclass(frozen=True)
class ItemSpan:
    """Where one item's rows go. item: its index among the prompt's items; segments: one per unit, in order.

    Rows 0..segments[0].length go to the first segment, the next ones to the second, and so on. ``length``
    counts rows; between ``start`` and ``end`` there may be text as well (timestamps).
    """

    item: int
    segments: tuple[Segment, ...]

    @property
    def start(self) -> int:
        return self.segments[0].start

    @property
    def end(self) -> int:
        return self.segments[-1].end

    @property
    def length(self) -> int:
        return sum(segment.length for segment in self.segments)


@dataclass(frozen=True, eq=False)
class ExpandedPrompt:
    """One prompt with a placeholder id for every row. ids: int64 [N]; spans: one per item, in prompt
    order."""

    ids: Ids
    spans: tuple[ItemSpan, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def visual_mask(self) -> npt.NDArray[np.bool_]:
        """bool [N]: which tokens are visual."""
        mask = np.zeros(len(self.ids), dtype=np.bool_)
        for span in self.spans:
            for segment in span.segments:
                mask[segment.start : segment.end] = True
        return mask


def unit_rows(
    grid: Sequence[int], *, merge_size: int, modality: Modality, merges_time: bool
) -> tuple[int, ...]:
    """Rows of each unit of an item, from its grid [t, h, w] in patches.

    Qwen: an image is one unit of t*h*w/merge^2 rows (t is 1), a clip t units of h*w/merge^2, because
    timestamps stand between its frames. Kimi (``merges_time``): one unit of h*w/merge^2 for any t.
    Raises InvalidRequest for empty grids and for sides that are no multiple of the merge size.
    """
    if len(grid) != 3:
        raise InvalidRequest(f"a grid has 3 extents [t, h, w], got {len(grid)}: {list(grid)}")
    t, h, w = (int(extent) for extent in grid)
    if min(t, h, w) < 1 or h % merge_size or w % merge_size:
        raise InvalidRequest(
            f"grid {[t, h, w]} needs t >= 1 and h, w positive multiples of the merge size {merge_size}",
            reason="GRID_MISMATCH",
            details={"grid": [t, h, w], "merge_size": merge_size},
        )
    rows = h * w // merge_size**2
    if merges_time:
        return (rows,)
    return (t * rows,) if modality is Modality.IMAGE else (rows,) * t


def prompt_item(
    grid: Sequence[int], *, placeholder_id: int, merge_size: int, modality: Modality, merges_time: bool
) -> PromptItem:
    """The PromptItem of a grid; arguments and errors as of ``unit_rows``."""
    rows = unit_rows(grid, merge_size=merge_size, modality=modality, merges_time=merges_time)
    return PromptItem(placeholder_id, rows)


class _Run(NamedTuple):
    start: int
    length: int
    placeholder_id: int


def expand_placeholders(
    ids: Sequence[int] | npt.NDArray[np.integer],
    items: Sequence[PromptItem],
    placeholder_ids: Sequence[int] = (),
) -> ExpandedPrompt:
    """The prompt with one placeholder id per row, and where each item's rows go.

    ids: [N] before any pad substitution; items: in prompt order, images and clips together.
    placeholder_ids: further ids that are placeholders although no item of this prompt uses them, so that a
    prompt with placeholders and no item is found out.
    Raises InvalidRequest with reason PLACEHOLDER_MISMATCH when runs and items cannot be aligned, and
    PLACEHOLDER_AMBIGUOUS when they can in more than one way.
    """
    prompt_ids: Ids = np.asarray(ids, dtype=np.int64)
    if prompt_ids.ndim != 1:
        raise InvalidRequest(f"a prompt's ids have 1 dimension, got {prompt_ids.ndim}")
    known = {*placeholder_ids, *(item.placeholder_id for item in items)}
    runs = _placeholder_runs(prompt_ids, known)
    boundaries = _align(runs, items)
    return _assemble(prompt_ids, runs, items, boundaries)


def expand_batch(
    prompts: Sequence[Sequence[int] | npt.NDArray[np.integer]],
    items: Sequence[Sequence[PromptItem]],
    placeholder_ids: Sequence[int] = (),
) -> list[ExpandedPrompt]:
    """``expand_placeholders`` for each prompt with its own items; nothing passes between prompts.

    Raises InvalidRequest, naming the prompt.
    """
    if len(prompts) != len(items):
        raise InvalidRequest(f"a batch of {len(prompts)} prompts came with items for {len(items)} prompts")
    expanded = []
    for index, (ids, prompt_items) in enumerate(zip(prompts, items, strict=True)):
        try:
            expanded.append(expand_placeholders(ids, prompt_items, placeholder_ids))
        except InvalidRequest as error:
            raise InvalidRequest(
                f"prompt {index} of {len(prompts)}: {error.message}",
                reason=error.reason,
                details={**error.details, "prompt": index},
            ) from error
    return expanded


def interleave_timestamps(
    ids: Sequence[int] | npt.NDArray[np.integer],
    *,
    placeholder_id: int,
    frame_texts: Sequence[Sequence[Sequence[int]]],
    vision_start_id: int,
    vision_end_id: int,
) -> Ids:
    """A prompt with one placeholder per clip rewritten with one placeholder per frame.

    The k-th placeholder becomes, for each frame of clip k, its timestamp's ids, vision start, one placeholder
    and vision end, as Qwen3-VL's and Qwen3.5's processors write it (``replace_video_token``).
    frame_texts: [clip][frame] the tokenised timestamp ("<0.3 seconds>") of the frames really sampled.
    Raises InvalidRequest when the prompt has another number of placeholders than there are clips.
    """
    prompt_ids: Ids = np.asarray(ids, dtype=np.int64)
    (at,) = np.nonzero(prompt_ids == placeholder_id)
    if len(at) != len(frame_texts):
        raise InvalidRequest(
            f"prompt has {len(at)} placeholders {placeholder_id}, needs {len(frame_texts)}, one per clip",
            reason="PLACEHOLDER_MISMATCH",
            details={"found": len(at), "needed": len(frame_texts)},
        )
    pieces: list[Ids] = []
    text_start = 0
    for position, frames in zip(at.tolist(), frame_texts, strict=True):
        pieces.append(prompt_ids[text_start:position])
        pieces += [
            np.array([*text, vision_start_id, placeholder_id, vision_end_id], dtype=np.int64)
            for text in frames
        ]
        text_start = position + 1
    return np.concatenate([*pieces, prompt_ids[text_start:]])


def _placeholder_runs(ids: Ids, known: set[int]) -> list[_Run]:
    """Maximal runs of one placeholder id."""
    if not known or not len(ids):
        return []
    change = np.flatnonzero(np.diff(ids)) + 1
    starts = np.concatenate([[0], change])
    ends = np.concatenate([change, [len(ids)]])
    is_placeholder = np.isin(ids[starts], list(known))
    return [
        _Run(int(start), int(end - start), int(ids[start]))
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


def _align(runs: Sequence[_Run], items: Sequence[PromptItem]) -> list[int]:
    """For each run the unit after its last one."""
    units = _Units.of(items)
    expanded = [(rows, unit + 1) for unit, rows in enumerate(units.rows)]
    per_item = [(1, end) for end in units.item_ends.values()]
    per_frame = [(1, unit + 1) for unit in range(len(units.rows))]
    for pieces in (expanded, per_item, per_frame):
        boundaries = _align_uniform(runs, pieces, units)
        if boundaries is not None:
            return boundaries
    return _align_mixed(runs, items, units)


def _align_uniform(
    runs: Sequence[_Run], pieces: Sequence[tuple[int, int]], units: _Units
) -> list[int] | None:
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


def _align_mixed(runs: Sequence[_Run], items: Sequence[PromptItem], units: _Units) -> list[int]:
    """Boundaries when each item takes the form it needs; a reading is the boundaries it puts after the
    runs."""
    num_units = len(units.rows)
    most = [0] * (num_units + 1)  # ids that the units from here can use at most, and at least
    least = [0] * (num_units + 1)
    for unit in reversed(range(num_units)):
        most[unit] = most[unit + 1] + units.rows[unit]
        least[unit] = 1 + least[units.item_ends.get(unit, unit + 1)]
    ids_left = sum(run.length for run in runs)
    readings = {0: 1}  # boundary -> number of readings that lead there, as far as two
    came_from: list[dict[int, int]] = []
    for run in runs:
        ids_left -= run.length
        reached: dict[int, int] = {}
        origin: dict[int, int] = {}
        for boundary, count in readings.items():
            for after in _reach(run, boundary, units):
                if least[after] <= ids_left <= most[after]:
                    reached[after] = min(2, reached.get(after, 0) + count)
                    origin[after] = boundary
        readings = reached
        came_from.append(origin)
    count = readings.get(num_units, 0)
    if count == 0:
        raise _mismatch(runs, items)
    if count > 1:
        raise InvalidRequest(
            f"{len(runs)} runs of placeholders with lengths {[run.length for run in runs][:16]} fit "
            f"{len(items)} items of {[item.num_rows for item in items][:16]} rows in more than one way; "
            "expand all items or none",
            reason="PLACEHOLDER_AMBIGUOUS",
            details={"runs": len(runs), "items": len(items)},
        )
    boundaries = [num_units]
    for origin in reversed(came_from):
        boundaries.append(origin[boundaries[-1]])
    return boundaries[-2::-1]


def _reach(run: _Run, first: int, units: _Units) -> list[int]:
    """The units that can come next after ``run`` when unit ``first`` opens it.

    uses[u] is a bit set: bit n says that the units first..u-1 can use exactly n ids.
    """
    full = (1 << (run.length + 1)) - 1
    uses = {first: 1}
    reached = []
    for unit in range(first, len(units.rows) + 1):
        ways = uses.pop(unit, 0)
        if ways >> run.length & 1:
            reached.append(unit)
        if unit == len(units.rows) or units.placeholder_ids[unit] != run.placeholder_id:
            break
        if ways:
            uses[unit + 1] = uses.get(unit + 1, 0) | (ways << 1 | ways << units.rows[unit]) & full
            item_end = units.item_ends.get(unit, unit + 1)
            uses[item_end] = uses.get(item_end, 0) | ways << 1 & full
        if not any(uses.values()):
            break
    return reached


def _mismatch(runs: Sequence[_Run], items: Sequence[PromptItem]) -> InvalidRequest:
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


def _assemble(
    ids: Ids, runs: Sequence[_Run], items: Sequence[PromptItem], boundaries: Sequence[int]
) -> ExpandedPrompt:
    owners = [(index, rows) for index, item in enumerate(items) for rows in item.unit_rows]
    segments: list[list[Segment]] = [[] for _ in items]
    pieces: list[Ids] = []
    length = text_start = unit = 0
    for run, boundary in zip(runs, boundaries, strict=True):
        text = ids[text_start : run.start]
        run_start = length + len(text)
        length = run_start
        for item, rows in owners[unit:boundary]:
            segments[item].append(Segment(length, rows))
            length += rows
        pieces += [text, np.full(length - run_start, run.placeholder_id, dtype=np.int64)]
        text_start, unit = run.start + run.length, boundary
    spans = tuple(ItemSpan(index, tuple(parts)) for index, parts in enumerate(segments))
    return ExpandedPrompt(np.concatenate([*pieces, ids[text_start:]]), spans)
