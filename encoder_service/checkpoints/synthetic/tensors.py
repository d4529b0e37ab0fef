"""Names, shapes and random values of a synthetic checkpoint's tensors.

Owns the distributions and the draws. Names and shapes of vision tensors come from the tower's config. Those
of language models are here, below the prefixes that the family states. The settings in ``text_config`` choose
their layers: grouped-query, linear or latent attention, one MLP or routed and shared experts.

Each tensor has its own generator, seeded by the checkpoint's seed and the tensor's name, so that its values
do not depend on which other tensors are written. The weights of a linear layer have a standard deviation of
gain / sqrt(fan_in), norms are near one, biases are small, and the layers that write to the residual stream
together add one unit of variance. In language models, linear attention forgets over tens of tokens, and only
ordinary tokens win in the output layer, so that generated text can be decoded and holds no placeholder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from encoder_service.checkpoints.synthetic.family import LanguageTensors
from encoder_service.checkpoints.synthetic.tokens import NUM_ORDINARY_TOKENS
from encoder_service.towers.published import PublishedTensor
from encoder_service.towers.registry import parse_config

NORM_STD = 0.1
BIAS_STD = 0.05
# A gain above one gives queries and keys more than unit variance, so that attention selects patches. At unit
# variance it is close to an average, and errors in masks and rotary angles hardly show.
ATTENTION_GAIN = 1.4
POSITION_STD = 0.3
# Normalised pixels have a standard deviation of about one half, and content should outweigh position.
PATCH_GAIN = 2.0
EMBEDDING_STD = 0.6
HEAD_GAIN = 4.0
QUERY_NORM_MEAN = 1.4


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, shape and distribution.

    num_rows: if given, rows from this one on are zero. centred: each row sums to zero.
    """

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float
    dtype: torch.dtype = torch.bfloat16
    num_rows: int | None = None
    centred: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def draw(spec: TensorSpec, seed: int) -> torch.Tensor:
    """The tensor's values on the host, in its dtype. The same name, shape and seed give the same values."""
    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.randn(spec.shape, generator=generator).mul_(spec.std).add_(spec.mean)
    if spec.centred:
        values -= values.mean(dim=1, keepdim=True)
    if spec.num_rows is not None:
        values[spec.num_rows :] = 0
    return values.to(spec.dtype)


def weight(name: str, *shape: int, gain: float = 1.0, centred: bool = False) -> TensorSpec:
    """A linear or convolution weight [out, in, ...] that scales its inputs' deviation by ``gain``."""
    return TensorSpec(name, shape, 0.0, gain / math.sqrt(math.prod(shape[1:])), centred=centred)


def bias(name: str, width: int) -> TensorSpec:
    return TensorSpec(name, (width,), 0.0, BIAS_STD)


