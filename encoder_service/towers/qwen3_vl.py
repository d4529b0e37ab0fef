"""The tower of Qwen3-VL and, without deepstack, of Qwen3.5.

Owns the order of the parts. Patches arrive in merge order, in which each block of merge^2 neighbours is
adjacent, so that mergers need no gather. Attention stays within one frame.

Shape legend: P patches, S attention sequences (frames), R rows, E tower width, D language-model width,
L deepstack levels.

Reference: Qwen3-VL Technical Report (arXiv 2511.21631); transformers' ``qwen3_vl`` and ``qwen3_5`` models,
which the parity tests compare with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from encoder_service.towers.config import QWEN3_5, QWEN3_VL, QwenVisionConfig
from encoder_service.towers.layers import Merger, PlainTower
from encoder_service.towers.positions import pack_frames
from encoder_service.towers.tower import TowerInputs
from encoder_service.types import Grid

NORM_EPS = 1e-6


class Qwen3VLTower(PlainTower):
    """The tower of Qwen3-VL and Qwen3.5. family: ``qwen3_vl``, or ``qwen3_5`` without deepstack levels."""

    merges_time = False
    position_mode = "linear"
    rotary_layout = "blocked"
    config: QwenVisionConfig

    def __init__(self, config: QwenVisionConfig, family: str = QWEN3_VL) -> None:
        assert family == QWEN3_VL or (family == QWEN3_5 and not config.deepstack_visual_indexes)
        super().__init__(config, (config.position_side, config.position_side), NORM_EPS)
        self.family = family
        self.temporal_patch_size = config.temporal_patch_size
        self.num_deepstack_levels = len(config.deepstack_visual_indexes)
        self.merger = Merger(config.hidden_size, config.merge_size, config.out_width, NORM_EPS)
        self.deepstack_mergers = nn.ModuleList(
            Merger(config.hidden_size, config.merge_size, config.out_width, NORM_EPS, norm_after_shuffle=True)
            for _ in config.deepstack_visual_indexes
        )

    def prepare(self, grids: Sequence[Grid]) -> TowerInputs:
        return pack_frames(
            self.frame_tables(grids), [grid.h * grid.w for grid in grids for _ in range(grid.t)]
        )

    def forward(self, inputs: TowerInputs) -> torch.Tensor:
        x_PE, positions_PE = self.embed(inputs)
        x_PE = x_PE + positions_PE.to(x_PE.dtype)

        mergers = dict(zip(self.config.deepstack_visual_indexes, self.deepstack_mergers, strict=True))
        levels_RD = []
        for index, block in enumerate(self.blocks):
            x_PE = block(x_PE, inputs, self.attention)
            if index in mergers:
                levels_RD.append(mergers[index](x_PE))
        return torch.cat([self.merger(x_PE), *levels_RD], dim=-1)
