"""Rows taken out of a prompt: ids, spans, positions and splice stay one prompt's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_adapter.errors import InvalidRequest
from lm_adapter.mrope import mrope_positions
from lm_adapter.placeholders import PromptItem, expand_placeholders
from lm_adapter.prefix_cache import PadIdLedger, PadScheme, shared_prefix_length
from lm_adapter.pruning import RowMask, choose_rows, prune_prompt, pruned_digest
from lm_adapter.splice import RowsLayout, Splicer
from lm_adapter.types import Modality

VIDEO, D = 901, 3


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3),
    st.data(),
)
def test_what_stays_is_the_whole_prompts(grids: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Column for column: a token that stays has the id, position and row that it had, and decoding goes on
    at the same position."""
    grids = [(t, 2 * h, 2 * w) for t, h, w in grids]
    ids = [token for t, _, _ in grids for _ in range(t) for token in (5, VIDEO)] + [6]
    prompt = expand_placeholders(ids, [PromptItem(VIDEO, (h * w // 4,) * t) for t, h, w in grids])
    positions = mrope_positions(prompt, grids, merge_size=2)
    keep: list[RowMask | None] = []
    for span in prompt.spans:
        kept = data.draw(st.none() | st.sets(st.integers(0, span.length - 1), min_size=1))
        keep.append(None if kept is None else np.isin(np.arange(span.length), list(kept)))
    pruned = prune_prompt(prompt, positions, keep)

    stays = np.ones(len(prompt), dtype=bool)
    for span, mask in zip(prompt.spans, keep, strict=True):
        tokens = np.concatenate([np.arange(s.start, s.end) for s in span.segments])
        stays[tokens] = True if mask is None else mask
    np.testing.assert_array_equal(pruned.prompt.ids, prompt.ids[stays])
    np.testing.assert_array_equal(pruned.positions.prompt, positions.prompt[:, stays])
    np.testing.assert_array_equal(pruned.prompt.visual_mask, prompt.visual_mask[stays])
    assert pruned.positions.next_position == positions.next_position
    assert pruned.positions.decode(len(pruned.prompt) + 2) == positions.decode(len(prompt) + 2)

    rows = [torch.arange(span.length * D).view(-1, D).float() + 100 * span.item for span in prompt.spans]
    layout = RowsLayout(D)
    whole, held = torch.full((len(prompt), D), -1.0), torch.full((len(pruned.prompt), D), -1.0)
    Splicer(prompt.spans, rows, layout, inputs_embeds_dtype=torch.float32).splice(whole, 0)
    splicer = Splicer(pruned.prompt.spans, rows, layout, inputs_embeds_dtype=torch.float32, keep=pruned.keep)
    cut = data.draw(st.integers(0, len(pruned.prompt)))
    splicer.splice(held[:cut], 0)
    splicer.splice(held[cut:], cut)
    assert torch.equal(held, whole[torch.from_numpy(stays)])


def test_the_hook_sees_every_item_and_its_choice_is_taken() -> None:
    """A pruner that keeps the first frame of a clip and all of an image."""
    seen = []

    def first_frame(item: int, grid: Any, rows: Any) -> RowMask | None:
        seen.append((item, tuple(grid), len(rows)))
        t, h, w = grid
        return None if t == 1 else np.arange(t * h * w // 4) < h * w // 4

    grids = [(1, 2, 2), (3, 2, 4)]
    prompt = expand_placeholders(
        [1, VIDEO, 2, VIDEO, 3, VIDEO, 4, VIDEO], [PromptItem(VIDEO, (1,)), PromptItem(VIDEO, (2, 2, 2))]
    )
    keep = choose_rows(first_frame, grids, [torch.zeros(1, D), torch.zeros(6, D)])
    assert seen == [(0, (1, 2, 2), 1), (1, (3, 2, 4), 6)]
    pruned = prune_prompt(prompt, mrope_positions(prompt, grids, merge_size=2), keep)
    # The timestamps of the frames that are gone stay.
    assert pruned.prompt.ids.tolist() == [1, VIDEO, 2, VIDEO, VIDEO, 3, 4]
    assert [segment[:] for segment in pruned.prompt.spans[1].segments] == [(3, 2)]
    assert pruned.positions.prompt.tolist()[0] == [0, 1, 2, 3, 3, 5, 8]


def test_p12_another_choice_of_rows_is_another_content() -> None:
    """KV of a pruned item is never shared with the whole one's, nor with another choice's."""
    digest = bytes(range(32))
    first, second = np.array([True, False, True]), np.array([True, True, False])
    names = {digest, pruned_digest(digest, first), pruned_digest(digest, second)}
    assert len(names) == 3
    assert pruned_digest(digest, None) == pruned_digest(digest, np.ones(3, dtype=bool)) == digest
    assert pruned_digest(digest, np.array([True, False])) != pruned_digest(
        digest, np.array([True, False, False])
    )
    prompt = expand_placeholders([1, VIDEO, 2], [PromptItem(VIDEO, (2,))])
    assert shared_prefix_length(prompt, [pruned_digest(digest, first)], prompt, [digest]) == 1
    ledger = PadIdLedger(PadScheme.SGLANG)
    assert all(ledger.claim(name, Modality.VIDEO).shareable for name in names)
    with pytest.raises(InvalidRequest, match="32 bytes, got 3"):
        pruned_digest(b"abc", first)


@pytest.mark.parametrize(
    ("mask", "figures"),
    [
        (np.ones(3, dtype=bool), r"2 rows.*\[3\]"),
        (np.zeros(2, dtype=bool), r"with 0 kept"),
        (np.ones(2, dtype=np.int64), r"int64"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask: Any, figures: str) -> None:
    prompt = expand_placeholders([1, VIDEO], [PromptItem(VIDEO, (2,))])
    positions = mrope_positions(prompt, [(1, 2, 4)], merge_size=2)
    with pytest.raises(InvalidRequest, match=figures):
        prune_prompt(prompt, positions, [mask])
    with pytest.raises(InvalidRequest, match="1 items, 0 masks"):
        prune_prompt(prompt, positions, [])
    with pytest.raises(InvalidRequest, match="1 grids came with rows of 0"):
        choose_rows(lambda *_: None, [(1, 2, 4)], [])
    with pytest.raises(InvalidRequest, match=r"1 of 2 rows are kept, the prompt has 2"):
        Splicer(
            prompt.spans,
            [torch.zeros(2, D)],
            RowsLayout(D),
            inputs_embeds_dtype=torch.float32,
            keep=[np.array([True, False])],
        )
