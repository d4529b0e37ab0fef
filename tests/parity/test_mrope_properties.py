"""Resumed and drafted positions equal the reference's ``get_rope_index`` on random prompts.

The reference computes whole prompts only: a part is compared with its place in the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm_adapter.items import Modality
from lm_adapter.mrope import MRopePositions, mrope_positions
from lm_adapter.placeholders import ExpandedPrompt, PromptItem, expand_placeholders, prompt_item
from lm_adapter.prefix_cache import PadScheme, pad_id, restore_placeholders, substitute_pad_ids
from tests.parity.test_mrope import IMAGE, MERGE, MODEL_CLASSES, VIDEO, reference_rope_index, tensor_or_none

VOCAB_SIZE = 1000
sweep = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Sequence:
    """A prompt as the reference and as we see it."""

    prompt: ExpandedPrompt
    grids: list[Grid]
    modalities: list[Modality]
    positions: MRopePositions


sides = st.integers(1, 7).map(lambda side: MERGE * side)
texts = st.lists(st.integers(0, 799), min_size=1, max_size=6)
parts = st.one_of(
    texts.map(lambda ids: ("text", ids)),
    st.tuples(sides, sides).map(lambda hw: ("image", (1, *hw))),
    st.tuples(st.integers(1, 4), sides, sides, st.lists(texts, min_size=4, max_size=4)).map(
        lambda clip: ("clip", clip)
    ),
)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    """Text, images and clips in any order, each vision run after some text (the vision start id, which every
    chat template writes and the reference relies on); clips with a timestamp before every frame."""
    ids: list[int] = []
    items: list[PromptItem] = []
    grids: list[Grid] = []
    modalities: list[Modality] = []
    for kind, content in draw(st.lists(parts, min_size=1, max_size=6)):
        if kind == "text":
            ids += content
            continue
        modality = Modality.IMAGE if kind == "image" else Modality.VIDEO
        grid = content if kind == "image" else content[:3]
        placeholder = IMAGE if kind == "image" else VIDEO
        items.append(
            prompt_item(
                grid, placeholder_id=placeholder, merge_size=MERGE, modality=modality, merges_time=False
            )
        )
        grids.append(grid)
        modalities.append(modality)
        for frame in range(grid[0]):
            ids += [*(content[3][frame] if kind == "clip" else []), 800, placeholder]
    prompt = expand_placeholders(ids, items, [IMAGE, VIDEO])
    return Sequence(prompt, grids, modalities, mrope_positions(prompt, grids, merge_size=MERGE))


def reference_positions(
    family: str, sequence: Sequence, more: list[int]
) -> tuple[npt.NDArray[np.int64], int]:
    """Positions and delta of the prompt with text ``more`` behind it."""
    ids = torch.from_numpy(np.concatenate([sequence.prompt.ids, np.array(more, dtype=np.int64)]))[None]

    def grids_of(modality: Modality) -> list[Grid]:
        return [g for g, m in zip(sequence.grids, sequence.modalities, strict=True) if m is modality]

    positions, delta = rope_index(family)(
        input_ids=ids,
        mm_token_type_ids=(ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        image_grid_thw=tensor_or_none(grids_of(Modality.IMAGE)),
        video_grid_thw=tensor_or_none(grids_of(Modality.VIDEO)),
    )
    return positions[:, 0].numpy(), int(delta)


rope_index = cache(reference_rope_index)


@pytest.mark.parametrize("family", MODEL_CLASSES)
@sweep
@given(sequence=sequences(), generated=st.lists(st.integers(0, 799), max_size=8), data=st.data())
def test_p03_a_retracted_request_and_a_prefix_hit_resume_as_the_whole_sequence(
    family: str, sequence: Sequence, generated: list[int], data: st.DataObject
) -> None:
    """The prompt with what was generated is prefilled again, from any token on: in text, in a vision run, in
    what was generated."""
    expected, _ = reference_positions(family, sequence, generated)
    total = len(sequence.prompt) + len(generated)
    hit = data.draw(st.integers(0, total))
    np.testing.assert_array_equal(sequence.positions.chunk(hit, total), expected[:, hit:])
    assert sequence.positions.decode(total) == expected.max() + 1
    for n, column in enumerate(expected[:, len(sequence.prompt) :].T):
        assert (column == sequence.positions.decode(len(sequence.prompt) + n)).all()


@pytest.mark.parametrize("family", MODEL_CLASSES)
@sweep
@given(sequence=sequences(), accepted=st.integers(0, 5), drafted=st.integers(1, 6))
def test_p06_drafts_stand_where_accepted_tokens_would(
    family: str, sequence: Sequence, accepted: int, drafted: int
) -> None:
    index = len(sequence.prompt) + accepted
    expected, _ = reference_positions(family, sequence, [1] * (accepted + drafted))
    np.testing.assert_array_equal(sequence.positions.drafts(index, np.arange(drafted)), expected[:, index:])
    # A tree: every branch stands where the chain stands at that depth.
    depths = [0, 1, 1, 2, 2, 2][:drafted]
    tree = sequence.positions.drafts(index, depths)
    np.testing.assert_array_equal(tree, sequence.positions.drafts(index, range(4))[:, depths])
    # The draft model reads the same prompt without a pad id.
    digests = [bytes([n + 1] * 32) for n in range(len(sequence.grids))]
    pads = [
        pad_id(digest, modality, PadScheme.TOKENSPEED)
        for digest, modality in zip(digests, sequence.modalities, strict=True)
    ]
    restored = restore_placeholders(
        substitute_pad_ids(sequence.prompt, pads),
        scheme=PadScheme.TOKENSPEED,
        image_placeholder_id=IMAGE,
        video_placeholder_id=VIDEO,
        vocab_size=VOCAB_SIZE,
    )
    np.testing.assert_array_equal(restored, sequence.prompt.ids)
