"""Attention over packed sequences: the seam between the towers and the kernels that serve them.

Owns what a backend is. Every backend takes the same packed tensors and bounds; which one serves which
device and shape is the caller's choice, made before a graph is captured (available.py lists what is
installed, select.py measures it).

Shape legend: P patches of the batch, S sequences, H heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from encoder_service.towers.attention.available import available_backends, parse_attention
from encoder_service.towers.attention.plan import AttentionPlan
from encoder_service.towers.attention.sdpa import SdpaAttention

__all__ = [
    "AttentionBackend",
    "AttentionPlan",
    "SdpaAttention",
    "SequenceBounds",
    "available_backends",
    "parse_attention",
]


class SequenceBounds(Protocol):
    """Where sequences begin and end, on the device and on the host. TowerInputs is one.

    cu_seqlens: int32 [S + 1] on the device, zero-length sequences allowed; seqlens: the same lengths on the
    host; max_seqlen: an upper bound of them. A kernel reads cu_seqlens and max_seqlen; seqlens serve
    backends that launch per length.
    """

    @property
    def cu_seqlens(self) -> torch.Tensor: ...

    @property
    def seqlens(self) -> tuple[int, ...]: ...

    @property
    def max_seqlen(self) -> int: ...


class AttentionBackend(Protocol):
    """Full attention within each sequence, scaled by 1 / sqrt(d).

    ``attend`` takes q, k, v as [P, H, d], possibly strided views of one packed projection whose last
    dimension is contiguous, and returns [P, H, d]. Patches past the last sequence are padding: attended by
    none, and their output is finite, provided that their inputs are. No host synchronisation, so that a CUDA
    graph can hold it; backends that compile do so in their first call, which must come before a capture.

    ``plan`` is optional to call, once per forward pass and inside the graph: its result, passed as the
    bounds of every block's ``attend``, saves each block the work that all share (the zeroed
    output). With a plan, ``attend`` returns the plan's own buffer: use the result before the next call.

    static_lengths: the lengths on the host are baked into the launches, so that a graph serves only the
    lengths it was captured with. batch_invariant: a sequence's rows are bit-equal whatever else is in the
    batch and whatever bounds are baked.
    """

    @property
    def name(self) -> str: ...

    @property
    def static_lengths(self) -> bool: ...

    @property
    def batch_invariant(self) -> bool: ...

    def plan(self, bounds: SequenceBounds, shape: Sequence[int], dtype: torch.dtype) -> SequenceBounds: ...

    def attend(
        self, q_PHd: torch.Tensor, k_PHd: torch.Tensor, v_PHd: torch.Tensor, bounds: SequenceBounds
    ) -> torch.Tensor: ...
