"""The towers of Kimi-K2.5, Kimi-VL and Kimi-K3: MoonViT and its projector.

Owns the order of the parts, the tables of frames, the sizes in config.json and the names of the tensors.
Patches arrive frame by frame in raster order. Attention spans all frames of an item. After the last norm, the
merge gathers merge^2 neighbours and averages them over the item's frames. Items of one batch may have
different numbers of frames.

Kimi-VL's tower is Kimi-K2.5's without a time axis. Kimi-K3's has RMSNorms, no biases, heads of another total
width than the tower's, a bilinear position table, and a projector whose norm comes last. Its own processor
makes images only; its tower averages frames like Kimi-K2.5's.

Shape legend: P patches, S attention sequences (items), R rows, F frames averaged into one row (the maximum
over the items of the batch), E tower width, D language-model width.

Reference: Kimi-K2.5 (arXiv 2602.02276) and MoonViT (Kimi-VL, arXiv 2504.07491); transformers' ``kimi_k25``
model and vLLM's ``kimi_vl`` and ``kimi_k3``, which tests compare with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from encoder_service.errors import GridMismatch, UnsupportedCheckpoint
from encoder_service.json_reader import JsonReader
from encoder_service.towers.config import Family, VisionConfig, rope_theta
from encoder_service.towers.layers import AnyNorm, Merger, PlainTower, PositionMode
from encoder_service.towers.positions import merge_order, pack_frames
from encoder_service.towers.published import PublishedTensor, flatten_patch, layer
from encoder_service.towers.rope import permute_pairs
from encoder_service.towers.tower import TowerInputs
from encoder_service.types import Grid, Modality

LAYER_NORM_EPS = 1e-5
# Kimi-K3 states none: torch takes that of float32, in which it computes, for 16-bit values too.
RMS_NORM_EPS = torch.finfo(torch.float32).eps
# Of Kimi-VL's position table, which its config.json leaves to a default.
PUBLISHED_SIDE = 64
KIMI_VL = "kimi_vl"
KIMI_K25 = "kimi_k25"
KIMI_K3 = "kimi_k3"


@dataclass(frozen=True, kw_only=True)
class MoonViTConfig(VisionConfig):
    """Sizes of Kimi-K2.5's MoonViT-3D and its projector. The learned table has position_height times
    position_width entries. max_frames: length of the temporal table.

    has_bias: whether linear layers and norms have one. projector: published names of the projector's norm and
    of its layers.
    """

    prefixes: ClassVar[Sequence[tuple[str, ...]]] = [("vision_tower.", "mm_projector.")]
    has_bias: ClassVar[bool] = True
    projector: ClassVar[tuple[str, str, str]] = (
        "mm_projector.pre_norm",
        "mm_projector.proj.0",
        "mm_projector.proj.2",
    )

    position_height: int
    position_width: int
    max_frames: int
    projector_eps: float = 1e-5

    @property
    def patch_dim(self) -> int:
        """Elements of one flattened patch, in [channel, row, column] order."""
        return self.in_channels * self.patch_size**2

    def published_tensors(self) -> Iterator[PublishedTensor]:
        width, mlp_width, patch = self.hidden_size, self.intermediate_size, self.patch_size
        attention_width = self.attention_width
        half_split = partial(half_split_qk, num_heads=self.num_heads)
        part = partial(layer, has_bias=self.has_bias)
        embed = "vision_tower.patch_embed"
        yield PublishedTensor(
            f"{embed}.proj.weight",
            (width, self.in_channels, patch, patch),
            "patch_embed.weight",
            flatten_patch,
        )
        if self.has_bias:
            yield PublishedTensor(f"{embed}.proj.bias", (width,), "patch_embed.bias")
        yield PublishedTensor(
            f"{embed}.pos_emb.weight",
            (self.position_height, self.position_width, width),
            "pos_embed",
            flatten_table,
        )
        for index in range(self.depth):
            name, block = f"vision_tower.encoder.blocks.{index}", f"blocks.{index}"
            yield from part(f"{name}.norm0", f"{block}.norm1", width)
            for qkv in part(f"{name}.wqkv", f"{block}.qkv", 3 * attention_width, width):
                yield dataclasses.replace(qkv, convert=half_split)
            yield from part(f"{name}.wo", f"{block}.proj", width, attention_width)
            yield from part(f"{name}.norm1", f"{block}.norm2", width)
            yield from part(f"{name}.mlp.fc0", f"{block}.fc1", mlp_width, width)
            yield from part(f"{name}.mlp.fc1", f"{block}.fc2", width, mlp_width)
        yield from part("vision_tower.encoder.final_layernorm", "final_norm", width)
        yield from self.projector_tensors()

    def projector_tensors(self) -> Iterator[PublishedTensor]:
        merged_width, (norm, first, second) = self.hidden_size * self.merge_size**2, self.projector
        yield from layer(norm, "merger.norm", self.hidden_size)
        yield from layer(first, "merger.fc1", merged_width, merged_width)
        yield from layer(second, "merger.fc2", self.out_width, merged_width)


@dataclass(frozen=True, kw_only=True)
class KimiVLConfig(MoonViTConfig):
    """Sizes of Kimi-VL's MoonViT and its projector. max_frames is 1."""

    prefixes: ClassVar[Sequence[tuple[str, ...]]] = [("vision_tower.", "multi_modal_projector.")]
    projector: ClassVar[tuple[str, str, str]] = (
        "multi_modal_projector.pre_norm",
        "multi_modal_projector.linear_1",
        "multi_modal_projector.linear_2",
    )


