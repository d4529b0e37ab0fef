"""The reference package loads synthetic checkpoints whole, and its answers depend on the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.reference import KIMI_VISION_NAMES, import_reference
from encoder_service.checkpoints.synthetic import FAMILIES, make_checkpoint

MODEL_CLASSES = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
}
TOWER_PREFIXES = ("model.visual.", "model.vision_tower.", "model.mm_projector.")


def reference_config(checkpoint: Path) -> Any:
    """The reference's config. Its Kimi class knows its own spelling only and keeps its defaults where it
    meets the published one, so that Kimi's is respelled here."""
    transformers = import_reference()
    raw = json.loads((checkpoint / "config.json").read_text())
    if raw["model_type"] != "kimi_k25":
        return transformers.AutoConfig.from_pretrained(checkpoint)
    vision = raw["vision_config"]
    return transformers.Kimi_K25Config(
        text_config=raw["text_config"],
        vision_config={own: vision[published] for published, own in KIMI_VISION_NAMES.items()},
        projection_hidden_size=vision["mm_hidden_size"],
        projection_layer_norm_eps=vision["projector_ln_eps"],
        image_token_id=raw["media_placeholder_token_id"],
        tie_word_embeddings=raw["tie_word_embeddings"],
    )


@pytest.fixture(
    scope="module",
    params=[(family, "tiny") for family in FAMILIES]
    + [pytest.param((family, "small"), marks=pytest.mark.extended) for family in FAMILIES],
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(family, checkpoint, model, loading info) with the model in float32."""
    transformers = import_reference()
    family, size = request.param
    checkpoint = tmp_path_factory.mktemp("synthetic") / f"{family}-{size}"
    make_checkpoint(checkpoint, family, size, seed=5, with_lm=True)
    model, info = getattr(transformers, MODEL_CLASSES[family]).from_pretrained(
        checkpoint, config=reference_config(checkpoint), dtype=torch.float32, output_loading_info=True
    )
    return family, checkpoint, model.eval(), info


def test_the_reference_finds_every_tensor_and_no_other(loaded: Any) -> None:
    _, _, model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert not info["error_msgs"]
    assert any(name.startswith(TOWER_PREFIXES) for name in model.state_dict())
