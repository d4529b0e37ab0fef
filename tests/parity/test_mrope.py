"""M-RoPE positions and deltas equal the reference's ``get_rope_index`` over random batches of prompts."""

from __future__ import annotations

import importlib
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lm_adapter.items import Modality
from lm_adapter.mrope import MRopePositions, batch_positions, mrope_positions
from lm_adapter.placeholders import PromptItem, expand_placeholders, prompt_item
from tests.parity.reference import import_reference

IMAGE, VIDEO, MERGE = 900, 901, 2
MODEL_CLASSES = {"qwen3_vl": "Qwen3VLModel", "qwen3_5": "Qwen3_5Model"}
Grid = tuple[int, int, int]


def reference_rope_index(family: str) -> Any:
    """The reference's method; it reads the merge size and nothing else of its model."""
    import_reference()
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    model_class = getattr(modeling, MODEL_CLASSES[family])
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)))
    model.get_vision_position_ids = model_class.get_vision_position_ids.__get__(model)
    return model_class.get_rope_index.__get__(model)


class Prompt:
    """A random prompt: collapsed ids, items in prompt order, grids by modality for the reference."""

    def __init__(self, rng: random.Random) -> None:
        self.ids: list[int] = []
        self.items: list[PromptItem] = []
        self.grids: list[Grid] = []
        self.by_modality: dict[Modality, list[Grid]] = {Modality.IMAGE: [], Modality.VIDEO: []}
        self.text(rng, 0)
        for _ in range(rng.randrange(5)):
            self.item(rng)
            self.text(rng, 1)
        if self.items and rng.random() < 0.3:
            while self.ids[-1] < IMAGE:
                self.ids.pop()
        self.ids = self.ids or [1]

    def text(self, rng: random.Random, at_least: int) -> None:
        self.ids += [rng.randrange(800) for _ in range(rng.randrange(at_least, 12))]

    def item(self, rng: random.Random) -> None:
        modality = rng.choice(list(Modality))
        t = rng.randrange(1, 5) if modality is Modality.VIDEO else 1
        grid = (t, MERGE * rng.randrange(1, 9), MERGE * rng.randrange(1, 9))
        placeholder = IMAGE if modality is Modality.IMAGE else VIDEO
        self.items.append(
            prompt_item(
                grid, placeholder_id=placeholder, merge_size=MERGE, modality=modality, merges_time=False
            )
        )
        self.grids.append(grid)
        self.by_modality[modality].append(grid)
        for _ in range(t):
            self.text(rng, 1)  # timestamps: the reference tells frames apart by the text between them
            self.ids.append(placeholder)


def tensor_or_none(grids: list[Grid]) -> torch.Tensor | None:
    return torch.tensor(grids) if grids else None


@pytest.mark.parametrize("family", MODEL_CLASSES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_p01_positions_and_deltas_of_random_batches(family: str, side: Any) -> None:
    rope_index = reference_rope_index(family)
    num_prompts = num_items = num_ending_in_vision = 0
    first_seed = {"left": 0, "right": 1000}[side]
    for seed in range(first_seed, first_seed + 120):
        rng = random.Random(seed)
        batch = [Prompt(rng) for _ in range(rng.randrange(1, 6))]
        expanded = [expand_placeholders(prompt.ids, prompt.items, [IMAGE, VIDEO]) for prompt in batch]
        found = [
            mrope_positions(prompt, original.grids, merge_size=MERGE)
            for prompt, original in zip(expanded, batch, strict=True)
        ]
        length = max(map(len, expanded))
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(expanded):
            columns = slice(length - len(prompt), length) if side == "left" else slice(0, len(prompt))
            ids[row, columns] = torch.from_numpy(prompt.ids)
            mask[row, columns] = 1
        expected, deltas = rope_index(
            input_ids=ids,
            mm_token_type_ids=(ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
            image_grid_thw=tensor_or_none([g for p in batch for g in p.by_modality[Modality.IMAGE]]),
            video_grid_thw=tensor_or_none([g for p in batch for g in p.by_modality[Modality.VIDEO]]),
            attention_mask=mask,
        )
        positions = batch_positions(found, 0, length, padded_length=length, side=side)
        np.testing.assert_array_equal(positions, expected.numpy(), err_msg=f"seed {seed}")
        assert [prompt.delta for prompt in found] == deltas[:, 0].tolist(), f"seed {seed}"
        check_resumption(found)
        num_prompts += len(batch)
        num_items += sum(len(prompt.items) for prompt in batch)
        num_ending_in_vision += sum(bool(prompt.visual_mask[-1]) for prompt in expanded)
    print(f"{family} {side}: {num_prompts} prompts, {num_items} items, {num_ending_in_vision} end in vision")
    assert num_prompts > 300
    assert num_ending_in_vision > 30


def check_resumption(prompts: list[MRopePositions]) -> None:
    """p03: the maximum over the axes + 1 is what index + delta gives, however the prompt ends."""
    for prompt in prompts:
        assert prompt.next_position == prompt.num_tokens + prompt.delta == prompt.decode(prompt.num_tokens)
