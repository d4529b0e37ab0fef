"""Sizes of the vision towers, read from a checkpoint's config.json.

Owns the families' names, the spellings of their vision configs, and the refusal of settings that no tower
implements. A size that config.json does not state is an error; only settings that every published checkpoint
shares have a default. ``checkpoint.py`` reads the file and the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from encoder_service.errors import UnsupportedCheckpoint

Section: TypeAlias = Mapping[str, object]

QWEN3_VL = "qwen3_vl"
QWEN3_5 = "qwen3_5"
KIMI_K25 = "kimi_k25"

# config.json's model_type to the family whose tower it has. Mixture-of-experts models differ in their
# language model alone.
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
    """Sizes of a Qwen3-VL or Qwen3.5 tower. position_side: the learned table is position_side squared;
    deepstack_visual_indexes: blocks after which a deepstack level is read, ascending, empty for Qwen3.5."""

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
    """Sizes of Kimi-K2.5's MoonViT-3D and its projector. The learned table is position_height by
    position_width; max_frames is the length of the temporal table."""

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


def parse_config(config: Section) -> tuple[str, VisionConfig]:
    """Family and tower sizes of a whole config.json.

    Raises UnsupportedCheckpoint: unknown model_type, a size that is absent or no positive integer, sizes
    that disagree, a setting that the family's tower does not implement.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedCheckpoint(
            f"config.json has model_type {model_type!r}, needs one of {', '.join(FAMILIES)}",
            found=model_type,
            needed=", ".join(FAMILIES),
        )
    parsed: VisionConfig = (
        parse_moonvit_config(config) if family == KIMI_K25 else parse_qwen_config(config, family)
    )
    check_heads(parsed)
    return family, parsed


def parse_qwen_config(config: Section, family: str) -> QwenVisionConfig:
    vision = section(config, "vision_config")
    require(vision, ("hidden_act",), "gelu_pytorch_tanh")
    table_rows = integer(vision, "num_position_embeddings")
    if math.isqrt(table_rows) ** 2 != table_rows:
        raise UnsupportedCheckpoint(
            f"vision_config.num_position_embeddings is {table_rows}, needs a square number", found=table_rows
        )
    depth = integer(vision, "depth", "num_hidden_layers")
    out_width = integer(vision, "out_hidden_size")
    check_text_width(config, out_width, "vision_config.out_hidden_size")
    return QwenVisionConfig(
        depth=depth,
        hidden_size=integer(vision, "hidden_size"),
        num_heads=integer(vision, "num_heads", "num_attention_heads"),
        intermediate_size=integer(vision, "intermediate_size"),
        patch_size=integer(vision, "patch_size"),
        temporal_patch_size=integer(vision, "temporal_patch_size"),
        in_channels=integer(vision, "in_channels", default=3),
        merge_size=integer(vision, "spatial_merge_size"),
        position_side=math.isqrt(table_rows),
        out_width=out_width,
        deepstack_visual_indexes=deepstack_indexes(vision, depth) if family == QWEN3_VL else (),
        rope_theta=rope_theta(vision),
    )


