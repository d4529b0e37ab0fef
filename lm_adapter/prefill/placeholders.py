"""Finds where the visual tokens of a prompt go: aligns placeholder ids with items, then expands the prompt.

Owns expansion and spans; positions belong to ``mrope``, rows to ``splice``. Pure numpy.

A prompt contains placeholder ids for its items: one id for each item, one for each frame of a clip, or one
for each row. Items may be adjacent without a separator; ``alignment`` defines how they are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Grid, Modality
from lm_adapter.prefill.alignment import Ids, Run, align, placeholder_runs
from lm_adapter.prefill.alignment import PromptItem as PromptItem


class Segment(NamedTuple):
    """A run of placeholder ids of one unit: tokens [start, start + length) of the expanded prompt."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class ItemSpan:
    """The tokens of one item's rows. item: its index among the prompt's items; segments: one per unit, in
    order.

    Rows 0..segments[0].length go to the first segment, the following rows to the second, and so on.
    ``length`` counts rows; there may also be text (timestamps) between ``start`` and ``end``.
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
    """A prompt with one placeholder id for every row. ids: int64 [N]; spans: one per item, in prompt
    order."""

    ids: Ids
    spans: tuple[ItemSpan, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def visual_mask(self) -> npt.NDArray[np.bool_]:
        """bool [N]: True at visual tokens."""
        mask = np.zeros(len(self.ids), dtype=np.bool_)
        for span in self.spans:
            for segment in span.segments:
                mask[segment.start : segment.end] = True
        return mask


def prompt_item(
    grid: Sequence[int],
    *,
    placeholder_id: int,
    merge_size: int,
    modality: Modality,
    merges_time: bool,
    has_timestamps: bool = True,
) -> PromptItem:
    """The placeholders that an item with this grid ([t, h, w] in patches) needs.

    Qwen: an image is one unit of t*h*w/merge^2 rows (t is 1); a clip is t units of h*w/merge^2 rows, because
    timestamps separate its frames; without (Qwen3-Omni) it is one unit. Kimi (``merges_time``): one unit of
    h*w/merge^2 rows for any t.
    Raises InvalidRequest for an empty grid and for sides that are not multiples of the merge size.
    """
    t, _, _ = merged_grid(grid, merge_size)
    num_rows = Grid(*map(int, grid)).num_rows(merge_size, merges_time=merges_time)
    num_units = 1 if merges_time or modality is Modality.IMAGE or not has_timestamps else t
    return PromptItem(placeholder_id, (num_rows // num_units,) * num_units)


def merged_grid(grid: Sequence[int], merge_size: int) -> tuple[int, int, int]:
    """(t, h / merge, w / merge) of a grid in patches. Raises InvalidRequest unless the merge divides it."""
    if len(grid) != 3 or merge_size < 1 or min(grid) < 1 or grid[1] % merge_size or grid[2] % merge_size:
        raise InvalidRequest(
            f"grid {list(grid)} needs [t, h, w] with t >= 1 and h, w positive multiples of the merge size "
            f"{merge_size}, which is at least 1",
            reason="GRID_MISMATCH",
            details={"grid": list(grid), "merge_size": merge_size},
        )
    t, h, w = (int(extent) for extent in grid)
    return t, h // merge_size, w // merge_size


def expand_placeholders(
    ids: Sequence[int] | npt.NDArray[np.integer],
    items: Sequence[PromptItem],
    placeholder_ids: Sequence[int] = (),
) -> ExpandedPrompt:
    """Expands a prompt to one placeholder id per row, and returns it with the span of each item's rows.

    ids: [N], before pad ids are substituted; items: in prompt order, images and clips together.
    placeholder_ids: further ids that are placeholders, even if no item of this prompt uses them, so that a
    prompt with placeholders but no items is detected.
    Raises InvalidRequest with reason PLACEHOLDER_MISMATCH when runs and items cannot be aligned.
    """
    prompt_ids: Ids = np.asarray(ids, dtype=np.int64)
    if prompt_ids.ndim != 1:
        raise InvalidRequest(f"a prompt's ids have 1 dimension, got {prompt_ids.ndim}")
    known = {*placeholder_ids, *(item.placeholder_id for item in items)}
    runs = placeholder_runs(prompt_ids, known)
    boundaries = align(runs, items)
    return _assemble(prompt_ids, runs, items, boundaries)


def expand_batch(
    prompts: Sequence[Sequence[int] | npt.NDArray[np.integer]],
    items: Sequence[Sequence[PromptItem]],
    placeholder_ids: Sequence[int] = (),
) -> list[ExpandedPrompt]:
    """``expand_placeholders`` for each prompt with its own items. Prompts do not affect one another.

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


def _assemble(
    ids: Ids, runs: Sequence[Run], items: Sequence[PromptItem], boundaries: Sequence[int]
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
