"""Names and shapes of the vision tensors of each family, from ``config.json``.

Owns the published key names: ``model.visual.*`` for Qwen3-VL and Qwen3.5, ``vision_tower.*`` and
``mm_projector.*`` for Kimi-K2.5. Widths come from the config alone, never from the size that made it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from encoder_service.towers.synthetic.tensors import (
    BIAS_STD,
    TensorSpec,
    layer_norm,
    linear,
    linear_after_gelu,
    weight,
)

# Queries and keys somewhat larger than unit variance make attention choose between patches; at one it
# would be close to an average, and mistakes in masks and rotary angles would hardly show.
ATTENTION_GAIN = 1.4
POSITION_STD = 0.3
# Pixels after normalisation have about half of unit deviation; content should outweigh position.
PATCH_GAIN = 2.0


def vision_layout(config: dict[str, Any]) -> Iterator[TensorSpec]:
    """Every vision tensor of a synthetic ``config.json``, in the order of the forward pass."""
    vision = config["vision_config"]
    if config["model_type"] == "kimi_k25":
        return _kimi(vision)
    return _qwen(vision)


def _residual_gain(depth: int) -> float:
    return math.sqrt(2 / depth)


def _qwen(vision: dict[str, Any]) -> Iterator[TensorSpec]:
    width, mlp_width, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    residual = _residual_gain(vision["depth"])
    root = "model.visual"
    yield weight(
        f"{root}.patch_embed.proj.weight",
        width,
        vision["in_channels"],
        vision["temporal_patch_size"],
        patch,
        patch,
        gain=PATCH_GAIN,
    )
    yield TensorSpec(f"{root}.patch_embed.proj.bias", (width,), 0.0, BIAS_STD)
    positions = (vision["num_position_embeddings"], width)
    yield TensorSpec(f"{root}.pos_embed.weight", positions, 0.0, POSITION_STD)
    for block in range(vision["depth"]):
        prefix = f"{root}.blocks.{block}"
        yield from layer_norm(f"{prefix}.norm1", width)
        yield from layer_norm(f"{prefix}.norm2", width)
        yield from linear(f"{prefix}.attn.qkv", 3 * width, width, ATTENTION_GAIN)
        yield from linear(f"{prefix}.attn.proj", width, width, residual)
        yield from linear(f"{prefix}.mlp.linear_fc1", mlp_width, width)
        yield from linear_after_gelu(f"{prefix}.mlp.linear_fc2", width, mlp_width, residual)
    yield from _qwen_merger(f"{root}.merger", vision, norm_width=width)
    for level in range(len(vision["deepstack_visual_indexes"])):
        merged_width = width * vision["spatial_merge_size"] ** 2
        yield from _qwen_merger(f"{root}.deepstack_merger_list.{level}", vision, norm_width=merged_width)


def _qwen_merger(name: str, vision: dict[str, Any], norm_width: int) -> Iterator[TensorSpec]:
    """The main merger norms each patch, the deepstack ones the four together (MODELS: LN after shuffle)."""
    merged_width = vision["hidden_size"] * vision["spatial_merge_size"] ** 2
    yield from layer_norm(f"{name}.norm", norm_width)
    yield from linear(f"{name}.linear_fc1", merged_width, merged_width)
    yield from linear_after_gelu(f"{name}.linear_fc2", vision["out_hidden_size"], merged_width)


def _kimi(vision: dict[str, Any]) -> Iterator[TensorSpec]:
    width, mlp_width, patch = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["patch_size"]
    depth = vision["vt_num_hidden_layers"]
    residual = _residual_gain(depth)
    yield weight("vision_tower.patch_embed.proj.weight", width, 3, patch, patch, gain=PATCH_GAIN)
    yield TensorSpec("vision_tower.patch_embed.proj.bias", (width,), 0.0, BIAS_STD)
    positions = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], width)
    yield TensorSpec("vision_tower.patch_embed.pos_emb.weight", positions, 0.0, POSITION_STD)
    for block in range(depth):
        prefix = f"vision_tower.encoder.blocks.{block}"
        yield from layer_norm(f"{prefix}.norm0", width)
        yield from layer_norm(f"{prefix}.norm1", width)
        yield from linear(f"{prefix}.wqkv", 3 * width, width, ATTENTION_GAIN)
        yield from linear(f"{prefix}.wo", width, width, residual)
        yield from linear(f"{prefix}.mlp.fc0", mlp_width, width)
        yield from linear_after_gelu(f"{prefix}.mlp.fc1", width, mlp_width, residual)
    yield from layer_norm("vision_tower.encoder.final_layernorm", width)
    merge_height, merge_width = vision["merge_kernel_size"]
    merged_width = width * merge_height * merge_width
    yield from layer_norm("mm_projector.pre_norm", vision["mm_hidden_size"])
    yield from linear("mm_projector.proj.0", merged_width, merged_width)
    yield from linear_after_gelu("mm_projector.proj.2", vision["text_hidden_size"], merged_width)
