"""Sizes of the vision towers, read from a checkpoint's config.json.

Owns the families' names, the names of the fields in their vision configs, and the refusal of settings that no
tower implements. A size that config.json does not state is an error; only settings that are the same in every
published checkpoint have a default. ``checkpoint.py`` reads the file and the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from encoder_service.errors import UnsupportedCheckpoint
from encoder_service.json_reader import JsonReader

QWEN3_VL = "qwen3_vl"
QWEN3_5 = "qwen3_5"
KIMI_K25 = "kimi_k25"

# From config.json's model_type to the family whose tower the model has. Mixture-of-experts models differ only
# in their language model.
FAMILIES: Mapping[str, str] = {
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "kimi_k25": KIMI_K25,
}

ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class QwenVisionConfig:
    """Sizes of a Qwen3-VL or Qwen3.5 tower. position_side: the learned table has position_side squared
    entries. deepstack_visual_indexes: blocks after which a deepstack level is taken, ascending; empty for
    Qwen3.5."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    temporal_patch_size: int
    in_channels: int
    merge_size: int
    position_side: int
    out_width: int
    deepstack_visual_indexes: tuple[int, ...]
    rope_theta: float = ROPE_THETA

    @property
    def patch_dim(self) -> int:
        """Elements of one flattened patch, in [channel, frame, row, column] order."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class MoonViTConfig:
    """Sizes of Kimi-K2.5's MoonViT-3D and its projector. The learned table has position_height times
    position_width entries. max_frames: length of the temporal table."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    merge_size: int
    position_height: int
    position_width: int
    max_frames: int
    out_width: int
    projector_eps: float = 1e-5
    rope_theta: float = ROPE_THETA
    in_channels: int = 3

    @property
    def patch_dim(self) -> int:
        """Elements of one flattened patch, in [channel, row, column] order."""
        return self.in_channels * self.patch_size**2


VisionConfig: TypeAlias = QwenVisionConfig | MoonViTConfig


def parse_config(values: Mapping[str, object]) -> tuple[str, VisionConfig]:
    """Family and tower sizes from the content of a config.json.

    Raises UnsupportedCheckpoint for an unknown model_type, a size that is missing or not a positive integer,
    sizes that contradict each other, and a setting that the family's tower does not implement.
    """
    model_type = values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedCheckpoint(
            f"config.json has model_type {model_type!r}, needs one of {', '.join(FAMILIES)}",
            found=model_type,
            needed=", ".join(FAMILIES),
        )
    config = JsonReader(values, "config.json")
    vision, text = config.section("vision_config"), config.section("text_config", {})
    vision.require("hidden_act", "gelu_pytorch_tanh")
    parsed: VisionConfig = (
        parse_moonvit_config(config, vision, text.values.get("hidden_size"))
        if family == KIMI_K25
        else parse_qwen_config(vision, family)
    )
    if text.has("hidden_size") and text.values["hidden_size"] != parsed.out_width:
        # Rows with another width than the language model's could never be spliced.
        found = text.values["hidden_size"]
        raise UnsupportedCheckpoint(
            f"the tower's rows are {parsed.out_width} wide, text_config.hidden_size is {found}: they need to"
            " be equal",
            found=parsed.out_width,
            needed=found,
        )
    check_heads(parsed)
    return family, parsed


def parse_qwen_config(vision: JsonReader, family: str) -> QwenVisionConfig:
    table_rows = vision.count("num_position_embeddings")
    if math.isqrt(table_rows) ** 2 != table_rows:
        raise vision.refuse("num_position_embeddings", table_rows, "a square number")
    depth = vision.count("depth", "num_hidden_layers")
    return QwenVisionConfig(
        depth=depth,
        hidden_size=vision.count("hidden_size"),
        num_heads=vision.count("num_heads", "num_attention_heads"),
        intermediate_size=vision.count("intermediate_size"),
        patch_size=vision.count("patch_size"),
        temporal_patch_size=vision.count("temporal_patch_size"),
        in_channels=vision.count("in_channels", default=3),
        merge_size=vision.count("spatial_merge_size"),
        position_side=math.isqrt(table_rows),
        out_width=vision.count("out_hidden_size"),
        deepstack_visual_indexes=deepstack_indexes(vision, depth) if family == QWEN3_VL else (),
        rope_theta=rope_theta(vision),
    )


def parse_moonvit_config(config: JsonReader, vision: JsonReader, text_width: object) -> MoonViTConfig:
    vision.require("pos_emb_type", "divided_fixed")
    vision.require("video_attn_type", "spatial_temporal")
    vision.require("merge_type", "sd2_tpool")
    vision.require("mm_projector_type", "patchmerger")
    vision.require("projector_hidden_act", "gelu")
    hidden_size = vision.count("vt_hidden_size", "hidden_size")
    # Published configs keep the projector's sizes in vision_config, the reference package's beside it.
    projector = JsonReader({**config.values, **vision.values}, "config.json")
    projector_width = projector.count("mm_hidden_size", "projection_hidden_size", default=hidden_size)
    if projector_width != hidden_size:
        raise UnsupportedCheckpoint(
            f"the projector's input width is {projector_width}, needs the tower's {hidden_size}",
            found=projector_width,
            needed=hidden_size,
        )
    return MoonViTConfig(
        depth=vision.count("vt_num_hidden_layers", "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=vision.count("vt_num_attention_heads", "num_attention_heads"),
        intermediate_size=vision.count("vt_intermediate_size", "intermediate_size"),
        patch_size=vision.count("patch_size"),
        merge_size=vision.square("merge_kernel_size"),
        position_height=vision.count("init_pos_emb_height", "pos_emb_height"),
        position_width=vision.count("init_pos_emb_width", "pos_emb_width"),
        max_frames=vision.count("init_pos_emb_time", "pos_emb_time"),
        out_width=vision.count("text_hidden_size", default=text_width),
        projector_eps=projector.number("projector_ln_eps", "projection_layer_norm_eps", default=1e-5),
        rope_theta=rope_theta(vision),
    )


def rope_theta(vision: JsonReader) -> float:
    """Base of the rotary frequencies. Only configs saved by the reference package state it."""
    parameters = vision.section("rope_parameters", {})
    parameters.require("rope_type", "axial")
    return parameters.number("rope_theta", default=ROPE_THETA)


def deepstack_indexes(vision: JsonReader, depth: int) -> tuple[int, ...]:
    """Block numbers of the deepstack levels, which must ascend: the tower outputs levels in block order."""
    value = vision.values.get("deepstack_visual_indexes")
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or any(not isinstance(index, int) or not 0 <= index < depth for index in value)
        or list(value) != sorted(set(value))
    ):
        raise vision.refuse("deepstack_visual_indexes", value, f"ascending block numbers below depth {depth}")
    return tuple(value)


def check_heads(config: VisionConfig) -> None:
    """Raises UnsupportedCheckpoint unless a head's size is a multiple of 4: it rotates pairs on two axes."""
    head_dim, rest = divmod(config.hidden_size, config.num_heads)
    if rest or head_dim % 4:
        raise UnsupportedCheckpoint(
            f"{config.num_heads} heads over hidden_size {config.hidden_size}: the size of a head needs to be"
            " a whole multiple of 4",
            num_heads=config.num_heads,
            hidden_size=config.hidden_size,
        )
