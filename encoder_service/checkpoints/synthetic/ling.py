"""Sizes and language-model tensors of the random checkpoints of Ling-3.0-VL.

The tower of size ``full`` has the published dimensions. The language model is always small, but as wide as
the tower's rows: Kimi delta attention in all layers but the last of each group, which has gated latent
attention, and routed and shared experts behind the first layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from encoder_service.checkpoints.synthetic.family import LanguageTensors, SyntheticFamily
from encoder_service.checkpoints.synthetic.qwen import TOWERS
from encoder_service.checkpoints.synthetic.tensors import TensorSpec, gated_mlp, rms_norm, weight
from encoder_service.checkpoints.synthetic.tokens import LING_TOKENS

# Hidden size, layers, heads, head dim without rotary positions, intermediate size. The latent's width, the
# rotary part and the linear heads have the published values in every size, because engines have kernels for
# no others.
LANGUAGE_MODELS = {
    "tiny": (64, 2, 4, 16, 128),
    "small": (256, 4, 4, 32, 768),
    "full": (2560, 2, 8, 128, 2048),
}


def set_sizes(config: dict[str, Any], size: str) -> None:
    hidden_size, num_layers, num_heads, head_dim, mlp_width = LANGUAGE_MODELS[size]
    config["text_config"] |= {
        "hidden_size": hidden_size,
        "intermediate_size": mlp_width,
        "moe_intermediate_size": mlp_width // 2,
        "moe_shared_expert_intermediate_size": mlp_width // 2,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_heads,
        "qk_nope_head_dim": head_dim,
        "v_head_dim": head_dim,
    }
    tower = dict(TOWERS[size])
    tower["num_position_embeddings"] = tower.pop("side") ** 2
    config["vision_config"] |= tower


def layer(text: dict[str, Any], prefix: str, number: int) -> Iterator[TensorSpec]:
    width = text["hidden_size"]
    yield rms_norm(f"{prefix}.input_layernorm", width)
    is_last_of_group = (number + 1) % text["layer_group_size"] == 0
    attention = latent_attention if is_last_of_group else delta_attention
    yield from attention(f"{prefix}.attention", text)
    yield rms_norm(f"{prefix}.post_attention_layernorm", width)
    if number < text["first_k_dense_replace"]:
        yield from gated_mlp(f"{prefix}.mlp", width, text["intermediate_size"])
    else:
        yield from experts(f"{prefix}.mlp", text)


def latent_attention(name: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    """Keys and values from one shared latent, and a gate for each head's output."""
    width, heads, rank = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    yield weight(f"{name}.q_proj.weight", heads * (nope + rope), width)
    yield weight(f"{name}.kv_a_proj_with_mqa.weight", rank + rope, width)
    yield rms_norm(f"{name}.kv_a_layernorm", rank)
    yield weight(f"{name}.kv_b_proj.weight", heads * (nope + value), rank)
    yield weight(f"{name}.g_proj.weight", heads, width)
    yield weight(f"{name}.dense.weight", width, heads * value)


def delta_attention(name: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    """Kimi delta attention. Its decay per token is exp(-5 * sigmoid(exp(A_log) * (f + dt_bias))); with a mean
    of -4 it remembers about ten tokens."""
    width, heads, head_dim = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    inner_width = heads * head_dim
    for part in ("q", "k", "v"):
        yield weight(f"{name}.{part}_proj.weight", inner_width, width)
        yield weight(f"{name}.{part}_conv1d.weight", inner_width, 1, text["short_conv_kernel_size"])
    yield weight(f"{name}.b_proj.weight", heads, width)
    yield weight(f"{name}.f_proj.weight", inner_width, width)
    yield TensorSpec(f"{name}.dt_bias", (inner_width,), -4.0, 0.5, torch.float32)
    yield TensorSpec(f"{name}.A_log", (heads,), 0.0, 0.1, torch.float32)
    yield weight(f"{name}.g_proj.weight", inner_width, width)
    yield rms_norm(f"{name}.o_norm", head_dim)
    yield weight(f"{name}.o_proj.weight", width, inner_width)


def experts(name: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    """Routed experts, the router with its float32 correction bias, and the shared experts as one MLP."""
    width, inner_width, count = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    for expert in range(count):
        yield from gated_mlp(f"{name}.experts.{expert}", width, inner_width)
    yield weight(f"{name}.gate.weight", count, width)
    yield TensorSpec(f"{name}.gate.expert_bias", (count,), 0.0, 0.05, torch.float32)
    shared_width = text["num_shared_experts"] * text["moe_shared_expert_intermediate_size"]
    yield from gated_mlp(f"{name}.shared_experts", width, shared_width)


LANGUAGE = LanguageTensors("model", "lm_head", layer=layer, embeddings="word_embeddings")
LING_VL = SyntheticFamily(
    set_sizes=set_sizes,
    settings="ling_vl",
    tokens=LING_TOKENS,
    language=LANGUAGE,
    has_vocabulary_files=False,
)