@dataclass(frozen=True, kw_only=True)
class KimiK3Config(MoonViTConfig):
    """Sizes of Kimi-K3's MoonViT-3D and its projector. qkv_width: elements of q, of k and of v for one
    patch."""

    has_bias: ClassVar[bool] = False
    projector: ClassVar[tuple[str, str, str]] = (
        "mm_projector.post_norm",
        "mm_projector.proj.0",
        "mm_projector.proj.2",
    )

    qkv_width: int

    @property
    def attention_width(self) -> int:
        return self.qkv_width

    def projector_tensors(self) -> Iterator[PublishedTensor]:
        merged_width, (norm, first, second) = self.hidden_size * self.merge_size**2, self.projector
        yield from layer(first, "merger.fc1", merged_width, merged_width, has_bias=False)
        yield from layer(second, "merger.fc2", self.out_width, merged_width, has_bias=False)
        yield from layer(norm, "merger.out_norm", self.out_width, has_bias=False)


class MoonViTTower(PlainTower):
    """Kimi-K2.5's vision tower. ``merger`` is its multimodal projector."""

    family = KIMI_K25
    temporal_patch_size = 1
    num_deepstack_levels = 0
    merges_time = True
    position_mode: ClassVar[PositionMode] = "cubic"
    rotary_layout = "interleaved"
    config: MoonViTConfig
    frame_embed: torch.Tensor
    final_norm: AnyNorm

    def __init__(self, config: MoonViTConfig) -> None:
        sides = config.position_height, config.position_width
        super().__init__(config, sides, self.make_norm, has_bias=config.has_bias)
        width = config.hidden_size
        self.max_frames = config.max_frames
        # A fixed table, which has values even when the parameters are on the meta device.
        self.register_buffer("frame_embed", frame_table(config.max_frames, width), persistent=False)
        self.final_norm = self.make_norm(width)
        self.merger = self.make_projector(config)

    def make_norm(self, width: int) -> AnyNorm:
        return nn.LayerNorm(width, eps=LAYER_NORM_EPS)

    def make_projector(self, config: MoonViTConfig) -> Merger:
        make_norm = partial(nn.LayerNorm, eps=config.projector_eps)
        return Merger(config.hidden_size, config.merge_size, config.out_width, make_norm)

    def check_grid(self, grid: Grid) -> None:
        super().check_grid(grid)
        if grid.t > self.max_frames:
            raise GridMismatch(
                f"grid {list(grid)} has {grid.t} frames, the temporal table has {self.max_frames}",
                found=grid.t,
                limit=self.max_frames,
            )

    def prepare(self, grids: Sequence[Grid]) -> TowerInputs:
        packed = pack_frames(self.frame_tables(grids), [grid.num_patches for grid in grids])
        merge_index, merge_weight = merge_tables(grids, self.merge_size)
        return dataclasses.replace(
            packed,
            frame_index=torch.cat([frame_rows(grid) for grid in grids]),
            merge_index=merge_index,
            merge_weight=merge_weight,
        )

    def forward(self, inputs: TowerInputs) -> torch.Tensor:
        x_PE, positions_PE = self.embed(inputs)
        positions_PE = positions_PE + self.frame_embed[inputs.frame_index]
        x_PE = x_PE + positions_PE.to(x_PE.dtype)

        for block in self.blocks:
            x_PE = block(x_PE, inputs, self.attention)
        rows_RD: torch.Tensor = self.merger(self.merge_frames(self.final_norm(x_PE), inputs))
        return rows_RD

    def merge_frames(self, x_PE: torch.Tensor, inputs: TowerInputs) -> torch.Tensor:
        """Averages patches over each item's frames: [R * merge^2, E] in merge order, summed in float32."""
        assert inputs.merge_index is not None
        assert inputs.merge_weight is not None
        # Frame by frame, because gathering all frames at once would hold F times the rows.
        merged = x_PE[inputs.merge_index[:, 0]] * inputs.merge_weight[:, 0, None]
        for frame in range(1, inputs.merge_index.shape[1]):
            merged = merged + x_PE[inputs.merge_index[:, frame]] * inputs.merge_weight[:, frame, None]
        return merged.to(x_PE.dtype)


