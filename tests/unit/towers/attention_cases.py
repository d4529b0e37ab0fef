"""Batches for attention tests: bounds, packed projections, and the float32 answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from encoder_service.towers.attention import SdpaAttention


@dataclass(frozen=True)
class Bounds:
    """seqlens without the empty slots that cu_seqlens may end in."""

    cu_seqlens: torch.Tensor
    seqlens: tuple[int, ...]
    max_seqlen: int


def bounds_of(
    seqlens: Sequence[int],
    *,
    empty: int = 0,
    max_seqlen: int | None = None,
    device: torch.device | str = "cpu",
) -> Bounds:
    """Bounds of sequences followed by ``empty`` slots that repeat the last bound."""
    cu_seqlens = [0, *accumulate(seqlens), *[sum(seqlens)] * empty]
    return Bounds(
        torch.tensor(cu_seqlens, dtype=torch.int32, device=device), tuple(seqlens), max_seqlen or max(seqlens)
    )


def packed(
    num_patches: int,
    num_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [P, H, d] as strided parts of one projection [P, 3, H, d]."""
    generator = torch.Generator().manual_seed(num_patches * 1000 + head_dim)
    qkv = torch.randn(num_patches, 3, num_heads, head_dim, generator=generator)
    q, k, v = qkv.to(device, dtype).unbind(1)
    return q, k, v


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqlens: Sequence[int]) -> torch.Tensor:
    """The rows of the sequences, in float32 by the plain backend, which has tests of its own."""
    return SdpaAttention().attend(q.float(), k.float(), v.float(), bounds_of(seqlens))[: sum(seqlens)]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())
