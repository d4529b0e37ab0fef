"""The tower of Kimi-K2.5: MoonViT-3D and its projector.

Owns the order of the parts and the tables of frames. Patches arrive frame by frame in raster order. Attention
spans all frames of an item. After the last norm, the merge gathers merge^2 neighbours and averages them over
the item's frames. Items of one batch may have different numbers of frames.

Shape legend: P patches, S attention sequences (items), R rows, F frames averaged into one row (the maximum
over the items of the batch), E tower width, D language-model width.

Reference: Kimi-K2.5 (arXiv 2602.02276) and MoonViT (Kimi-VL, arXiv 2504.07491); transformers' ``kimi_k25``
model, which the parity tests compare with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from encoder_service.errors import GridMismatch
from encoder_service.towers.config import KIMI_K25, MoonViTConfig
from encoder_service.towers.layers import Merger, PlainTower
from encoder_service.towers.positions import merge_order, pack_frames
from encoder_service.towers.tower import TowerInputs
from encoder_service.types import Grid

NORM_EPS = 1e-5


class MoonViTTower(PlainTower):
    """Kimi-K2.5's vision tower. ``merger`` is its multimodal projector."""

    family = KIMI_K25
    temporal_patch_size = 1
    num_deepstack_levels = 0
    merges_time = True
    position_mode = "cubic"
    rotary_layout = "interleaved"
    config: MoonViTConfig

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__(config, (config.position_height, config.position_width), NORM_EPS)
        width = config.hidden_size
        # A fixed table, which has values even when the parameters are on the meta device.
        self.frame_embed: torch.Tensor
        self.register_buffer("frame_embed", frame_table(config.max_frames, width), persistent=False)
        self.final_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.merger = Merger(width, config.merge_size, config.out_width, config.projector_eps)

    def check_grid(self, grid: Grid) -> None:
        super().check_grid(grid)
        if grid.t > self.config.max_frames:
            raise GridMismatch(
                f"grid {list(grid)} has {grid.t} frames, the temporal table has {self.config.max_frames}",
                found=grid.t,
                limit=self.config.max_frames,
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
