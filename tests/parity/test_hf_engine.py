"""The language model fed with rows answers as the full model does with pixels: logits and greedy tokens."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence

import pytest

from encoder_service.checkpoints.synthetic import make_checkpoint
from lm_adapter.engines.hf import RemoteItem, RemoteVisionLM, load_language_model
from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Modality
from tests.families import REPRESENTATIVE
from tests.parity.full_model import VISION_END, VISION_START, FullModel, Picture
from tests.parity.tower_cases import assert_close

RELATIVE = 1e-5
"""Norm of the difference over norm of the full model's logits, in float32."""


class Pair:
    """One family's full model and remote-row engine over the same checkpoint."""

    def __init__(self, family: str, full: FullModel, remote: RemoteVisionLM) -> None:
        self.family, self.full, self.remote = family, full, remote

    def prompt(self, seed: int, pictures: Sequence[Picture], *, ends_in_vision: bool = False) -> list[int]:
        """An expanded prompt with text of random length before, between and after the items."""
        rng = random.Random(seed)
        ids = [rng.randrange(10, 500) for _ in range(rng.randrange(1, 9))]
        for index, picture in enumerate(pictures):
            is_clip = picture.modality is Modality.VIDEO
            placeholder = self.full.video_id if is_clip else self.full.image_id
            rows = self.full.num_rows(picture.grid)
            frames = picture.grid[0] if is_clip and not self.full.is_kimi else 1
            for _ in range(frames):
                ids += [rng.randrange(10, 500), VISION_START, *[placeholder] * (rows // frames)]
                ids += [] if ends_in_vision and index == len(pictures) - 1 else [VISION_END]
        return ids + ([] if ends_in_vision else [rng.randrange(10, 500) for _ in range(rng.randrange(1, 9))])

    def items(self, pictures: Sequence[Picture]) -> list[RemoteItem]:
        return [self.full.item(picture) for picture in pictures]


@pytest.fixture(scope="module", params=REPRESENTATIVE)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family = request.param
    checkpoint = tmp_path_factory.mktemp("hf") / family
    make_checkpoint(checkpoint, family, "tiny", seed=11, with_lm=True)
    return Pair(family, FullModel(family, checkpoint), load_language_model(checkpoint))


def pictures_for(pair: Pair, name: str) -> list[Picture]:
    image, video = Modality.IMAGE, Modality.VIDEO
    cases: dict[str, list[tuple[tuple[int, int, int], Modality]]] = {
        "text": [],
        "one": [((1, 4, 6), image)],
        "several": [((1, 4, 6), image), ((1, 10, 2), image), ((1, 2, 2), image)],
        "clip": [((3, 4, 6), video)],
        "both": [((1, 6, 4), image), ((2, 4, 8), video), ((1, 2, 8), image)],
    }
    return [pair.full.picture(seed, grid, modality) for seed, (grid, modality) in enumerate(cases[name])]


def remote_prompt(pair: Pair, ids: Sequence[int]) -> list[int]:
    """Kimi's published files know one placeholder for images and clips; the reference's second one is an id
    outside the vocabulary that nothing else means."""
    if not pair.full.is_kimi:
        return list(ids)
    return [pair.full.image_id if token == pair.full.video_id else token for token in ids]


@pytest.mark.parametrize(
    ("case", "ends_in_vision"),
    [("text", False), ("one", True), ("several", False), ("clip", True), ("both", False), ("both", True)],
)
def test_p01_p03_p04_logits_and_greedy_tokens_equal_the_full_models(
    pair: Pair, case: str, ends_in_vision: bool
) -> None:
    pictures = pictures_for(pair, case)
    ids = pair.prompt(3, pictures, ends_in_vision=ends_in_vision)
    expected = pair.full.logits(ids, pictures)
    items = pair.items(pictures)
    prompt = remote_prompt(pair, ids)
    found = pair.remote.prefill([prompt], [items], all_logits=True)
    assert found.prompt_logits_NV is not None
    assert_close(f"{pair.family} {case}", found.prompt_logits_NV[0], expected, RELATIVE)
    assert_close(f"{pair.family} {case} last", found.logits_BV[0], expected[-1], RELATIVE)
    (tokens,) = pair.remote.generate([prompt], [items], max_new_tokens=5)
    assert tokens == pair.full.greedy(ids, pictures, 5)
    if not ends_in_vision or pair.full.is_kimi:
        assert tokens == pair.full.generate(ids, pictures, 5)


def test_p02_p04_a_batch_of_different_prompts_equals_each_alone(pair: Pair) -> None:
    """Each prompt keeps its own items; one comes twice, as when two samples share it. In chunks as well: a
    chunk may hold the end of one prompt's padding, another's first image and a third's text."""
    cases = ["several", "text", "one", "both", "one"]
    batch = [pictures_for(pair, case) for case in cases]
    prompts = [pair.prompt(20 + len(case), pictures) for case, pictures in zip(cases, batch, strict=True)]
    items = [pair.items(pictures) for pictures in batch]
    ids = [remote_prompt(pair, prompt) for prompt in prompts]
    expected = [pair.full.logits(prompt, pictures) for prompt, pictures in zip(prompts, batch, strict=True)]
    greedy = [pair.full.greedy(prompt, pictures, 4) for prompt, pictures in zip(prompts, batch, strict=True)]
    for chunk_size in (None, 1, 5):
        found = pair.remote.prefill(ids, items, chunk_size=chunk_size, all_logits=True)
        assert found.prompt_logits_NV is not None
        assert all((delta == 0) == pair.full.is_kimi for delta in found.deltas[2:])
        for case, logits, whole in zip(cases, found.prompt_logits_NV, expected, strict=True):
            assert_close(f"{pair.family} batch {case} chunk {chunk_size}", logits, whole, RELATIVE)
        assert pair.remote.generate(ids, items, max_new_tokens=4, chunk_size=chunk_size) == greedy


def test_p24_rows_are_not_held_after_the_prefill(pair: Pair) -> None:
    pictures = pictures_for(pair, "one")
    items = pair.items(pictures)
    alive = [weakref.ref(item.rows) for item in items]
    state = pair.remote.prefill([pair.prompt(7, pictures)], [items], chunk_size=4)
    del items
    gc.collect()
    assert [ref() for ref in alive] == [None]
    assert pair.remote.decode(state, [20]).isfinite().all()


def test_generation_stops_at_a_stop_id_and_the_rest_goes_on(pair: Pair) -> None:
    prompts = [pair.prompt(30, []), pair.prompt(31, [])]
    free = pair.remote.generate(prompts, [[], []], max_new_tokens=8)
    stop = free[0][2]
    stopped = pair.remote.generate(prompts, [[], []], max_new_tokens=8, stop_ids={stop})
    for without, with_stop in zip(free, stopped, strict=True):
        cut = without.index(stop) + 1 if stop in without else len(without)
        assert with_stop == without[:cut]
    assert pair.remote.generate(prompts, [[], []], max_new_tokens=0) == [[], []]
    with pytest.raises(InvalidRequest, match="2 prompts was given 1"):
        pair.remote.decode(pair.remote.prefill(prompts, [[], []]), [1])
