"""Names and shapes of the language-model tensors of each family, from ``config.json``.

Owns the published key names: ``model.language_model.*`` and ``lm_head.weight`` for Qwen3-VL and Qwen3.5,
``language_model.model.*`` and ``language_model.lm_head.weight`` for Kimi-K2.5 (DeepSeek-V3's architecture:
latent attention, routed and shared experts).

The draws make the visual rows count: values and attention outputs keep unit variance, queries and keys
choose, linear attention forgets over tens of tokens. Only ordinary tokens ever win the output layer, so
that generated text decodes and never holds a placeholder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from encoder_service.towers.synthetic.tensors import TensorSpec, rms_norm, weight
from encoder_service.towers.synthetic.tokens import NUM_ORDINARY_TOKENS

EMBEDDING_STD = 0.6
HEAD_GAIN = 4.0
QUERY_NORM_MEAN = 1.4


def language_layout(config: dict[str, Any]) -> Iterator[TensorSpec]:
    """Every language-model tensor of a synthetic ``config.json``, in the order of the forward pass."""
    text = config["text_config"]
    match config["model_type"]:
        case "kimi_k25":
            return _model(text, "language_model.model", "language_model.lm_head", norm_mean=1.0)
        case "qwen3_5":
            return _model(text, "model.language_model", "lm_head", norm_mean=0.0)
        case _:
            return _model(text, "model.language_model", "lm_head", norm_mean=1.0)


def _model(text: dict[str, Any], root: str, head: str, norm_mean: float) -> Iterator[TensorSpec]:
    width, vocab_size = text["hidden_size"], text["vocab_size"]
    yield TensorSpec(f"{root}.embed_tokens.weight", (vocab_size, width), 0.0, EMBEDDING_STD)
    for layer in range(text["num_hidden_layers"]):
        prefix = f"{root}.layers.{layer}"
        yield rms_norm(f"{prefix}.input_layernorm", width, norm_mean)
        yield from _attention(text, prefix, layer, norm_mean)
        yield rms_norm(f"{prefix}.post_attention_layernorm", width, norm_mean)
        if layer >= text.get("first_k_dense_replace", text["num_hidden_layers"]):
            yield from _experts(f"{prefix}.mlp", text)
        else:
            yield from _gated_mlp(f"{prefix}.mlp", width, text["intermediate_size"])
    yield rms_norm(f"{root}.norm", width, norm_mean)
    yield TensorSpec(
        f"{head}.weight",
        (vocab_size, width),
        0.0,
        HEAD_GAIN / width**0.5,
        num_rows=NUM_ORDINARY_TOKENS,
    )


def _attention(text: dict[str, Any], prefix: str, layer: int, norm_mean: float) -> Iterator[TensorSpec]:
    if "kv_lora_rank" in text:
        return _latent_attention(f"{prefix}.self_attn", text)
    if text.get("layer_types", ["full_attention"] * text["num_hidden_layers"])[layer] == "linear_attention":
        return _linear_attention(f"{prefix}.linear_attn", text)
    return _full_attention(f"{prefix}.self_attn", text, norm_mean)


def _full_attention(name: str, text: dict[str, Any], norm_mean: float) -> Iterator[TensorSpec]:
    """Grouped queries with normed heads. With an output gate, q_proj holds query and gate of each head."""
    width, head_dim = text["hidden_size"], text["head_dim"]
    query_width = text["num_attention_heads"] * head_dim
    kv_width = text["num_key_value_heads"] * head_dim
    gates = 2 if text.get("attn_output_gate", False) else 1
    yield weight(f"{name}.q_proj.weight", gates * query_width, width)
    yield weight(f"{name}.k_proj.weight", kv_width, width)
    yield weight(f"{name}.v_proj.weight", kv_width, width)
    yield weight(f"{name}.o_proj.weight", width, query_width)
    yield rms_norm(f"{name}.q_norm", head_dim, norm_mean + QUERY_NORM_MEAN - 1)
    yield rms_norm(f"{name}.k_norm", head_dim, norm_mean + QUERY_NORM_MEAN - 1)


def _linear_attention(name: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    """A gated delta net. Its decay per token is exp(-exp(A_log) * softplus(a + dt_bias)): a mean of -3
    remembers some 25 tokens. A_log and the norm are published in float32."""
    width, num_values = text["hidden_size"], text["linear_num_value_heads"]
    key_width = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    value_width = num_values * text["linear_value_head_dim"]
    conv_width = 2 * key_width + value_width
    yield TensorSpec(f"{name}.dt_bias", (num_values,), 0.0, 0.5)
    yield TensorSpec(f"{name}.A_log", (num_values,), -3.0, 1.0, torch.float32)
    yield weight(f"{name}.conv1d.weight", conv_width, 1, text["linear_conv_kernel_dim"])
    yield rms_norm(f"{name}.norm", text["linear_value_head_dim"], dtype=torch.float32)
    yield weight(f"{name}.out_proj.weight", width, value_width)
    yield weight(f"{name}.in_proj_qkv.weight", conv_width, width)
    yield weight(f"{name}.in_proj_z.weight", value_width, width)
    yield weight(f"{name}.in_proj_b.weight", num_values, width)
    yield weight(f"{name}.in_proj_a.weight", num_values, width)


def _latent_attention(name: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    """Multi-head latent attention: low-rank queries, and keys and values from one shared latent."""
    width, heads = text["hidden_size"], text["num_attention_heads"]
    query_rank, kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    yield weight(f"{name}.q_a_proj.weight", query_rank, width)
    yield rms_norm(f"{name}.q_a_layernorm", query_rank)
    yield weight(f"{name}.q_b_proj.weight", heads * (nope + rope), query_rank)
    yield weight(f"{name}.kv_a_proj_with_mqa.weight", kv_rank + rope, width)
    yield rms_norm(f"{name}.kv_a_layernorm", kv_rank)
    yield weight(f"{name}.kv_b_proj.weight", heads * (nope + value), kv_rank)
    yield weight(f"{name}.o_proj.weight", width, heads * value)


def _gated_mlp(name: str, width: int, inner_width: int) -> Iterator[TensorSpec]:
    yield weight(f"{name}.gate_proj.weight", inner_width, width)
    yield weight(f"{name}.up_proj.weight", inner_width, width)
    yield weight(f"{name}.down_proj.weight", width, inner_width)


def _experts(name: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    """Routed experts, the router with its float32 correction bias, and the shared experts as one."""
    width, inner_width = text["hidden_size"], text["moe_intermediate_size"]
    for expert in range(text["n_routed_experts"]):
        yield from _gated_mlp(f"{name}.experts.{expert}", width, inner_width)
    yield weight(f"{name}.gate.weight", text["n_routed_experts"], width)
    correction = (text["n_routed_experts"],)
    yield TensorSpec(f"{name}.gate.e_score_correction_bias", correction, 0.0, 0.05, torch.float32)
    yield from _gated_mlp(f"{name}.shared_experts", width, text["n_shared_experts"] * inner_width)