def parse_moonvit_config(config: Section) -> MoonViTConfig:
    vision = section(config, "vision_config")
    require(vision, ("hidden_act",), "gelu_pytorch_tanh")
    require(vision, ("pos_emb_type",), "divided_fixed")
    require(vision, ("video_attn_type",), "spatial_temporal")
    require(vision, ("merge_type",), "sd2_tpool")
    require(vision, ("mm_projector_type",), "patchmerger")
    require(vision, ("projector_hidden_act",), "gelu")
    hidden_size = integer(vision, "vt_hidden_size", "hidden_size")
    # The published spelling keeps the projector's sizes in vision_config, the reference package's beside it.
    projector_width = integer(
        {**config, **vision}, "mm_hidden_size", "projection_hidden_size", default=hidden_size
    )
    if projector_width != hidden_size:
        raise UnsupportedCheckpoint(
            f"the projector's input width is {projector_width}, needs the tower's {hidden_size}",
            found=projector_width,
            needed=hidden_size,
        )
    text_width = section(config, "text_config", optional=True).get("hidden_size")
    out_width = integer(
        vision if text_width is None else {"text_hidden_size": text_width, **vision}, "text_hidden_size"
    )
    check_text_width(config, out_width, "vision_config.text_hidden_size")
    return MoonViTConfig(
        depth=integer(vision, "vt_num_hidden_layers", "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=integer(vision, "vt_num_attention_heads", "num_attention_heads"),
        intermediate_size=integer(vision, "vt_intermediate_size", "intermediate_size"),
        patch_size=integer(vision, "patch_size"),
        merge_size=square_side(vision, "merge_kernel_size"),
        position_height=integer(vision, "init_pos_emb_height", "pos_emb_height"),
        position_width=integer(vision, "init_pos_emb_width", "pos_emb_width"),
        max_frames=integer(vision, "init_pos_emb_time", "pos_emb_time"),
        out_width=out_width,
        projector_eps=number(
            {**config, **vision}, "projector_ln_eps", "projection_layer_norm_eps", default=1e-5
        ),
        rope_theta=rope_theta(vision),
    )


def section(config: Section, name: str, *, optional: bool = False) -> Section:
    """A nested object of config.json."""
    value = config.get(name)
    if value is None and optional:
        return {}
    if not isinstance(value, Mapping):
        raise UnsupportedCheckpoint(f"config.json has {type(value).__name__} for {name}, needs an object")
    return value


def first_present(values: Section, names: Sequence[str]) -> object:
    return next((values[name] for name in names if values.get(name) is not None), None)


def integer(values: Section, *names: str, default: int | None = None) -> int:
    """The first of ``names`` that is present, a positive integer."""
    value = first_present(values, names)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnsupportedCheckpoint(
            f"config.json has {value!r} for {' or '.join(names)}, needs a positive integer", found=value
        )
    return value


def number(values: Section, *names: str, default: float) -> float:
    """The first of ``names`` that is present, a positive number."""
    value = first_present(values, names)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UnsupportedCheckpoint(
            f"config.json has {value!r} for {' or '.join(names)}, needs a positive number", found=value
        )
    return float(value)


def require(values: Section, names: Sequence[str], needed: str) -> None:
    """Refuses a setting that is present with another value than the one implemented."""
    value = first_present(values, names)
    if value is not None and value != needed:
        raise UnsupportedCheckpoint(
            f"config.json has {value!r} for {' or '.join(names)}, needs {needed!r}",
            found=value,
            needed=needed,
        )


def rope_theta(vision: Section) -> float:
    """Base of the rotary frequencies: stated only by configs that the reference package saved."""
    parameters = section(vision, "rope_parameters", optional=True)
    require(parameters, ("rope_type",), "axial")
    return number(parameters, "rope_theta", default=ROPE_THETA)


def square_side(vision: Section, name: str) -> int:
    """One side of a [side, side] setting."""
    value = vision.get(name)
    if not isinstance(value, Sequence) or len(value) != 2 or value[0] != value[1]:
        raise UnsupportedCheckpoint(
            f"config.json has {value!r} for {name}, needs two equal sides", found=value
        )
    return integer({name: value[0]}, name)


def deepstack_indexes(vision: Section, depth: int) -> tuple[int, ...]:
    """Block numbers of the deepstack levels. Levels leave the tower in block order, so any other order in
    the config would name them wrongly."""
    value = vision.get("deepstack_visual_indexes")
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or any(not isinstance(index, int) or not 0 <= index < depth for index in value)
        or list(value) != sorted(set(value))
    ):
        raise UnsupportedCheckpoint(
            f"config.json has {value!r} for deepstack_visual_indexes, needs ascending block numbers"
            f" below depth {depth}",
            found=value,
            depth=depth,
        )
    return tuple(value)


def check_text_width(config: Section, out_width: int, where: str) -> None:
    """Rows of another width than the language model's could never be spliced."""
    text_width = section(config, "text_config", optional=True).get("hidden_size")
    if text_width is not None and text_width != out_width:
        raise UnsupportedCheckpoint(
            f"{where} is {out_width}, text_config.hidden_size is {text_width}: they need to be equal",
            found=out_width,
            needed=text_width,
        )


def check_heads(config: VisionConfig) -> None:
    """Each head rotates pairs along two axes, so its size needs to be a multiple of four."""
    head_dim, rest = divmod(config.hidden_size, config.num_heads)
    if rest or head_dim % 4:
        raise UnsupportedCheckpoint(
            f"{config.num_heads} heads over hidden_size {config.hidden_size}: the size of a head needs to be"
            " a whole multiple of 4",
            num_heads=config.num_heads,
            hidden_size=config.hidden_size,
        )
