"""The tower of Qwen3-VL, and the towers of later models that are the same, with deepstack levels or without.

Owns the order of the parts, the sizes in config.json and the names of the tensors, also those of Qwen3-Omni,
whose mergers are named otherwise and whose sizes are those of its thinker. Patches arrive in merge
order, in which each block of merge^2 neighbours is adjacent, so that mergers need no gather. Attention stays
within one frame.

Shape legend: P patches, S attention sequences (frames), R rows, E tower width, D language-model width,
L deepstack levels.

Reference: Qwen3-VL Technical Report (arXiv 2511.21631); transformers' ``qwen3_vl`` and ``qwen3_5`` models,
which the parity tests compare with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from encoder_service.json_reader import JsonReader
from encoder_service.towers.config import Family, VisionConfig, block_numbers, rope_theta
from encoder_service.towers.layers import Merger, PlainTower
from encoder_service.towers.positions import pack_frames
from encoder_service.towers.published import PublishedTensor, flatten_patch, layer
from encoder_service.towers.tower import TowerInputs
from encoder_service.types import Grid

NORM_EPS = 1e-6
NORM = partial(nn.LayerNorm, eps=NORM_EPS)
# Names of a merger's tensors.
MERGER_LAYERS = ("norm", "linear_fc1", "linear_fc2")
OMNI_MERGER_LAYERS = ("ln_q", "mlp.0", "mlp.2")


@dataclass(frozen=True, kw_only=True)
class QwenVisionConfig(VisionConfig):
    """Sizes of a Qwen3-VL or Qwen3.5 tower. position_side: the learned table has position_side squared
    entries. deepstack_visual_indexes: blocks after which a deepstack level is taken, ascending; empty for
    Qwen3.5."""

    prefixes: ClassVar[Sequence[tuple[str, ...]]] = [("model.visual.",), ("visual.",)]
    merger_layers: ClassVar[tuple[str, str, str]] = MERGER_LAYERS
    level_mergers_name: ClassVar[str] = "deepstack_merger_list"

    temporal_patch_size: int
    position_side: int
    deepstack_visual_indexes: tuple[int, ...]

    @property
    def patch_dim(self) -> int:
        """Elements of one flattened patch, in [channel, frame, row, column] order."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    def published_tensors(self) -> Iterator[PublishedTensor]:
        width, mlp_width, patch = self.hidden_size, self.intermediate_size, self.patch_size
        merged_width = width * self.merge_size**2
        yield PublishedTensor(
            "patch_embed.proj.weight",
            (width, self.in_channels, self.temporal_patch_size, patch, patch),
            "patch_embed.weight",
            flatten_patch,
        )
        yield PublishedTensor("patch_embed.proj.bias", (width,), "patch_embed.bias")
        yield PublishedTensor("pos_embed.weight", (self.position_side**2, width), "pos_embed")
        for index in range(self.depth):
            block = f"blocks.{index}"
            yield from layer(f"{block}.norm1", f"{block}.norm1", width)
            yield from layer(f"{block}.attn.qkv", f"{block}.qkv", 3 * width, width)
            yield from layer(f"{block}.attn.proj", f"{block}.proj", width, width)
            yield from layer(f"{block}.norm2", f"{block}.norm2", width)
            yield from layer(f"{block}.mlp.linear_fc1", f"{block}.fc1", mlp_width, width)
            yield from layer(f"{block}.mlp.linear_fc2", f"{block}.fc2", width, mlp_width)
        mergers = [("merger", "merger", width)] + [
            (f"{self.level_mergers_name}.{level}", f"deepstack_mergers.{level}", merged_width)
            for level in range(len(self.deepstack_visual_indexes))
        ]
        norm, fc1, fc2 = self.merger_layers
        for name, parameter, norm_width in mergers:
            yield from layer(f"{name}.{norm}", f"{parameter}.norm", norm_width)
            yield from layer(f"{name}.{fc1}", f"{parameter}.fc1", merged_width, merged_width)
            yield from layer(f"{name}.{fc2}", f"{parameter}.fc2", self.out_width, merged_width)