class KimiVLTower(MoonViTTower):
    """Kimi-VL's vision tower."""

    family = KIMI_VL
    modalities = (Modality.IMAGE,)


class KimiK3Tower(MoonViTTower):
    """Kimi-K3's vision tower."""

    family = KIMI_K3
    modalities = (Modality.IMAGE,)
    position_mode = "centred_linear"

    def make_norm(self, width: int) -> AnyNorm:
        return nn.RMSNorm(width, eps=RMS_NORM_EPS)

    def make_projector(self, config: MoonViTConfig) -> Merger:
        return Merger(
            config.hidden_size,
            config.merge_size,
            config.out_width,
            None,
            has_bias=False,
            out_norm=nn.RMSNorm(config.out_width, eps=config.projector_eps),
        )


def frame_table(max_frames: int, width: int) -> torch.Tensor:
    """float32 [max_frames + 1, E]. Row 0 is zero, for images. Row f + 1 holds the sines and then the cosines
    of frame f (one-axis sin-cos positions, He et al., Masked Autoencoders). Always made on the host, even
    within a meta device context."""
    frequencies = 1.0 / 10_000 ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    angles = torch.arange(max_frames, dtype=torch.float32, device="cpu")[:, None] * frequencies
    still = torch.zeros(1, width, device="cpu")
    return torch.cat([still, torch.cat([angles.sin(), angles.cos()], dim=-1)])


def frame_rows(grid: Grid) -> torch.Tensor:
    """The row of the frame table for each patch, int64 [P of the item]: 0 for an image, f + 1 in a clip."""
    if grid.t == 1:
        return torch.zeros(grid.num_patches, dtype=torch.int64)
    return torch.arange(1, grid.t + 1).repeat_interleave(grid.h * grid.w)


