"""M-RoPE positions: padded and refused; parity with the reference is in tests/parity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lm_adapter.errors import InvalidRequest
from lm_adapter.prefill.mrope import MRopePositions, batch_positions, mrope_positions, plain_positions
from lm_adapter.prefill.placeholders import ExpandedPrompt, PromptItem, expand_placeholders
from lm_adapter.prefill.prefix_cache import substitute_pad_ids

IMAGE, VIDEO = 900, 901


def image_prompt(ids: list[int], grids: list[tuple[int, int, int]]) -> tuple[ExpandedPrompt, MRopePositions]:
    items = [PromptItem(IMAGE, (t * h * w // 4,)) for t, h, w in grids]
    prompt = expand_placeholders(ids, items)
    return prompt, mrope_positions(prompt, grids, merge_size=2)


def test_a_clip_in_one_run_keeps_its_time_axis() -> None:
    """An item of one run with t > 1 advances by its longest axis, t among them."""
    prompt = expand_placeholders([VIDEO, 5], [PromptItem(VIDEO, (3,))])
    positions = mrope_positions(prompt, [(3, 2, 2)], merge_size=2)
    assert positions.prompt.tolist() == [[0, 1, 2, 3], [0, 0, 0, 3], [0, 0, 0, 3]]
    assert positions.delta == 0


def test_p04_positions_do_not_depend_on_pad_ids_and_decode_needs_only_the_delta() -> None:
    prompt, positions = image_prompt([1, IMAGE, 2], [(1, 4, 4)])
    padded = ExpandedPrompt(substitute_pad_ids(prompt, [1_234_567]), prompt.spans)
    assert 1_234_567 in padded.ids
    np.testing.assert_array_equal(mrope_positions(padded, [(1, 4, 4)], merge_size=2).prompt, positions.prompt)
    # Ids after substitution no longer say where the items are, and that is found out.
    with pytest.raises(InvalidRequest, match="0 placeholders found"):
        expand_placeholders(padded.ids, [PromptItem(IMAGE, (4,))])
    assert [positions.decode(n) for n in (6, 7, 8)] == [n + positions.delta for n in (6, 7, 8)]


def test_plain_positions() -> None:
    positions = plain_positions(4)
    assert positions.prompt.tolist() == [[0, 1, 2, 3]] * 3
    assert (positions.delta, positions.next_position, positions.decode(9)) == (0, 4, 9)
    assert plain_positions(0).next_position == 0


def test_batches_pad_on_either_side() -> None:
    _, long = image_prompt([1, IMAGE, 2], [(1, 4, 4)])
    _, short = image_prompt([1, 2], [])
    left = batch_positions([long, short], 0, 8, padded_length=6, side="left")
    assert left[:, 0].tolist() == long.chunk(0, 8).tolist()
    assert left[:, 1].tolist() == [[0, 0, 0, 0, 0, 1, 2, 3]] * 3
    right = batch_positions([long, short], 1, 6, padded_length=6, side="right")
    assert right[:, 1].tolist() == [[1, 0, 0, 0, 0]] * 3
    np.testing.assert_array_equal(
        left[:, :, 3:5], batch_positions([long, short], 3, 5, padded_length=6, side="left")
    )
    with pytest.raises(InvalidRequest, match=r"6 tokens.*is 5"):
        batch_positions([long], 0, 5, padded_length=5, side="left")
    with pytest.raises(InvalidRequest, match=r"column 7 .* 6"):
        batch_positions([long], 0, 7, padded_length=6, side="right")


def test_errors_give_both_figures() -> None:
    prompt, positions = image_prompt([1, IMAGE], [(1, 4, 4)])
    with pytest.raises(InvalidRequest, match="1 items, 0 grids"):
        mrope_positions(prompt, [], merge_size=2)
    with pytest.raises(InvalidRequest, match=r"6 rows.*4 placeholders") as caught:
        mrope_positions(prompt, [(1, 4, 6)], merge_size=2)
    assert caught.value.reason == "GRID_MISMATCH"
    for steps in ([1, 2], [float("nan")], [0], [-1]):
        with pytest.raises(InvalidRequest, match=r"time_steps are .* needs 1 finite numbers above 0"):
            mrope_positions(prompt, [(1, 4, 4)], merge_size=2, time_steps=steps)
    clip = expand_placeholders([VIDEO], [PromptItem(VIDEO, (3,))])
    with pytest.raises(InvalidRequest, match=r"grid \[3, 2, 2\], centred positions need a t of 1"):
        mrope_positions(clip, [(3, 2, 2)], merge_size=2, centred=True)
    with pytest.raises(InvalidRequest, match=r"token 3 .* 5 tokens"):
        positions.decode(3)
    with pytest.raises(InvalidRequest, match="start 3 and end 2"):
        positions.chunk(3, 2)
    with pytest.raises(InvalidRequest, match=r"token 4 belongs to the prompt of 5 tokens"):
        positions.drafts(4, [0])
    with pytest.raises(InvalidRequest, match=r"smallest -1"):
        positions.drafts(5, [0, -1])
    assert positions.drafts(5, []).shape == (3, 0)


@pytest.mark.parametrize(
    ("grid", "merge_size"),
    [([1, 5, 7], 2), ([1, 5, 6], 2), ([1, 4], 2), ([0, 4, 6], 2), ([1, 4, 6], 0), ([1, -4, -6], 2)],
)
def test_grids_that_the_merge_does_not_divide_are_refused(grid: list[int], merge_size: int) -> None:
    """[1, 5, 7] has as many rows as [1, 4, 6] after rounding down, and is none of a tower's."""
    prompt, _ = image_prompt([1, IMAGE, 2], [(1, 4, 6)])
    with pytest.raises(InvalidRequest, match=rf"needs \[t, h, w\].*merge size {merge_size}") as raised:
        mrope_positions(prompt, [grid], merge_size=merge_size)
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
    _, positions = image_prompt([1, IMAGE, 2], [(1, 4, 6)])
    assert batch_positions([positions], 0, 9, padded_length=9, side="left").shape == (3, 1, 9)
    with pytest.raises(InvalidRequest, match=text):
        batch_positions([positions], start, end, padded_length=9, side=side)
