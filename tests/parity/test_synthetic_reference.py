"""The reference package loads synthetic checkpoints whole, and its answers depend on the picture."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

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


@cache
def picture(which: int) -> Image.Image:
    """Waves of their own length, direction and colour: 200 x 260 pixels, RGB."""
    rows, columns = np.mgrid[0:200, 0:260]
    planes = [
        127 + 120 * np.sin(columns / (9 + 5 * which) + channel + which) * np.cos(rows / (21 - 4 * which))
        for channel in range(3)
    ]
    return Image.fromarray(np.stack(planes, axis=-1).astype(np.uint8))


def inputs_for(checkpoint: Path, which: int) -> Any:
    processor = import_reference().AutoProcessor.from_pretrained(checkpoint)
    content = [{"type": "image"}, {"type": "text", "text": "Describe the image."}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    return processor(text=[prompt], images=[picture(which)], return_tensors="pt")


def test_the_reference_finds_every_tensor_and_no_other(loaded: Any) -> None:
    _, _, model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert not info["error_msgs"]
    assert any(name.startswith(TOWER_PREFIXES) for name in model.state_dict())


@torch.inference_mode()
def test_the_answer_depends_on_the_picture(loaded: Any) -> None:
    """Rows, logits and greedy tokens of two pictures differ by much more than rounding."""
    _, checkpoint, model, _ = loaded
    rows, logits, tokens = [], [], []
    for which in (0, 1):
        inputs = inputs_for(checkpoint, which)
        features = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        rows.append(torch.cat(list(features.pooler_output)))
        logits.append(model(**inputs).logits[0, -1])
        generated = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        tokens.append(generated[0, inputs["input_ids"].shape[1] :].tolist())
    for tensor in (*rows, *logits):
        assert tensor.isfinite().all()
    assert 0.3 < rows[0].std() < 1.0
    assert (rows[0] - rows[1]).norm() > 0.5 * rows[0].norm()
    assert (logits[0] - logits[1]).abs().max() > 1.0
    assert tokens[0] != tokens[1]
    # Only ordinary tokens are ever generated: none ends the text or stands for a picture.
    assert max(max(tokens)) < 512