def merge_tables(grids: Sequence[Grid], merge_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """merge_index int64 and merge_weight float32, both [R * merge^2, F]: the patches of the batch that are
    averaged into each merger input, and the weight 1 / t of each.

    Entries after an item's own frames repeat its first frame with weight zero. A patch of another item could
    be NaN there, and 0 * NaN is NaN.
    """
    frame = torch.arange(max(grid.t for grid in grids))
    indices, weights = [], []
    first_patch = 0
    for grid in grids:
        used = frame < grid.t
        offsets = torch.where(used, frame * (grid.h * grid.w), 0)
        indices.append(merge_order(grid.h, grid.w, merge_size)[:, None] + (first_patch + offsets))
        weights.append((used / grid.t).expand(grid.h * grid.w, -1))
        first_patch += grid.num_patches
    return torch.cat(indices), torch.cat(weights)


def parse_k25(config: JsonReader) -> MoonViTConfig:
    """Kimi-K2.5's sizes in config.json. Raises UnsupportedCheckpoint."""
    vision = config.section("vision_config")
    vision.require("mm_projector_type", "patchmerger")
    return MoonViTConfig(**sizes_3d(config, vision))


def parse_k3(config: JsonReader) -> KimiK3Config:
    """Kimi-K3's sizes in config.json. Raises UnsupportedCheckpoint."""
    vision = config.section("vision_config")
    vision.require("mm_projector_type", "patchmergerv2")
    vision.require("norm_type", "rmsnorm")
    vision.require("activation_func", "gelu_pytorch_tanh")
    vision.require("mlp_type", "mlp2")
    vision.require("pos_emb_interpolation_mode", "bilinear")
    for bias in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        vision.require(bias, False)
    return KimiK3Config(qkv_width=vision.count("qkv_hidden_size"), **sizes_3d(config, vision))


def sizes_3d(config: JsonReader, vision: JsonReader) -> dict[str, Any]:
    """The sizes of MoonViT-3D by their fields. vision: the section vision_config. Raises
    UnsupportedCheckpoint."""
    text = config.section("text_config", {})
    vision.require("hidden_act", "gelu_pytorch_tanh")
    vision.require("pos_emb_type", "divided_fixed")
    vision.require("video_attn_type", "spatial_temporal")
    vision.require("merge_type", "sd2_tpool")
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
    return {
        "depth": vision.count("vt_num_hidden_layers", "num_hidden_layers"),
        "hidden_size": hidden_size,
        "num_heads": vision.count("vt_num_attention_heads", "num_attention_heads"),
        "intermediate_size": vision.count("vt_intermediate_size", "intermediate_size"),
        "patch_size": vision.count("patch_size"),
        "merge_size": vision.square("merge_kernel_size"),
        "position_height": vision.count("init_pos_emb_height", "pos_emb_height"),
        "position_width": vision.count("init_pos_emb_width", "pos_emb_width"),
        "max_frames": vision.count("init_pos_emb_time", "pos_emb_time"),
        "out_width": vision.count("text_hidden_size", default=text.values.get("hidden_size")),
        "projector_eps": projector.number("projector_ln_eps", "projection_layer_norm_eps", default=1e-5),
        "rope_theta": rope_theta(vision),
    }


def parse_vl(config: JsonReader) -> KimiVLConfig:
    """Kimi-VL's sizes in config.json. Raises UnsupportedCheckpoint."""
    vision = config.section("vision_config")
    vision.require("model_type", "moonvit")
    return KimiVLConfig(
        depth=vision.count("num_hidden_layers"),
        hidden_size=vision.count("hidden_size"),
        num_heads=vision.count("num_attention_heads"),
        intermediate_size=vision.count("intermediate_size"),
        patch_size=vision.count("patch_size"),
        merge_size=vision.square("merge_kernel_size"),
        position_height=vision.count("init_pos_emb_height", default=PUBLISHED_SIDE),
        position_width=vision.count("init_pos_emb_width", default=PUBLISHED_SIDE),
        max_frames=1,
        out_width=config.section("text_config").count("hidden_size"),
    )


def flatten_table(weight: torch.Tensor) -> torch.Tensor:
    """Reshapes [height, width, E] to [height * width, E]."""
    return weight.flatten(0, 1)


def half_split_qk(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """wqkv [3 * H * d, ...] with q and k permuted from adjacent pairs to the half-split rotation; v is
    unchanged."""
    q, k, v = tensor.chunk(3)
    return torch.cat([permute_pairs(q, num_heads), permute_pairs(k, num_heads), v])


FAMILIES = (
    Family(KIMI_K25, ("kimi_k25",), "Kimi-K2.5, Kimi-K2.6, Kimi-K2.7-Code", parse_k25, MoonViTTower),
    Family(KIMI_VL, ("kimi_vl",), "Kimi-VL", parse_vl, KimiVLTower),
    Family(KIMI_K3, ("kimi_k3",), "Kimi-K3", parse_k3, KimiK3Tower),
)
