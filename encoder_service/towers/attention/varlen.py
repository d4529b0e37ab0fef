"""torch's own varlen attention (torch.nn.attention.varlen), which uses FlashAttention-2.

Owns the call. From torch 2.12 on there is ``num_splits``, which is set to one, because the library's default
depends on the longest sequence of the batch. Earlier versions never split. So results are batch invariant.
"""

from __future__ import annotations

import importlib
import inspect

import torch

from encoder_service.towers.attention.backend import AttentionBackend, SequenceBounds, Unplanned, zero_padding


class TorchVarlenAttention(Unplanned):
    """varlen_attn."""

    name = "varlen"
    static_lengths = False
    batch_invariant = True

    def __init__(self) -> None:
        self._varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        has_splits = "num_splits" in inspect.signature(self._varlen).parameters
        self._options = {"num_splits": 1} if has_splits else {}

    def attend(
        self, q_PHd: torch.Tensor, k_PHd: torch.Tensor, v_PHd: torch.Tensor, bounds: SequenceBounds
    ) -> torch.Tensor:
        """See AttentionBackend. float16 or bfloat16. The output of padding is zero."""
        result: torch.Tensor = self._varlen(
            q_PHd,
            k_PHd,
            v_PHd,
            bounds.cu_seqlens,
            bounds.cu_seqlens,
            bounds.max_seqlen,
            bounds.max_seqlen,
            scale=q_PHd.shape[-1] ** -0.5,
            **self._options,
        )
        return zero_padding(result, bounds.cu_seqlens)


def build(device: torch.device) -> list[AttentionBackend]:  # noqa: ARG001
    return [TorchVarlenAttention()]
