"""Splicing rows into chunks of a prefill."""

from __future__ import annotations

import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_adapter.errors import InvalidRequest, InvalidRows
from lm_adapter.prefill.placeholders import ExpandedPrompt, PromptItem, expand_placeholders
from lm_adapter.prefill.splice import (
    RowsLayout,
    Splicer,
    StepChunk,
    StepSplice,
    check_item_rows,
    items_needed,
    splice_step,
)

IMAGE, VIDEO, D, L = 900, 901, 4, 2
LAYOUT = RowsLayout(out_width=D, num_deepstack_levels=L)


def make_rows(num_rows: int, item: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Row r of item i holds i * 1000 + r * 10 + level in every column of that level."""
    levels = torch.arange(1 + L).repeat_interleave(D)
    return (item * 1000 + torch.arange(num_rows)[:, None] * 10 + levels[None]).to(dtype)


def make_splicer(
    prompt: ExpandedPrompt, dtype: torch.dtype = torch.float32
) -> tuple[Splicer, list[torch.Tensor]]:
    rows = [make_rows(span.length, span.item + 1) for span in prompt.spans]
    return Splicer(prompt.spans, rows, LAYOUT, inputs_embeds_dtype=dtype), rows


def splice(splicer: Splicer, embeds: torch.Tensor, start: int) -> StepSplice:
    """The chunk of a prompt that ``embeds`` begins with."""
    return splice_step(embeds, [StepChunk(splicer, start, len(embeds))], backend="torch")


def test_a_view_of_a_batch_is_written_and_its_neighbours_are_not() -> None:
    prompt = expand_placeholders([IMAGE, 1], [PromptItem(IMAGE, (2,))])
    splicer, _ = make_splicer(prompt)
    batch = torch.full((3, 5, D), -1.0)
    splice(splicer, batch[1, 2:], 0)
    assert (batch[1, 2:4] != -1).all()
    batch[1, 2:4] = -1
    assert (batch == -1).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 2)),
        max_size=4,
    ),
    st.data(),
)
def test_p16_any_chunking_equals_the_whole(
    items: list[tuple[int, list[int], int]], data: st.DataObject
) -> None:
    """Main and deepstack levels of every token come from one row, whatever the chunks."""
    ids: list[int] = []
    for text, units, gap in items:
        ids += [1] * text
        for num_rows in units:
            ids += [VIDEO] * num_rows + [2] * gap
    prompt = expand_placeholders(ids, [PromptItem(VIDEO, tuple(units)) for _, units, _ in items])
    splicer, rows = make_splicer(prompt)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(prompt)))) | {0, len(prompt)})
    embeds = torch.full((len(prompt), D), -1.0)
    visual_tokens, levels = [], []
    for start, end in itertools.pairwise(cuts):
        spliced = splice(splicer, embeds[start:end], start)
        visual_tokens += [start + token for token in spliced.visual_tokens.tolist()]
        levels.append(spliced.deepstack)
        splicer.drop_before(end)
    if not levels:
        return
    all_rows = torch.cat(rows) if rows else torch.zeros(0, LAYOUT.width)
    mask = torch.from_numpy(prompt.visual_mask)
    assert visual_tokens == np.flatnonzero(prompt.visual_mask).tolist()
    assert (embeds[~mask] == -1).all()
    torch.testing.assert_close(embeds[mask], all_rows[:, :D], rtol=0, atol=0)
    deepstack = torch.cat(levels, dim=1)
    for level in range(L):
        torch.testing.assert_close(
            deepstack[level], all_rows[:, (level + 1) * D : (level + 2) * D], rtol=0, atol=0
        )
    torch.testing.assert_close(deepstack[0], embeds[mask] + 1, rtol=0, atol=0)


def test_p24_rows_are_let_go_as_the_prefill_passes_them() -> None:
    prompt = expand_placeholders([IMAGE, 1, IMAGE], [PromptItem(IMAGE, (2,)), PromptItem(IMAGE, (3,))])
    splicer, rows = make_splicer(prompt)
    held = [weakref.ref(one) for one in rows]
    rows.clear()
    for end, num_held in ((1, 2), (2, 1), (len(prompt), 0)):
        splicer.drop_before(end)
        assert sum(one() is not None for one in held) == num_held
    embeds = torch.full((len(prompt), D), -1.0)
    with pytest.raises(InvalidRequest) as caught:
        splice(splicer, embeds, 0)
    assert caught.value.reason == "ROWS_DROPPED"
    assert (embeds == -1).all()


def test_items_behind_a_prefix_hit_alone_need_rows() -> None:
    """Tokens 1..6 and 8..11 are visual."""
    prompt = expand_placeholders([1, IMAGE, 2, IMAGE, 3], [PromptItem(IMAGE, (6,)), PromptItem(IMAGE, (4,))])
    for start, items in [(0, [0, 1]), (6, [0, 1]), (7, [1]), (12, [])]:
        assert items_needed(prompt.spans, start) == items
    assert items_needed(prompt.spans, 0, 8) == [0]
    assert items_needed(prompt.spans, 7, 8) == []
    rows = [None, make_rows(4, 1)]
    splicer = Splicer(prompt.spans, rows, LAYOUT, inputs_embeds_dtype=torch.float32)
    embeds = torch.zeros(len(prompt) - 7, D)
    splice(splicer, embeds, 7)
    assert embeds[:, 0].tolist() == [0, 1000, 1010, 1020, 1030, 0]
    # A request that has no tokens in a step needs none of the rows that it stands in either.
    assert splice_step(embeds, [StepChunk(splicer, 3, 0)]).num_visual == 0
    untouched = torch.zeros(len(prompt) - 6, D)
    with pytest.raises(InvalidRequest, match=r"item 0: rows 5\.\.6") as caught:
        splice(splicer, untouched, 6)
    assert caught.value.reason == "ROWS_DROPPED"
    assert not untouched.any()


@pytest.mark.parametrize(
    ("rows", "field", "figures"),
    [
        (torch.zeros(2, 3 * D), "num_rows", "num_rows 2.*3"),
        (torch.zeros(4, 3 * D), "num_rows", "num_rows 4.*3"),
        (torch.zeros(3, D), "width", "width 4.*12"),
        (torch.zeros(3, 4 * D), "width", "width 16.*12"),
        (torch.zeros(3, 3, D), "rank", "rank 3.*2"),
        (torch.zeros(3, 3 * D, dtype=torch.float64), "dtype", "float64.*float32"),
        (torch.zeros(3, 3 * D, dtype=torch.int32), "dtype", "int32.*float32"),
    ],
)
def test_p22_rows_are_validated_before_anything_is_written(
    rows: torch.Tensor, field: str, figures: str
) -> None:
    prompt = expand_placeholders([IMAGE, 1, IMAGE], [PromptItem(IMAGE, (1,)), PromptItem(IMAGE, (3,))])
    with pytest.raises(InvalidRows, match=f"item 1.*{figures}") as caught:
        Splicer(prompt.spans, [make_rows(1, 1), rows], LAYOUT, inputs_embeds_dtype=torch.float32)
    assert caught.value.field == field


def test_p22_levels_that_only_the_sender_can_tell() -> None:
    """A width of 4 * (1 + 2) is also 6 * (1 + 1): the announced level count decides."""
    prompt = expand_placeholders([IMAGE], [PromptItem(IMAGE, (2,))])
    rows = [make_rows(2, 1)]
    Splicer(prompt.spans, rows, LAYOUT, inputs_embeds_dtype=torch.float32, announced_levels=[2])
    with pytest.raises(InvalidRows, match=r"deepstack levels 1.*2"):
        Splicer(prompt.spans, rows, LAYOUT, inputs_embeds_dtype=torch.float32, announced_levels=[1])
    with pytest.raises(InvalidRequest, match="1 items, rows came for 0"):
        Splicer(prompt.spans, [], LAYOUT, inputs_embeds_dtype=torch.float32)


def test_p22_a_wrong_chunk_is_refused_untouched() -> None:
    prompt = expand_placeholders([IMAGE], [PromptItem(IMAGE, (2,))])
    splicer, _ = make_splicer(prompt)
    for embeds, start in [
        (torch.zeros(2, D + 1), 0),
        (torch.zeros(1, 2, D), 0),
        (torch.zeros(2, D, dtype=torch.bfloat16), 0),
        (torch.zeros(2, D), -1),
    ]:
        with pytest.raises(InvalidRequest):
            splice(splicer, embeds, start)
        assert (embeds == 0).all()


CASTS = [
    (torch.float32, torch.float32, True),
    (torch.float32, torch.bfloat16, True),
    (torch.float32, torch.float16, True),
    (torch.bfloat16, torch.float32, True),
    (torch.float16, torch.float32, True),
    (torch.bfloat16, torch.bfloat16, True),
    (torch.bfloat16, torch.float16, False),
    (torch.float16, torch.bfloat16, False),
    (torch.float64, torch.float32, False),
    (torch.int8, torch.float32, False),
]


@pytest.mark.parametrize(("source", "target", "allowed"), CASTS)
def test_dtype_rules(source: torch.dtype, target: torch.dtype, allowed: bool) -> None:
    prompt = expand_placeholders([IMAGE], [PromptItem(IMAGE, (2,))])
    rows = (torch.randn(2, LAYOUT.width, generator=torch.Generator().manual_seed(0)) * 8).to(source)
    if not allowed:
        with pytest.raises(InvalidRows, match="may not be cast"):
            check_item_rows(0, rows, num_rows=2, layout=LAYOUT, inputs_embeds_dtype=target)
        return
    embeds = torch.zeros(2, D, dtype=target)
    spliced = splice(Splicer(prompt.spans, [rows], LAYOUT, inputs_embeds_dtype=target), embeds, 0)
    assert torch.equal(embeds, rows[:, :D].to(target))
    assert spliced.deepstack.dtype == target
    assert torch.equal(torch.cat([*spliced.deepstack], dim=1), rows[:, D:].to(target))
