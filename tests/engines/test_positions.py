"""Positions of clips whose time is longer than their sides equal vLLM's, where transformers goes on
otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from encoder_service.checkpoints.synthetic import config_for
from lm_adapter.engines.shared.checkpoint import vision_interface
from lm_adapter.items import Grid, Modality
from lm_adapter.prefill.mrope import mrope_positions
from lm_adapter.prefill.placeholders import expand_placeholders

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("fps", [2.0, 1.7, 0.3])
def test_positions_of_qwen2_5_are_vllms(fps: float) -> None:
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Theirs

    config = config_for("qwen2_5_vl", "tiny")
    interface = vision_interface(config)
    grids = {Modality.IMAGE: Grid(1, 6, 4), Modality.VIDEO: Grid(5, 4, 2)}
    items = [interface.prompt_item(grid, modality) for modality, grid in grids.items()]
    image, video = interface.placeholder_ids
    prompt = expand_placeholders([1, image, 5, 7, video, 5, 9], items, interface.placeholder_ids)
    step = interface.time_step([frame / fps for frame in range(10)])
    found = mrope_positions(prompt, list(grids.values()), merge_size=2, time_steps=[1.0, step])

    def field(value: Any) -> Any:
        return SimpleNamespace(data=torch.tensor(value))

    features = [
        SimpleNamespace(
            modality=modality.value,
            mm_position=SimpleNamespace(offset=span.start),
            data={f"{modality.value}_grid_thw": field(list(grid)), "second_per_grid_ts": field(2 / fps)},
        )
        for (modality, grid), span in zip(grids.items(), prompt.spans, strict=True)
    ]
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(**config["vision_config"])))
    model.iter_mm_grid_thw = Theirs.iter_mm_grid_thw.__get__(model)
    expected, delta = Theirs.get_mrope_input_positions(model, prompt.ids.tolist(), features)
    np.testing.assert_array_equal(found.prompt, expected.numpy())
    assert found.delta == delta
