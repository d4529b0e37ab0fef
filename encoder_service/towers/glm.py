"""The towers of GLM: 4.1V, 4.5V and 4.6V, GLM-OCR, and GLM-5.3-Flash.

Owns the order of the parts, the sizes in config.json and the names of the tensors. Patches arrive in merge
order. Attention stays within one frame. After the blocks, a convolution merges merge^2 neighbours and changes
to the language model's width, in which the merger works.

GLM-4.1V has learned positions and a norm before them. GLM-OCR and GLM-5.3-Flash have neither; they norm the
queries and keys of each head instead, and their layers have biases.

Shape legend: P patches, S attention sequences (frames), R rows, E tower width, D language-model width.

Reference: GLM-4.1V-Thinking (arXiv 2507.01006); transformers' ``glm4v``, ``glm_ocr`` and ``glm5_next``
models, which the parity tests compare with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from encoder_service.json_reader import JsonReader
from encoder_service.towers.config import Family, VisionConfig, rope_theta
from encoder_service.towers.layers import Gated, GatedMerger, PlainTower
from encoder_service.towers.positions import pack_frames
from encoder_service.towers.published import PublishedTensor, flatten_patch, gated_mlp, layer
from encoder_service.towers.tower import TowerInputs
from encoder_service.types import Grid

GLM4V = "glm4v"
GLM_OCR = "glm_ocr"
GLM5_NEXT = "glm5_next"


@dataclass(frozen=True, kw_only=True)
class GlmVisionConfig(VisionConfig):
    """Sizes of a GLM tower. position_side: the learned table has position_side squared entries; None for no
    table. In towers without one, q and k are normed and the blocks' layers have biases. merger_width: of the
    merger's MLP. swiglu_limit: see ``layers.swiglu``."""

    prefixes: ClassVar[Sequence[tuple[str, ...]]] = [("model.visual.",), ("visual.",)]

    temporal_patch_size: int
    position_side: int | None
    merger_width: int
    norm_eps: float
    swiglu_limit: float | None = None

    @property
    def patch_dim(self) -> int:
        """Elements of one flattened patch, in [channel, frame, row, column] order."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def has_positions(self) -> bool:
        return self.position_side is not None

    def published_tensors(self) -> Iterator[PublishedTensor]:
        width, out_width, patch, merge = self.hidden_size, self.out_width, self.patch_size, self.merge_size
        yield PublishedTensor(
            "patch_embed.proj.weight",
            (width, self.in_channels, self.temporal_patch_size, patch, patch),
            "patch_embed.weight",
            flatten_patch,
        )
        yield PublishedTensor("patch_embed.proj.bias", (width,), "patch_embed.bias")
        if self.position_side is not None:
            yield PublishedTensor("post_conv_layernorm.weight", (width,), "patch_norm.weight")
            positions = (self.position_side**2, width)
            yield PublishedTensor("embeddings.position_embedding.weight", positions, "pos_embed")
        for index in range(self.depth):
            yield from self._published_block(f"blocks.{index}")
        yield PublishedTensor("post_layernorm.weight", (width,), "merger.norm.weight")
        yield PublishedTensor(
            "downsample.weight", (out_width, width, merge, merge), "merger.downsample.weight", flatten_merge
        )
        yield PublishedTensor("downsample.bias", (out_width,), "merger.downsample.bias")
        yield PublishedTensor("merger.proj.weight", (out_width, out_width), "merger.proj.weight")
        yield from layer("merger.post_projection_norm", "merger.proj_norm", out_width)
        yield from gated_mlp("merger", "merger", out_width, self.merger_width, has_bias=False)

    def _published_block(self, block: str) -> Iterator[PublishedTensor]:
        width, has_bias = self.hidden_size, not self.has_positions
        for norm in ("norm1", "norm2"):
            yield PublishedTensor(f"{block}.{norm}.weight", (width,), f"{block}.{norm}.weight")
        for name, num_outputs in (("qkv", 3 * width), ("proj", width)):
            published, parameter = f"{block}.attn.{name}", f"{block}.{name}"
            yield PublishedTensor(f"{published}.weight", (num_outputs, width), f"{parameter}.weight")
            if has_bias:
                yield PublishedTensor(f"{published}.bias", (num_outputs,), f"{parameter}.bias")
        if not self.has_positions:
            for norm in ("q_norm", "k_norm"):
                yield PublishedTensor(
                    f"{block}.attn.{norm}.weight", (self.head_dim,), f"{block}.{norm}.weight"
                )
        yield from gated_mlp(f"{block}.mlp", block, width, self.intermediate_size, has_bias=has_bias)


class GlmTower(PlainTower):
    """A GLM tower. family: ``glm4v``, ``glm_ocr`` or ``glm5_next``."""

    num_deepstack_levels = 0
    merges_time = False
    position_mode = "cubic"
    rotary_layout = "blocked"
    config: GlmVisionConfig

    def __init__(self, config: GlmVisionConfig, family: str) -> None:
        side, make_norm = config.position_side, partial(nn.RMSNorm, eps=config.norm_eps)
        super().__init__(
            config,
            None if side is None else (side, side),
            make_norm,
            has_bias=not config.has_positions,
            gated=Gated(config.swiglu_limit),
            norms_qk=not config.has_positions,
        )
        self.family = family
        self.temporal_patch_size = config.temporal_patch_size
        self.patch_embed = nn.Linear(config.patch_dim, config.hidden_size)
        if config.has_positions:
            self.patch_norm = make_norm(config.hidden_size)
        self.merger = GatedMerger(config, config.merger_width, make_norm, config.swiglu_limit)

    def prepare(self, grids: Sequence[Grid]) -> TowerInputs:
        return pack_frames(
            self.frame_tables(grids), [grid.h * grid.w for grid in grids for _ in range(grid.t)]
        )

    def forward(self, inputs: TowerInputs) -> torch.Tensor:
        x_PE, positions_PE = self.embed(inputs)
        x_PE = x_PE + positions_PE.to(x_PE.dtype)
        for block in self.blocks:
            x_PE = block(x_PE, inputs, self.attention)
        rows_RD: torch.Tensor = self.merger(x_PE)
        return rows_RD


def flatten_merge(weight: torch.Tensor) -> torch.Tensor:
    """The convolution [D, E, merge, merge] over the patches of a merge block, as the equal product over the
    block's patches one after the other: [D, merge^2 * E]."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def parse_glm4v(config: JsonReader) -> GlmVisionConfig:
    """The sizes in config.json of GLM-4.1V, 4.5V and 4.6V. The blocks' MLP is as wide as the rows, and
    ``intermediate_size`` is the width of the merger's. Raises UnsupportedCheckpoint."""
    vision = config.section("vision_config")
    vision.require("attention_bias", False)
    side, rest = divmod(vision.square("image_size"), vision.square("patch_size"))
    if rest or not side:
        raise vision.refuse("image_size", vision.values["image_size"], "a whole multiple of patch_size")
    return _sizes(
        vision,
        intermediate_size=vision.count("out_hidden_size"),
        merger_width=vision.count("intermediate_size"),
        position_side=side,
    )


