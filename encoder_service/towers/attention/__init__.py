"""Attention over packed sequences: the seam between the towers and the kernels that serve them.

Owns what a backend is. Every backend takes the same packed tensors and bounds; which one serves which
device and shape is the caller's choice, made before a graph is captured.

Shape legend: P patches of the batch, S sequences, H heads, d head_dim.
"""

from __future__ import annotations

from typing import Protocol

import torch

from encoder_service.towers.attention.sdpa import SdpaAttention

__all__ = ["AttentionBackend", "SdpaAttention", "SequenceBounds"]


class SequenceBounds(Protocol):
    """Where sequences begin and end, on the device and on the host. TowerInputs is one.

    cu_seqlens: int32 [S + 1] on the device; seqlens: the same lengths on the host; max_seqlen: an upper
    bound of them. A kernel reads cu_seqlens and max_seqlen; seqlens serve backends that launch per length.
    """

    @property
    def cu_seqlens(self) -> torch.Tensor: ...

    @property
    def seqlens(self) -> tuple[int, ...]: ...

    @property
    def max_seqlen(self) -> int: ...


class AttentionBackend(Protocol):
    """Full attention within each sequence, scaled by 1 / sqrt(d).

    ``attend`` takes q, k, v as [P, H, d], possibly strided views of one packed projection, and returns
    [P, H, d]. Patches past the last sequence are padding: attended by none, and their output is finite.
    No host synchronisation, so that a CUDA graph can hold it.
    """

    @property
    def name(self) -> str: ...

    def attend(
        self, q_PHd: torch.Tensor, k_PHd: torch.Tensor, v_PHd: torch.Tensor, bounds: SequenceBounds
    ) -> torch.Tensor: ...
