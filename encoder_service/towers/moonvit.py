"""The tower of Kimi-K2.5: MoonViT-3D and its projector.

Owns the order of the parts, the tables of frames, the sizes in config.json and the names of the tensors.
Patches arrive frame by frame in raster order. Attention spans all frames of an item. After the last norm, the
merge gathers merge^2 neighbours and averages them over the item's frames. Items of one batch may have
different numbers of frames.

Shape legend: P patches, S attention sequences (items), R rows, F frames averaged into one row (the maximum
over the items of the batch), E tower width, D language-model width.

Reference: Kimi-K2.5 (arXiv 2602.02276) and MoonViT (Kimi-VL, arXiv 2504.07491); transformers' ``kimi_k25``
model, which the parity tests compare with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from encoder_service.errors import GridMismatch, UnsupportedCheckpoint
from encoder_service.json_reader import JsonReader
from encoder_service.towers.config import Family, VisionConfig, rope_theta
from encoder_service.towers.layers import Merger, PlainTower
from encoder_service.towers.positions import merge_order, pack_frames
from encoder_service.towers.published import PublishedTensor, flatten_patch, layer
from encoder_service.towers.rope import permute_pairs
from encoder_service.towers.tower import TowerInputs
from encoder_service.types import Grid

NORM_EPS = 1e-5
NORM = partial(nn.LayerNorm, eps=NORM_EPS)
KIMI_K25 = "kimi_k25"


@dataclass(frozen=True, kw_only=True)
class MoonViTConfig(VisionConfig):
    """Sizes of Kimi-K2.5's MoonViT-3D and its projector. The learned table has position_height times
    position_width entries. max_frames: length of the temporal table."""

    prefixes: ClassVar[Sequence[tuple[str, ...]]] = [("vision_tower.", "mm_projector.")]

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
        merged_width = width * self.merge_size**2
        half_split = partial(half_split_qk, num_heads=self.num_heads)
        embed = "vision_tower.patch_embed"
        yield PublishedTensor(
            f"{embed}.proj.weight",
            (width, self.in_channels, patch, patch),
            "patch_embed.weight",
            flatten_patch,
        )
        yield PublishedTensor(f"{embed}.proj.bias", (width,), "patch_embed.bias")
        yield PublishedTensor(
            f"{embed}.pos_emb.weight",
            (self.position_height, self.position_width, width),
            "pos_embed",
            flatten_table,
        )
        for index in range(self.depth):
            name, block = f"vision_tower.encoder.blocks.{index}", f"blocks.{index}"
            yield from layer(f"{name}.norm0", f"{block}.norm1", width)
            yield PublishedTensor(
                f"{name}.wqkv.weight", (3 * width, width), f"{block}.qkv.weight", half_split
            )
            yield PublishedTensor(f"{name}.wqkv.bias", (3 * width,), f"{block}.qkv.bias", half_split)
            yield from layer(f"{name}.wo", f"{block}.proj", width, width)
            yield from layer(f"{name}.norm1", f"{block}.norm2", width)
            yield from layer(f"{name}.mlp.fc0", f"{block}.fc1", mlp_width, width)
            yield from layer(f"{name}.mlp.fc1", f"{block}.fc2", width, mlp_width)
        yield from layer("vision_tower.encoder.final_layernorm", "final_norm", width)
        yield from layer("mm_projector.pre_norm", "merger.norm", width)
        yield from layer("mm_projector.proj.0", "merger.fc1", merged_width, merged_width)
        yield from layer("mm_projector.proj.2", "merger.fc2", self.out_width, merged_width)


class MoonViTTower(PlainTower):
    """Kimi-K2.5's vision tower. ``merger`` is its multimodal projector."""

    family = KIMI_K25
    temporal_patch_size = 1
    num_deepstack_levels = 0
    merges_time = True
    position_mode = "cubic"
    rotary_layout = "interleaved"
    config: MoonViTConfig
    frame_embed: torch.Tensor
    final_norm: nn.LayerNorm

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__(config, (config.position_height, config.position_width), NORM)
        width = config.hidden_size
        self.max_frames = config.max_frames
        # A fixed table, which has values even when the parameters are on the meta device.
        self.register_buffer("frame_embed", frame_table(config.max_frames, width), persistent=False)
        self.final_norm = NORM(width)
        self.merger = Merger(width, config.merge_size, config.out_width, config.projector_eps)

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


def parse_sizes(config: JsonReader) -> MoonViTConfig:
    """The sizes in config.json. Raises UnsupportedCheckpoint."""
    vision, text = config.section("vision_config"), config.section("text_config", {})
    vision.require("hidden_act", "gelu_pytorch_tanh")
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
        out_width=vision.count("text_hidden_size", default=text.values.get("hidden_size")),
        projector_eps=projector.number("projector_ln_eps", "projection_layer_norm_eps", default=1e-5),
        rope_theta=rope_theta(vision),
    )


def flatten_table(weight: torch.Tensor) -> torch.Tensor:
    """Reshapes [height, width, E] to [height * width, E]."""
    return weight.flatten(0, 1)


def half_split_qk(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """wqkv [3 * E, ...] with q and k permuted from adjacent pairs to the half-split rotation; v is
    unchanged."""
    q, k, v = tensor.chunk(3)
    return torch.cat([permute_pairs(q, num_heads), permute_pairs(k, num_heads), v])


FAMILY = Family(KIMI_K25, ("kimi_k25",), "Kimi-K2.5, Kimi-K2.6, Kimi-K2.7-Code", parse_sizes, MoonViTTower)
