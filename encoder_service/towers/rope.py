"""Two-axis rotary positions of the towers: angles on the host, rotation on the device.

Owns the order of row and column frequencies over a head in each family, and the half-split rotation that both
use. MoonViT's published weights rotate adjacent pairs. They are permuted once at load (published.py), so that
one rotation works for all families.

Shape legend: N patches of one frame, P patches of the batch, H heads, d head_dim.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

RotaryLayout: TypeAlias = Literal["blocked", "interleaved"]


def inverse_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """float32 [d / 4]: one frequency per pair and axis (Su et al., RoFormer, applied to half a head)."""
    axis_dim = head_dim // 2
    return 1.0 / theta ** (torch.arange(0, axis_dim, 2, dtype=torch.float32) / axis_dim)


def rotary_tables(
    rows: torch.Tensor, columns: torch.Tensor, head_dim: int, theta: float, layout: RotaryLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [N, d], for ``rotate``. Both halves of a head have the same angles.

    rows, columns: int64 [N]. layout: "blocked" (Qwen) has the row's frequencies, then the column's;
    "interleaved" (MoonViT) alternates column and row, frequency by frequency.
    """
    frequencies = inverse_frequencies(head_dim, theta)
    of_row, of_column = rows[:, None] * frequencies, columns[:, None] * frequencies
    if layout == "blocked":
        angles = torch.cat([of_row, of_column], dim=-1)
    else:
        angles = torch.stack([of_column, of_row], dim=-1).flatten(1)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def rotate(x_PHd: torch.Tensor, cos_Pd: torch.Tensor, sin_Pd: torch.Tensor) -> torch.Tensor:
    """Rotates element i of every head with element i + d/2, in float32. The result has x's dtype."""
    x = x_PHd.float()
    first, second = x.chunk(2, dim=-1)
    partner = torch.cat([-second, first], dim=-1)
    return (x * cos_Pd[:, None] + partner * sin_Pd[:, None]).to(x_PHd.dtype)


def permute_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Permutes the output rows of a q or k projection from adjacent pairs to half-split order.

    weight: [H * d, ...]. Row 2i of a head becomes row i, row 2i + 1 becomes row i + d/2. q.k is a sum over a
    head's elements, so the same permutation of both does not change attention.
    """
    by_pair = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return by_pair.transpose(1, 2).flatten(0, 2)
