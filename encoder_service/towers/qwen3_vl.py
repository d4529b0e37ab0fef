"""The tower of Qwen3-VL and, without deepstack, of Qwen3.5.

Owns the order of the parts and the host tables of a batch. Patches arrive in merge order (each block of
merge^2 neighbours together), so that mergers need no gather. Attention stays within one frame.

Shape legend: P patches, S attention sequences (frames), R rows, E tower width, D language-model width,
L deepstack levels.

Reference: Qwen3-VL Technical Report (arXiv 2511.21631); transformers' ``qwen3_vl`` and ``qwen3_5`` models,
which the parity tests compare with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from encoder_service.towers.attention import AttentionBackend, SdpaAttention
from encoder_service.towers.config import QWEN3_5, QWEN3_VL, QwenVisionConfig
from encoder_service.towers.layers import Block, Merger, interpolate_positions
from encoder_service.towers.positions import (
    TABLE_CACHE_BYTES,
    FrameTableCache,
    FrameTables,
    check_sides,
    grid_taps,
    linear_taps,
    merge_order,
    pack_frames,
    raster_coordinates,
)
from encoder_service.towers.rope import blocked_tables
from encoder_service.towers.tower import Tower, TowerInputs
from encoder_service.types import Grid

NORM_EPS = 1e-6


class Qwen3VLTower(Tower):
    """family: ``qwen3_vl`` or ``qwen3_5``; the latter's config has no deepstack levels."""

    merges_time = False

    def __init__(
        self,
        config: QwenVisionConfig,
        *,
        family: str = QWEN3_VL,
        attention: AttentionBackend | None = None,
        table_cache_bytes: int = TABLE_CACHE_BYTES,
    ) -> None:
        super().__init__()
        assert family == QWEN3_VL or (family == QWEN3_5 and not config.deepstack_visual_indexes)
        self.family = family
        self.config = config
        self.patch_size = config.patch_size
        self.merge_size = config.merge_size
        self.temporal_patch_size = config.temporal_patch_size
        self.patch_dim = config.patch_dim
        self.out_width = config.out_width
        self.num_deepstack_levels = len(config.deepstack_visual_indexes)
        self.attention = attention or SdpaAttention()

        width = config.hidden_size
        self.patch_embed = nn.Linear(config.patch_dim, width)
        self.pos_embed = nn.Parameter(torch.empty(config.position_side**2, width))
        self.blocks = nn.ModuleList(
            Block(width, config.num_heads, config.intermediate_size, NORM_EPS) for _ in range(config.depth)
        )
        self.merger = Merger(width, config.merge_size, config.out_width, NORM_EPS)
        self.deepstack_mergers = nn.ModuleList(
            Merger(width, config.merge_size, config.out_width, NORM_EPS, norm_after_shuffle=True)
            for _ in config.deepstack_visual_indexes
        )
        self._tables = FrameTableCache(self._build_tables, table_cache_bytes)

    def check_grid(self, grid: Grid) -> None:
        check_sides(grid, self.merge_size)

    def prepare(self, grids: Sequence[Grid]) -> TowerInputs:
        for grid in grids:
            self.check_grid(grid)
        frames = [self._tables.get(grid.h, grid.w) for grid in grids for _ in range(grid.t)]
        return pack_frames(frames, [grid.h * grid.w for grid in grids for _ in range(grid.t)])

    def forward(self, inputs: TowerInputs) -> torch.Tensor:
        assert inputs.pixel_values is not None
        x_PE = self.patch_embed(inputs.pixel_values.to(self.dtype))
        positions_PE = interpolate_positions(self.pos_embed, inputs.position_index, inputs.position_weight)
        x_PE = x_PE + positions_PE.to(x_PE.dtype)

        mergers = dict(zip(self.config.deepstack_visual_indexes, self.deepstack_mergers, strict=True))
        levels_RD = []
        for index, block in enumerate(self.blocks):
            x_PE = block(x_PE, inputs, self.attention)
            if index in mergers:
                levels_RD.append(mergers[index](x_PE))
        return torch.cat([self.merger(x_PE), *levels_RD], dim=-1)

    def _build_tables(self, height: int, width: int) -> FrameTables:
        config = self.config
        order = merge_order(height, width, self.merge_size)
        index, weight = grid_taps(
            linear_taps(height, config.position_side),
            linear_taps(width, config.position_side),
            config.position_side,
        )
        rows, columns = raster_coordinates(height, width)
        head_dim = config.hidden_size // config.num_heads
        cos, sin = blocked_tables(rows[order], columns[order], head_dim, config.rope_theta)
        return FrameTables(index[order], weight[order], cos, sin)
