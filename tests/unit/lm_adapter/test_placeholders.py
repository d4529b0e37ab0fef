"""Placeholder alignment and expansion."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Modality
from lm_adapter.placeholders import (
    ExpandedPrompt,
    PromptItem,
    expand_batch,
    expand_placeholders,
    interleave_timestamps,
    prompt_item,
)

IMAGE, VIDEO, START, END = 900, 901, 902, 903


def image(rows: int) -> PromptItem:
    return PromptItem(IMAGE, (rows,))


def clip(*rows: int) -> PromptItem:
    return PromptItem(VIDEO, rows)


def segments(prompt: ExpandedPrompt) -> list[list[tuple[int, int]]]:
    return [[tuple(segment) for segment in span.segments] for span in prompt.spans]


def item_of(grid: tuple[int, ...], modality: Modality, *, merges_time: bool = False) -> PromptItem:
    return prompt_item(grid, placeholder_id=VIDEO, merge_size=2, modality=modality, merges_time=merges_time)


def test_unit_rows_of_the_families() -> None:
    assert item_of((1, 4, 6), Modality.IMAGE) == PromptItem(VIDEO, (6,))
    assert item_of((3, 4, 6), Modality.VIDEO) == PromptItem(VIDEO, (6, 6, 6))
    assert item_of((3, 4, 6), Modality.VIDEO, merges_time=True) == PromptItem(VIDEO, (6,))


@pytest.mark.parametrize("grid", [(0, 4, 4), (1, 3, 4), (1, 4, 3), (1, 0, 4), (1, 4)])
def test_an_item_of_a_grid_that_no_tower_has_is_refused(grid: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match=str(list(grid)).replace("[", r"\[")):
        item_of(grid, Modality.IMAGE)


def test_p05_an_expanded_run_is_one_item() -> None:
    ids = [1, *[IMAGE] * 5, 2]
    prompt = expand_placeholders(ids, [image(5)])
    assert prompt.ids.tolist() == ids
    assert segments(prompt) == [[(1, 5)]]
    with pytest.raises(InvalidRequest) as caught:
        expand_placeholders(ids, [image(7)])
    assert caught.value.reason == "PLACEHOLDER_MISMATCH"
    assert "5 placeholders found" in str(caught.value)
    assert "7 rows" in str(caught.value)


@pytest.mark.parametrize("ids", [[IMAGE] * 2, [IMAGE] * 5])
def test_p05_adjacent_items_without_a_separator(ids: list[int]) -> None:
    prompt = expand_placeholders(ids, [image(2), image(3)])
    assert prompt.ids.tolist() == [IMAGE] * 5
    assert segments(prompt) == [[(0, 2)], [(2, 3)]]


@pytest.mark.parametrize(
    ("ids", "items", "found", "needed"),
    [
        ([1, 2], [image(7)], "0 placeholders", "7 rows"),
        ([IMAGE], [], "1 placeholders", "0 rows"),
        ([IMAGE, 1, IMAGE], [image(4)], "2 placeholders", "4 rows"),
        ([VIDEO, IMAGE], [image(2), clip(2)], "1 placeholders", "2 rows"),
        ([IMAGE] * 3, [image(2), image(4), image(4), image(4)], "3 placeholders", "14 rows"),
    ],
)
def test_mismatch_gives_both_numbers(
    ids: list[int], items: list[PromptItem], found: str, needed: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"{found}.*{needed}") as caught:
        expand_placeholders(ids, items, [IMAGE, VIDEO])
    assert caught.value.reason == "PLACEHOLDER_MISMATCH"


def test_units_without_rows_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="item 1"):
        expand_placeholders([IMAGE, IMAGE], [image(1), PromptItem(IMAGE, ())])


def test_p02_a_batch_keeps_items_with_their_own_prompt() -> None:
    batch = expand_batch([[IMAGE, 1], [2], [IMAGE, IMAGE]], [[image(2)], [], [image(1), image(3)]])
    assert [prompt.ids.tolist() for prompt in batch] == [[IMAGE, IMAGE, 1], [2], [IMAGE] * 4]
    assert segments(batch[2]) == [[(0, 1)], [(1, 3)]]


def test_p02_a_neighbours_items_do_not_help() -> None:
    """Two placeholders and two items in the batch as a whole, and still prompt 1 is wrong."""
    with pytest.raises(InvalidRequest, match="prompt 0 of 2") as caught:
        expand_batch([[IMAGE, 1, IMAGE], [2]], [[image(4)], [image(4)]])
    assert caught.value.details["prompt"] == "0"
    with pytest.raises(InvalidRequest, match="2 prompts came with items for 1"):
        expand_batch([[1], [2]], [[]])


def test_interleaved_timestamps() -> None:
    ids = interleave_timestamps(
        [1, VIDEO, 2],
        placeholder_id=VIDEO,
        frame_texts=[[[11], [12, 13]]],
        vision_start_id=START,
        vision_end_id=END,
    )
    assert ids.tolist() == [1, 11, START, VIDEO, END, 12, 13, START, VIDEO, END, 2]
    prompt = expand_placeholders(ids, [item_of((2, 4, 4), Modality.VIDEO)])
    assert [segment.length for segment in prompt.spans[0].segments] == [4, 4]
    with pytest.raises(InvalidRequest, match=r"1 placeholders.*needs 2"):
        interleave_timestamps(
            [VIDEO], placeholder_id=VIDEO, frame_texts=[[], []], vision_start_id=1, vision_end_id=2
        )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[PromptItem], list[list[int]], list[list[tuple[int, int]]]]:
    """Items, prompts that mean them (expanded, one id per frame, one id per item), the expanded segments."""
    items: list[PromptItem] = []
    expanded: list[int] = []
    per_frame: list[int] = []
    per_item: list[int] = []
    expected: list[list[tuple[int, int]]] = []
    text_between_frames = draw(st.booleans())
    for _ in range(draw(st.integers(0, 6))):
        is_clip = draw(st.booleans())
        rows = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3 if is_clip else 1))
        item = PromptItem(VIDEO if is_clip else IMAGE, tuple(rows))
        items.append(item)
        expected.append([])
        for index, num_rows in enumerate(rows):
            may_have_text = index == 0 or text_between_frames
            text = [5] * draw(st.integers(0, 2)) if may_have_text else []
            expected[-1].append((len(expanded) + len(text), num_rows))
            expanded += text + [item.placeholder_id] * num_rows
            per_frame += text + [item.placeholder_id]
            per_item += text + ([item.placeholder_id] if index == 0 else [])
    prompts = [expanded, per_frame] if text_between_frames else [expanded, per_frame, per_item]
    return items, [[*prompt, 6] for prompt in prompts], expected


def readings_by_item(ids: list[int], items: list[PromptItem]) -> set[tuple[int, ...]]:
    """By brute force: the units before the end of each run, for each choice of a form of every item that
    fits."""
    runs = [(key, len([*group])) for key, group in itertools.groupby(ids) if key in (IMAGE, VIDEO)]
    found = set()
    for forms in itertools.product(("expanded", "frame", "item"), repeat=len(items)):
        # Of each placeholder its id and the units that are over with it.
        placeholders: list[tuple[int, int]] = []
        unit = 0
        for item, form in zip(items, forms, strict=True):
            each = [(rows if form == "expanded" else 1, 1) for rows in item.unit_rows]
            counts = [(1, len(item.unit_rows))] if form == "item" else each
            for num_ids, num_units in counts:
                placeholders += [(item.placeholder_id, -1)] * (num_ids - 1)
                unit += num_units
                placeholders.append((item.placeholder_id, unit))
        ends = [*itertools.accumulate(length for _, length in runs)]
        if len(placeholders) != sum(length for _, length in runs):
            continue
        if [one for one, length in runs for _ in range(length)] != [one for one, _ in placeholders]:
            continue
        boundaries = tuple(placeholders[end - 1][1] for end in ends)
        if -1 not in boundaries:
            found.add(boundaries)
    return found


@settings(max_examples=120, deadline=None)
@given(layouts())
def test_p05_every_form_means_the_same_prompt(
    layout: tuple[list[PromptItem], list[list[int]], list[list[tuple[int, int]]]],
) -> None:
    """But for one id per frame where items of several forms fit the runs as well: that is an error."""
    items, prompts, expected = layout
    for prompt_ids in prompts:
        if len(readings_by_item(prompt_ids, items)) > 1:
            event("ambiguous")
            with pytest.raises(InvalidRequest) as caught:
                expand_placeholders(np.array(prompt_ids), items, [IMAGE, VIDEO])
            assert caught.value.reason == "PLACEHOLDER_AMBIGUOUS"
            continue
        prompt = expand_placeholders(np.array(prompt_ids), items, [IMAGE, VIDEO])
        assert prompt.ids.tolist() == prompts[0]
        assert segments(prompt) == expected


Forms = Iterable[tuple[bool, ...]]


def readings(lengths: list[int], rows: list[int], forms: Forms) -> set[tuple[int, ...]]:
    """By brute force: the numbers of items per run for each choice of which items are expanded that fits."""
    found = set()
    for expanded in forms:
        used = [num_rows if is_expanded else 1 for num_rows, is_expanded in zip(rows, expanded, strict=True)]
        item_ends = [0, *itertools.accumulate(used)]
        run_ends = [0, *itertools.accumulate(lengths)]
        if set(run_ends) <= set(item_ends) and run_ends[-1] == item_ends[-1]:
            at = [item_ends.index(end) for end in run_ends]
            found.add(tuple(after - before for before, after in itertools.pairwise(at)))
    return found


@settings(max_examples=250, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.lists(st.integers(1, 4), max_size=5))
def test_mixed_forms_agree_with_brute_force(lengths: list[int], rows: list[int]) -> None:
    ids = [token for length in lengths for token in [5, *[IMAGE] * length]]
    items = [image(num_rows) for num_rows in rows]
    uniform = readings(lengths, rows, [(True,) * len(rows), (False,) * len(rows)])
    mixed = readings(lengths, rows, itertools.product((False, True), repeat=len(rows)))
    allowed = uniform or mixed
    event(f"{min(len(allowed), 2)} readings, uniform {bool(uniform)}")
    if len(allowed) != 1:
        with pytest.raises(InvalidRequest) as caught:
            expand_placeholders(ids, items, [IMAGE])
        assert caught.value.reason == ("PLACEHOLDER_AMBIGUOUS" if allowed else "PLACEHOLDER_MISMATCH")
        return
    prompt = expand_placeholders(ids, items, [IMAGE])
    text_at = [index for index, token in enumerate(prompt.ids.tolist()) if token == 5]
    counts = tuple(
        sum(start < span.start < end for span in prompt.spans)
        for start, end in itertools.pairwise([*text_at, len(prompt)])
    )
    assert {counts} == allowed
