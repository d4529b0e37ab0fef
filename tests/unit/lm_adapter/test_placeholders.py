"""Placeholder alignment and expansion."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Modality
from lm_adapter.prefill.placeholders import (
    ExpandedPrompt,
    PromptItem,
    expand_batch,
    expand_placeholders,
    prompt_item,
)

IMAGE, VIDEO = 900, 901


def image(rows: int) -> PromptItem:
    return PromptItem(IMAGE, (rows,))


def clip(*rows: int) -> PromptItem:
    return PromptItem(VIDEO, rows)


def segments(prompt: ExpandedPrompt) -> list[list[tuple[int, int]]]:
    return [[(start, length) for start, length in span.segments] for span in prompt.spans]


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


@pytest.mark.parametrize(
    ("ids", "items", "found", "needed"),
    [
        ([1, 2], [image(7)], "0 placeholders", "7 rows"),
        ([IMAGE], [], "1 placeholders", "0 rows"),
        ([1, *[IMAGE] * 5, 2], [image(7)], "5 placeholders", "7 rows"),
        ([IMAGE, 1, IMAGE], [image(4)], "2 placeholders", "4 rows"),
        ([VIDEO, IMAGE], [image(2), clip(2)], "1 placeholders", "2 rows"),
        ([IMAGE] * 3, [image(2), image(4), image(4), image(4)], "3 placeholders", "14 rows"),
    ],
)
def test_p05_mismatch_gives_both_numbers(
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


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[PromptItem], list[list[int]], list[list[tuple[int, int]]]]:
    """Items, prompts that mean them (expanded; one id per frame or per item), the expanded segments."""
    items: list[PromptItem] = []
    expanded: list[int] = []
    collapsed: list[int] = []
    expected: list[list[tuple[int, int]]] = []
    has_timestamps = draw(st.booleans())
    for _ in range(draw(st.integers(0, 6))):
        is_clip = draw(st.booleans())
        rows = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3 if is_clip else 1))
        item = PromptItem(VIDEO if is_clip else IMAGE, tuple(rows))
        items.append(item)
        expected.append([])
        for index, num_rows in enumerate(rows):
            is_apart = index > 0 and has_timestamps
            text = [5] * draw(st.integers(int(is_apart), 2)) if index == 0 or has_timestamps else []
            expected[-1].append((len(expanded) + len(text), num_rows))
            expanded += text + [item.placeholder_id] * num_rows
            collapsed += text + ([item.placeholder_id] if index == 0 or has_timestamps else [])
    return items, [[*expanded, 6], [*collapsed, 6]], expected


@settings(max_examples=120, deadline=None)
@given(layouts())
def test_p05_every_form_means_the_same_prompt(
    layout: tuple[list[PromptItem], list[list[int]], list[list[tuple[int, int]]]],
) -> None:
    items, prompts, expected = layout
    for prompt_ids in prompts:
        prompt = expand_placeholders(np.array(prompt_ids), items, [IMAGE, VIDEO])
        assert prompt.ids.tolist() == prompts[0]
        assert segments(prompt) == expected


@pytest.mark.parametrize(
    ("ids", "items"),
    [
        ([*[IMAGE] * 4, 1, IMAGE], [image(4), image(6)]),
        ([*[VIDEO] * 8, 1, VIDEO, 1, VIDEO], [clip(4, 4), clip(4, 4)]),
        ([*[VIDEO] * 3], [clip(4, 4, 4)]),
    ],
    ids=["image", "clip", "frames side by side"],
)
def test_a_prompt_of_several_forms_is_refused(ids: list[int], items: list[PromptItem]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        expand_placeholders(ids, items)
    assert caught.value.reason == "PLACEHOLDER_MISMATCH"
