"""A prefix-cache hit that ends inside a vision run: which rows are needed, where they go and stand."""

from __future__ import annotations

import pytest
import torch

from lm_adapter.errors import InvalidRequest
from lm_adapter.mrope import mrope_positions
from lm_adapter.placeholders import ExpandedPrompt, PromptItem, expand_placeholders
from lm_adapter.splice import RowsLayout, Splicer, StepChunk, items_needed, splice_step

IMAGE, D = 900, 2


def two_images() -> ExpandedPrompt:
    """Tokens 1..6 and 8..11 are visual."""
    return expand_placeholders([1, IMAGE, 2, IMAGE, 3], [PromptItem(IMAGE, (6,)), PromptItem(IMAGE, (4,))])


def test_a_hit_inside_an_items_rows() -> None:
    prompt = two_images()
    positions = mrope_positions(prompt, [(1, 4, 6), (1, 4, 4)], merge_size=2)
    rows = [torch.arange(6.0)[:, None].expand(6, D), 10 + torch.arange(4.0)[:, None].expand(4, D)]
    splicer = Splicer(prompt.spans, rows, RowsLayout(D), inputs_embeds_dtype=torch.float32)
    embeds = torch.full((len(prompt) - 4, D), -1.0)
    splice_step(embeds, [StepChunk(splicer, 4, len(embeds))])
    assert embeds[:, 0].tolist() == [3, 4, 5, -1, 10, 11, 12, 13, -1]
    assert positions.chunk(4, 8).tolist() == [[1, 1, 1, 4], [2, 2, 2, 4], [1, 2, 3, 4]]


def test_items_behind_the_hit_alone_need_rows() -> None:
    prompt = two_images()
    assert items_needed(prompt.spans, 0) == [0, 1]
    assert items_needed(prompt.spans, 6) == [0, 1]
    assert items_needed(prompt.spans, 7) == [1]
    assert items_needed(prompt.spans, 12) == []
    assert items_needed(prompt.spans, 0, 8) == [0]
    assert items_needed(prompt.spans, 7, 8) == []


def test_rows_of_cached_items_are_never_asked_for() -> None:
    prompt = two_images()
    rows = [None, torch.ones(4, D)]
    splicer = Splicer(prompt.spans, rows, RowsLayout(D), inputs_embeds_dtype=torch.float32)
    embeds = torch.zeros(len(prompt) - 7, D)
    splice_step(embeds, [StepChunk(splicer, 7, len(embeds))])
    assert embeds[:, 0].tolist() == [0, 1, 1, 1, 1, 0]
    # A request that has no tokens in a step needs none of the rows that it stands in either.
    assert splice_step(embeds, [StepChunk(splicer, 3, 0)]).num_visual == 0
    untouched = torch.zeros(len(prompt) - 6, D)
    with pytest.raises(InvalidRequest, match=r"item 0: rows 5\.\.6") as caught:
        splice_step(untouched, [StepChunk(splicer, 6, len(untouched))])
    assert caught.value.reason == "ROWS_DROPPED"
    assert not untouched.any()


def test_drafts_say_what_is_wrong() -> None:
    prompt = two_images()
    positions = mrope_positions(prompt, [(1, 4, 6), (1, 4, 4)], merge_size=2)
    with pytest.raises(InvalidRequest, match=r"start 3 and end 2"):
        positions.chunk(3, 2)
    with pytest.raises(InvalidRequest, match=r"token 12 belongs to the prompt of 13 tokens"):
        positions.drafts(12, [0])
    with pytest.raises(InvalidRequest, match=r"smallest -1"):
        positions.drafts(13, [0, -1])
    assert positions.drafts(13, []).shape == (3, 0)