def parse_glm_ocr(config: JsonReader) -> GlmVisionConfig:
    """The sizes in config.json of GLM-OCR. The merger's MLP is ``in_channels`` times as wide as the rows.
    Raises UnsupportedCheckpoint."""
    vision = config.section("vision_config")
    vision.require("attention_bias", True)
    return _sizes(
        vision,
        intermediate_size=vision.count("intermediate_size"),
        merger_width=vision.count("out_hidden_size") * vision.count("in_channels", default=3),
    )


def parse_glm5_next(config: JsonReader) -> GlmVisionConfig:
    """The sizes in config.json of GLM-5.3-Flash. Raises UnsupportedCheckpoint."""
    vision = config.section("vision_config")
    vision.require("attention_bias", True)
    return _sizes(
        vision,
        intermediate_size=vision.count("intermediate_size"),
        merger_width=vision.count("projection_intermediate_size"),
        swiglu_limit=vision.number("swiglu_limit", default=10.0),
    )


def _sizes(
    vision: JsonReader,
    *,
    intermediate_size: int,
    merger_width: int,
    position_side: int | None = None,
    swiglu_limit: float | None = None,
) -> GlmVisionConfig:
    """What all GLM towers state alike."""
    vision.require("hidden_act", "silu")
    return GlmVisionConfig(
        depth=vision.count("depth", "num_hidden_layers"),
        hidden_size=vision.count("hidden_size"),
        num_heads=vision.count("num_heads", "num_attention_heads"),
        intermediate_size=intermediate_size,
        patch_size=vision.square("patch_size"),
        temporal_patch_size=vision.count("temporal_patch_size"),
        in_channels=vision.count("in_channels", default=3),
        merge_size=vision.count("spatial_merge_size"),
        out_width=vision.count("out_hidden_size"),
        rope_theta=rope_theta(vision),
        position_side=position_side,
        merger_width=merger_width,
        norm_eps=vision.number("rms_norm_eps"),
        swiglu_limit=swiglu_limit,
    )


FAMILIES = (
    Family(
        GLM4V,
        ("glm4v", "glm4v_moe", "glm46v"),
        "GLM-4.1V, GLM-4.5V, GLM-4.6V",
        parse_glm4v,
        partial(GlmTower, family=GLM4V),
    ),
    Family(GLM_OCR, ("glm_ocr",), "GLM-OCR", parse_glm_ocr, partial(GlmTower, family=GLM_OCR)),
    Family(GLM5_NEXT, ("glm5_next",), "GLM-5.3-Flash", parse_glm5_next, partial(GlmTower, family=GLM5_NEXT)),
)
