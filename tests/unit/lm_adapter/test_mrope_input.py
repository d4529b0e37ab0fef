"""What M-RoPE is not given positions of: grids that no tower makes, and columns that no batch has."""

from __future__ import annotations

from typing import Any

import pytest

from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Modality
from lm_adapter.mrope import batch_positions, mrope_positions
from lm_adapter.placeholders import expand_placeholders, prompt_item

ITEM = prompt_item((1, 4, 6), placeholder_id=9, merge_size=2, modality=Modality.IMAGE, merges_time=False)
PROMPT = expand_placeholders([1, 9, 2], [ITEM])


@pytest.mark.parametrize(
    ("grid", "merge_size"),
    [([1, 5, 7], 2), ([1, 5, 6], 2), ([1, 4], 2), ([0, 4, 6], 2), ([1, 4, 6], 0), ([1, -4, -6], 2)],
)
def test_grids_that_the_merge_does_not_divide_are_refused(grid: list[int], merge_size: int) -> None:
    """[1, 5, 7] has as many rows as [1, 4, 6] after rounding down, and is none of a tower's."""
    with pytest.raises(InvalidRequest, match=rf"needs \[t, h, w\].*merge size {merge_size}") as raised:
        mrope_positions(PROMPT, [grid], merge_size=merge_size)
    assert str(grid) in str(raised.value)


@pytest.mark.parametrize(
    ("start", "end", "side", "text"),
    [
        (3, 1, "left", "start 3 and end 1"),
        (-1, 2, "right", "start -1 and end 2"),
        (0, 2, "up", "'up', needs left or right"),
    ],
)
def test_columns_that_no_batch_has_are_refused(start: int, end: int, side: Any, text: str) -> None:
    positions = mrope_positions(PROMPT, [[1, 4, 6]], merge_size=2)
    assert batch_positions([positions], 0, 9, padded_length=9, side="left").shape == (3, 1, 9)
    with pytest.raises(InvalidRequest, match=text):
        batch_positions([positions], start, end, padded_length=9, side=side)
