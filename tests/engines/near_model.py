"""A Qwen2-VL checkpoint: a model whose tower is near to Qwen3-VL's, and not served."""

from __future__ import annotations

import json
from pathlib import Path

from bench.harness.reference import import_reference
from encoder_service.checkpoints.synthetic import make_checkpoint

ARCHITECTURE = "Qwen2VLForConditionalGeneration"
WEIGHTS = ("config.json", "model*.safetensors*", "video_preprocessor_config.json", "chat_template.json")


def write_near_checkpoint(out: Path) -> Path:
    """A tiny one, whole, with the tokenizer of the synthetic Qwen3-VL, whose ids of special tokens it has."""
    make_checkpoint(out, "qwen3_vl", "tiny", seed=3)
    ids = json.loads((out / "config.json").read_text())
    for pattern in WEIGHTS:
        for path in out.glob(pattern):
            path.unlink()
    transformers = import_reference()
    config = transformers.Qwen2VLConfig(
        text_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"mrope_section": [4, 6, 6], "rope_theta": 1e6, "rope_type": "default"},
            "vocab_size": ids["text_config"]["vocab_size"],
        },
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2},
        **{name: ids[name] for name in ids if name.endswith("token_id")},
    )
    getattr(transformers, ARCHITECTURE)(config).save_pretrained(out)
    settings = json.loads((out / "preprocessor_config.json").read_text())
    settings |= {"patch_size": 14, "processor_class": "Qwen2VLProcessor"}
    (out / "preprocessor_config.json").write_text(json.dumps(settings))
    return out