def rms_norm(name: str, width: int, mean: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> TensorSpec:
    """A norm's weight [width] around ``mean``, which is 0 where the model adds one to the weight."""
    return TensorSpec(f"{name}.weight", (width,), mean, NORM_STD, dtype)


def vision_layout(config: dict[str, Any]) -> Iterator[TensorSpec]:
    """Every vision tensor of a synthetic ``config.json``, in the order of the forward pass."""
    _, vision = parse_config(config)
    prefixes = vision.prefixes[0]
    prefix = prefixes[0] if len(prefixes) == 1 else ""
    for tensor in vision.published_tensors():
        yield _vision_tensor(prefix + tensor.name, tensor, math.sqrt(2 / vision.depth))


def _vision_tensor(name: str, tensor: PublishedTensor, residual_gain: float) -> TensorSpec:
    """residual_gain: gain of the layers that write to the residual stream."""
    parameter = tensor.parameter
    if parameter == "pos_embed":
        return TensorSpec(name, tensor.shape, 0.0, POSITION_STD)
    if parameter.endswith(".bias"):
        return TensorSpec(name, tensor.shape, 0.0, BIAS_STD)
    if len(tensor.shape) == 1:
        return TensorSpec(name, tensor.shape, 1.0, NORM_STD)
    gain = 1.0
    if parameter == "patch_embed.weight":
        gain = PATCH_GAIN
    elif parameter.endswith("qkv.weight"):
        gain = ATTENTION_GAIN
    elif parameter.startswith("blocks.") and not parameter.endswith("fc1.weight"):
        gain = residual_gain
    # GELU leaves a positive mean in every unit. Random rows would turn it into one large vector that is
    # common to all patches of all images, so the rows of every second layer sum to zero.
    return weight(name, *tensor.shape, gain=gain, centred=parameter.endswith("fc2.weight"))


def language_layout(config: dict[str, Any], language: LanguageTensors) -> Iterator[TensorSpec]:
    """Every language-model tensor of a synthetic ``config.json``, in the order of the forward pass."""
    text = config.get("thinker_config", config).get("text_config", config)
    root, head, norm_mean, own_layer, embeddings = language
    width, vocab_size = text["hidden_size"], text["vocab_size"]
    yield TensorSpec(f"{root}.{embeddings}.weight", (vocab_size, width), 0.0, EMBEDDING_STD)
    mixes_layers = "attn_res_block_size" in text
    for layer in range(text["num_hidden_layers"]):
        prefix = f"{root}.layers.{layer}"
        if own_layer is not None:
            yield from own_layer(text, prefix, layer)
            continue
        yield rms_norm(f"{prefix}.input_layernorm", width, norm_mean)
        yield from _attention(text, prefix, layer, norm_mean)
        yield rms_norm(f"{prefix}.post_attention_layernorm", width, norm_mean)
        dense = layer < text.get("first_k_dense_replace", text["num_hidden_layers"])
        if dense and "num_experts" in text:
            yield from _qwen_experts(f"{prefix}.mlp", text)
        elif dense:
            yield from gated_mlp(f"{prefix}.mlp", width, text["intermediate_size"])
        elif "routed_expert_hidden_size" in text:
            yield from _latent_experts(f"{prefix}.block_sparse_moe", text)
        else:
            yield from _experts(f"{prefix}.mlp", text)
        if mixes_layers:
            yield from _residual(f"{prefix}.self_attention", width)
            yield from _residual(f"{prefix}.mlp", width)
    yield rms_norm(f"{root}.norm", width, norm_mean)
    if "fope_sep_head" in (text.get("rope_scaling") or {}):
        yield from _fourier_coefficients(f"{root}.rotary_emb", text)
    if mixes_layers:
        yield from _residual(f"{root}.output_attn", width)
    yield TensorSpec(
        f"{head}.weight",
        (vocab_size, width),
        0.0,
        HEAD_GAIN / width**0.5,
        num_rows=NUM_ORDINARY_TOKENS,
    )


def _attention(text: dict[str, Any], prefix: str, layer: int, norm_mean: float) -> Iterator[TensorSpec]:
    if layer + 1 in text.get("linear_attn_config", {}).get("kda_layers", ()):
        return _delta_attention(f"{prefix}.self_attn", text)
    if "kv_lora_rank" in text:
        return _latent_attention(f"{prefix}.self_attn", text)
    if text.get("layer_types", ["full_attention"] * text["num_hidden_layers"])[layer] == "linear_attention":
        return _linear_attention(f"{prefix}.linear_attn", text)
    return _full_attention(f"{prefix}.self_attn", text, norm_mean)


def _full_attention(name: str, text: dict[str, Any], norm_mean: float) -> Iterator[TensorSpec]:
    """Grouped-query attention with normed heads. With an output gate, q_proj has query and gate per head."""
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
    """A gated delta net. Its decay per token is exp(-exp(A_log) * softplus(a + dt_bias)); with a mean of -3
    it remembers about 25 tokens. A_log and the norm are published in float32."""
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
    """Multi-head latent attention: queries of low rank if ``q_lora_rank`` states one; keys and values from
    one shared latent; Kimi-K3 gates the output."""
    width, heads = text["hidden_size"], text["num_attention_heads"]
    query_rank, kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    if query_rank is None:
        yield weight(f"{name}.q_proj.weight", heads * (nope + rope), width)
    else:
        yield weight(f"{name}.q_a_proj.weight", query_rank, width)
        yield rms_norm(f"{name}.q_a_layernorm", query_rank)
        yield weight(f"{name}.q_b_proj.weight", heads * (nope + rope), query_rank)
    yield weight(f"{name}.kv_a_proj_with_mqa.weight", kv_rank + rope, width)
    yield rms_norm(f"{name}.kv_a_layernorm", kv_rank)
    yield weight(f"{name}.kv_b_proj.weight", heads * (nope + value), kv_rank)
    if text.get("mla_use_output_gate"):
        yield weight(f"{name}.g_proj.weight", heads * value, width)
    yield weight(f"{name}.o_proj.weight", width, heads * value)


def _delta_attention(name: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    """Kimi Delta Attention: a gated delta net with a decay for each channel. What is small is published in
    float32."""
    width, linear = text["hidden_size"], text["linear_attn_config"]
    num_heads, head_dim = linear["num_heads"], linear["head_dim"]
    inner_width, kernel = num_heads * head_dim, linear["short_conv_kernel_size"]
    yield TensorSpec(f"{name}.A_log", (head_dim,), -3.0, 1.0, torch.float32)
    yield TensorSpec(f"{name}.dt_bias", (inner_width,), 0.0, 0.5, torch.float32)
    for part in "qkv":
        yield weight(f"{name}.{part}_proj.weight", inner_width, width)
        yield dataclasses.replace(
            weight(f"{name}.{part}_conv1d.weight", inner_width, 1, kernel), dtype=torch.float32
        )
    yield weight(f"{name}.b_proj.weight", num_heads, width)
    yield weight(f"{name}.f_a_proj.weight", head_dim, width)
    yield weight(f"{name}.f_b_proj.weight", inner_width, head_dim)
    yield weight(f"{name}.g_proj.weight", inner_width, width)
    yield rms_norm(f"{name}.o_norm", head_dim, dtype=torch.float32)
    yield weight(f"{name}.o_proj.weight", width, inner_width)


def _residual(name: str, width: int) -> Iterator[TensorSpec]:
    """The weighting of earlier layers' outputs (attention residuals)."""
    yield rms_norm(f"{name}_res_norm", width)
    yield weight(f"{name}_res_proj.weight", 1, width)


def _latent_experts(name: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    """Routed experts between projections to a narrower width and back, and shared experts as one MLP."""
    width, inner_width = text["hidden_size"], text["moe_intermediate_size"]
    latent, num_experts = text["routed_expert_hidden_size"], text["num_experts"]
    for expert in range(num_experts):
        yield weight(f"{name}.experts.{expert}.w1.weight", inner_width, latent)
        yield weight(f"{name}.experts.{expert}.w2.weight", latent, inner_width)
        yield weight(f"{name}.experts.{expert}.w3.weight", inner_width, latent)
    yield weight(f"{name}.gate.weight", num_experts, width)
    yield TensorSpec(f"{name}.gate.e_score_correction_bias", (num_experts,), 0.0, 0.05, torch.float32)
    yield weight(f"{name}.routed_expert_down_proj.weight", latent, width)
    yield rms_norm(f"{name}.routed_expert_norm", latent)
    yield weight(f"{name}.routed_expert_up_proj.weight", width, latent)
    yield from gated_mlp(f"{name}.shared_experts", width, text["num_shared_experts"] * inner_width)


def gated_mlp(name: str, width: int, inner_width: int) -> Iterator[TensorSpec]:
    yield weight(f"{name}.gate_proj.weight", inner_width, width)
    yield weight(f"{name}.up_proj.weight", inner_width, width)
    yield weight(f"{name}.down_proj.weight", width, inner_width)


def _experts(name: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    """Routed experts, the router with its float32 correction bias, and the shared experts as one MLP."""
    width, inner_width = text["hidden_size"], text["moe_intermediate_size"]
    for expert in range(text["n_routed_experts"]):
        yield from gated_mlp(f"{name}.experts.{expert}", width, inner_width)
    yield weight(f"{name}.gate.weight", text["n_routed_experts"], width)
    correction = (text["n_routed_experts"],)
    yield TensorSpec(f"{name}.gate.e_score_correction_bias", correction, 0.0, 0.05, torch.float32)
    yield from gated_mlp(f"{name}.shared_experts", width, text["n_shared_experts"] * inner_width)


def _qwen_experts(name: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    """Routed experts and their router; with a shared expert also its gate, and the experts as one tensor."""
    width, inner_width, count = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    yield weight(f"{name}.gate.weight", count, width)
    shared_width = text.get("shared_expert_intermediate_size", 0)
    if not shared_width:
        for expert in range(count):
            yield from gated_mlp(f"{name}.experts.{expert}", width, inner_width)
        return
    yield TensorSpec(f"{name}.experts.gate_up_proj", (count, 2 * inner_width, width), 0.0, width**-0.5)
    yield TensorSpec(f"{name}.experts.down_proj", (count, width, inner_width), 0.0, inner_width**-0.5)
    yield from gated_mlp(f"{name}.shared_expert", width, shared_width)
    yield weight(f"{name}.shared_expert_gate.weight", 1, width)


def _fourier_coefficients(name: str, text: dict[str, Any]) -> Iterator[TensorSpec]:
    """Of rotary positions with Fourier series (FoPE): per head of keys a mix of the frequencies that turn at
    least once within the longest prompt."""
    head_dim, most_positions = text["head_dim"], text["max_position_embeddings"]
    frequencies = [text["rope_theta"] ** (-pair / head_dim) for pair in range(0, head_dim, 2)]
    count = sum(frequency > 2 * math.pi / most_positions for frequency in frequencies)
    for kind in ("sin", "cos"):
        shape = (text["num_key_value_heads"], count, count)
        yield TensorSpec(f"{name}.{kind}_coef", shape, 0.0, count**-0.5)