class Qwen3OmniVisionConfig(QwenVisionConfig):
    """Sizes of Qwen3-Omni's vision tower, a part of its thinker."""

    prefixes: ClassVar[Sequence[tuple[str, ...]]] = [("thinker.visual.",)]
    merger_layers = OMNI_MERGER_LAYERS
    level_mergers_name = "merger_list"


class Qwen3VLTower(PlainTower):
    """The tower of Qwen3-VL and of the families below. family: the name of one of them."""

    merges_time = False
    position_mode = "linear"
    rotary_layout = "blocked"
    config: QwenVisionConfig

    def __init__(self, config: QwenVisionConfig, family: str) -> None:
        super().__init__(config, (config.position_side, config.position_side), NORM)
        self.family = family
        self.temporal_patch_size = config.temporal_patch_size
        self.num_deepstack_levels = len(config.deepstack_visual_indexes)
        self.merger = Merger(config.hidden_size, config.merge_size, config.out_width, NORM)
        self.deepstack_mergers = nn.ModuleList(
            Merger(config.hidden_size, config.merge_size, config.out_width, NORM, norm_after_shuffle=True)
            for _ in config.deepstack_visual_indexes
        )

    @property
    def level_mergers(self) -> Mapping[int, Merger]:
        return dict(zip(self.config.deepstack_visual_indexes, self.deepstack_mergers, strict=True))  # type: ignore[arg-type]

    def prepare(self, grids: Sequence[Grid]) -> TowerInputs:
        return pack_frames(
            self.frame_tables(grids), [grid.h * grid.w for grid in grids for _ in range(grid.t)]
        )

    def forward(self, inputs: TowerInputs) -> torch.Tensor:
        x_PE, positions_PE = self.embed(inputs)
        x_PE = x_PE + positions_PE.to(x_PE.dtype)

        mergers = self.level_mergers
        levels_RD = []
        for index, block in enumerate(self.blocks):
            x_PE = block(x_PE, inputs, self.attention)
            if index in mergers:
                levels_RD.append(mergers[index](x_PE))
        return torch.cat([self.merger(x_PE), *levels_RD], dim=-1)


def parse_sizes(
    config: JsonReader,
    *,
    levels: Literal["needed", "if stated", "ignored"],
    kind: type[QwenVisionConfig] = QwenVisionConfig,
) -> QwenVisionConfig:
    """The sizes in config.json. levels: whether the family's tower has the deepstack levels that it states.
    Raises UnsupportedCheckpoint."""
    vision = config.section("vision_config")
    vision.require("hidden_act", "gelu_pytorch_tanh")
    table_rows = vision.count("num_position_embeddings")
    if math.isqrt(table_rows) ** 2 != table_rows:
        raise vision.refuse("num_position_embeddings", table_rows, "a square number")
    depth = vision.count("depth", "num_hidden_layers")
    has_levels = levels == "needed" or (levels == "if stated" and vision.has("deepstack_visual_indexes"))
    return kind(
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
        deepstack_visual_indexes=block_numbers(vision, "deepstack_visual_indexes", depth)
        if has_levels
        else (),
        rope_theta=rope_theta(vision),
    )


def family(
    name: str, model_types: tuple[str, ...], models: str, section: str | None = None, **parse: Any
) -> Family:
    """parse: keyword arguments of ``parse_sizes``."""
    return Family(
        name, model_types, models, partial(parse_sizes, **parse), partial(Qwen3VLTower, family=name), section
    )


FAMILIES = (
    family("qwen3_vl", ("qwen3_vl", "qwen3_vl_moe"), "Qwen3-VL", levels="needed"),
    family("qwen3_5", ("qwen3_5", "qwen3_5_moe"), "Qwen3.5, Qwen3.6, Qwen3.8-27B", levels="ignored"),
    family("qwen4_exp", ("qwen4_exp",), "Qwen3.8-Flash-Next", levels="if stated"),
    family(
        "qwen3_omni_moe",
        ("qwen3_omni_moe",),
        "Qwen3-Omni without audio",
        "thinker_config",
        levels="needed",
        kind=Qwen3OmniVisionConfig,
    ),
    family("interns1_pro", ("interns1_pro",), "Intern-S1-Pro", levels="if stated"),
    family("intern_s2_preview", ("intern_s2_preview",), "Intern-S2-Preview", levels="ignored"),
)
