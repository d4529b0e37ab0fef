"""The parts that both towers are made of: block, merger, position lookup.

Owns the plain, readable form of each. Each tower's ``forward`` puts them in order.

Shape legend: P patches, R rows (visual tokens), K position taps, E tower width, M = E * merge^2,
D language-model width, H heads, d head_dim.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import embedding_bag, gelu

from encoder_service.towers.attention import AttentionBackend
from encoder_service.towers.rope import rotate
from encoder_service.towers.tower import TowerInputs


def interpolate_positions(
    table: torch.Tensor, position_index: torch.Tensor, position_weight: torch.Tensor
) -> torch.Tensor:
    """float32 [P, E]: for each patch the weighted sum of K rows of a learned table [table rows, E].

    Summed in float32 whatever the table's dtype: bicubic weights alternate in sign.
    """
    return embedding_bag(position_index, table.float(), per_sample_weights=position_weight, mode="sum")


class Block(nn.Module):
    """Pre-norm transformer block: fused qkv with rotary positions, tanh-GELU MLP."""

    def __init__(self, width: int, num_heads: int, mlp_width: int, norm_eps: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.fc1 = nn.Linear(width, mlp_width)
        self.fc2 = nn.Linear(mlp_width, width)

    def forward(self, x_PE: torch.Tensor, inputs: TowerInputs, attention: AttentionBackend) -> torch.Tensor:
        x_PE = x_PE + self.attend(self.norm1(x_PE), inputs, attention)
        hidden = gelu(self.fc1(self.norm2(x_PE)), approximate="tanh")
        out_PE: torch.Tensor = x_PE + self.fc2(hidden)
        return out_PE

    def attend(self, x_PE: torch.Tensor, inputs: TowerInputs, attention: AttentionBackend) -> torch.Tensor:
        q_PHd, k_PHd, v_PHd = self.qkv(x_PE).view(x_PE.shape[0], 3, self.num_heads, -1).unbind(1)
        q_PHd = rotate(q_PHd, inputs.rope_cos, inputs.rope_sin)
        k_PHd = rotate(k_PHd, inputs.rope_cos, inputs.rope_sin)
        out_PHd = attention.attend(q_PHd, k_PHd, v_PHd, inputs)
        out_PE: torch.Tensor = self.proj(out_PHd.flatten(1))
        return out_PE


class Merger(nn.Module):
    """merge^2 neighbouring patches to one row: LayerNorm, two layers, erf-GELU.

    norm_after_shuffle: the norm spans the merged patches (Qwen's deepstack levels) instead of each patch.
    """

    def __init__(
        self,
        width: int,
        merge_size: int,
        out_width: int,
        norm_eps: float,
        *,
        norm_after_shuffle: bool = False,
    ) -> None:
        super().__init__()
        self.norm_after_shuffle = norm_after_shuffle
        self.merged_width = width * merge_size**2
        self.norm = nn.LayerNorm(self.merged_width if norm_after_shuffle else width, eps=norm_eps)
        self.fc1 = nn.Linear(self.merged_width, self.merged_width)
        self.fc2 = nn.Linear(self.merged_width, out_width)

    def forward(self, x_PE: torch.Tensor) -> torch.Tensor:
        """[P, E] in merge order to [R, D]."""
        if self.norm_after_shuffle:
            x_RM = self.norm(x_PE.reshape(-1, self.merged_width))
        else:
            x_RM = self.norm(x_PE).reshape(-1, self.merged_width)
        rows_RD: torch.Tensor = self.fc2(gelu(self.fc1(x_RM)))
        return rows_RD
