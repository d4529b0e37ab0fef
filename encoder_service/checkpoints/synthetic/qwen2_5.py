"""Sizes of the random checkpoints of Qwen2.5-VL, and the layers of its language model.

The tower of size ``full`` has the published dimensions. The language model is always small, but as wide as
the tower's rows. As on the hub, config.json has the language model's settings beside ``vision_config``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from encoder_service.checkpoints.synthetic.family import LanguageTensors, SyntheticFamily
from encoder_service.checkpoints.synthetic.tensors import TensorSpec, bias, gated_mlp, rms_norm, weight
from encoder_service.checkpoints.synthetic.tokens import QWEN_TOKENS

# full_blocks: blocks that attend within the whole frame.
TOWERS = {
    "tiny": {"depth": 4, "hidden_size": 64, "num_heads": 4, "mlp": 156, "full_blocks": [1, 3]},
    "small": {"depth": 8, "hidden_size": 320, "num_heads": 4, "mlp": 852, "full_blocks": [3, 7]},
    "full": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "mlp": 3420, "full_blocks": [7, 15, 23, 31]},
}
# Hidden size, layers, heads, key-value heads, intermediate size. The heads are together as wide as the model.
LANGUAGE_MODELS = {
    "tiny": (64, 3, 2, 1, 128),
    "small": (256, 4, 4, 2, 768),
    "full": (3584, 2, 28, 4, 3584),
}


def set_sizes(config: dict[str, Any], size: str) -> None:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config |= dict(zip((*names, "intermediate_size"), LANGUAGE_MODELS[size], strict=True))
    config["max_window_layers"] = config["num_hidden_layers"]
    # Rotary frequencies of the time, height and width axes: a quarter, three and three eighths.
    half = head_dim(config) // 2
    config["rope_scaling"]["mrope_section"] = [half // 4, half * 3 // 8, half * 3 // 8]
    tower: dict[str, Any] = dict(TOWERS[size])
    tower["intermediate_size"] = tower.pop("mlp")
    tower["fullatt_block_indexes"] = tower.pop("full_blocks")
    config["vision_config"] |= tower | {"out_hidden_size": config["hidden_size"]}


def head_dim(text: dict[str, Any]) -> int:
    width: int = text["hidden_size"] // text["num_attention_heads"]
    return width


def layer(text: dict[str, Any], prefix: str, _number: int) -> Iterator[TensorSpec]:
    """A layer of Qwen2's architecture: q, k and v have biases."""
    width, kv_width = text["hidden_size"], text["num_key_value_heads"] * head_dim(text)
    yield rms_norm(f"{prefix}.input_layernorm", width)
    for name, outputs in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
        yield weight(f"{prefix}.self_attn.{name}.weight", outputs, width)
        yield bias(f"{prefix}.self_attn.{name}.bias", outputs)
    yield weight(f"{prefix}.self_attn.o_proj.weight", width, width)
    yield rms_norm(f"{prefix}.post_attention_layernorm", width)
    yield from gated_mlp(f"{prefix}.mlp", width, text["intermediate_size"])


QWEN2_5_VL = SyntheticFamily(
    set_sizes=set_sizes,
    settings="qwen2_5_vl",
    tokens=QWEN_TOKENS,
    language=LanguageTensors("model", "lm_head", layer=layer),
    template_in_json=True,
)
