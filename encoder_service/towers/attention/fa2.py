"""FlashAttention-2 of the flash-attn package.

Owns the call. The varlen forward splits the keys only if a single query row meets grouped heads, which never
happens in a tower, so results are batch invariant.

Source: Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp.
"""

from __future__ import annotations

import importlib

import torch

from encoder_service.towers.attention.backend import AttentionBackend, SequenceBounds, Unplanned, zero_padding


class Fa2Attention(Unplanned):
    """FA2's varlen forward. Raises ImportError if flash-attn 2 is not installed. flash-attn 4 alone provides
    a package of the same name without this function."""

    name = "fa2"
    static_lengths = False
    batch_invariant = True

    def __init__(self) -> None:
        module = importlib.import_module("flash_attn")
        if not hasattr(module, "flash_attn_varlen_func"):
            raise ImportError("the installed flash_attn package has no flash_attn_varlen_func")
        self._varlen = module.flash_attn_varlen_func

    def attend(
        self, q_PHd: torch.Tensor, k_PHd: torch.Tensor, v_PHd: torch.Tensor, bounds: SequenceBounds
    ) -> torch.Tensor:
        """See AttentionBackend. float16 or bfloat16. The output of padding is zero."""
        result: torch.Tensor = self._varlen(
            q_PHd,
            k_PHd,
            v_PHd,
            cu_seqlens_q=bounds.cu_seqlens,
            cu_seqlens_k=bounds.cu_seqlens,
            max_seqlen_q=bounds.max_seqlen,
            max_seqlen_k=bounds.max_seqlen,
            dropout_p=0.0,
            softmax_scale=q_PHd.shape[-1] ** -0.5,
            causal=False,
        )
        return zero_padding(result, bounds.cu_seqlens)


def build(device: torch.device) -> list[AttentionBackend]:  # noqa: ARG001
    return [Fa2Attention()]
