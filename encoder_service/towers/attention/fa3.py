"""FlashAttention-3 (Hopper), from the fa3-fwd wheel or an installed flash_attn_interface.

Owns the call. Both packages wrap one registered operator. Called by its argument names, it takes an output
buffer and skips autograd bookkeeping. A build whose operator lacks an argument (before 2025-07) counts as not
installed.

Split-KV is off (num_splits=1). Its combine pass costs more than it saves at a tower's shapes. The split also
depends on the batch, so an item's rows would depend on the other items. Tiles depend on the head dim only, so
results are batch invariant.

Source: Dao-AILab/flash-attention, hopper/flash_attn_interface.py; fa3-fwd 0.0.3.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from encoder_service.towers.attention.backend import AttentionBackend, SequenceBounds, output_of, plan_output

# The module, and the names under which it holds its operators.
INTERFACES = {
    "fa3_fwd_interface": ("fa3_fwd_cuda",),
    "flash_attn_interface": ("flash_attn_3_cuda", "flash_attn_3_gpu"),
}
OPERATOR_ARGUMENTS = frozenset({
    "q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale",
    "is_causal", "num_splits",
})  # fmt: skip


class Fa3Attention:
    """FA3's varlen forward. Raises ImportError if neither module is installed with such an operator."""

    name = "fa3"
    static_lengths = False
    batch_invariant = True

    def __init__(self) -> None:
        self._operator = find_operator(import_interface())

    def plan(self, bounds: SequenceBounds, shape: Sequence[int], dtype: torch.dtype) -> SequenceBounds:
        """The bounds with the output buffer that all blocks write to."""
        return plan_output(bounds, shape, dtype)

    def attend(
        self, q_PHd: torch.Tensor, k_PHd: torch.Tensor, v_PHd: torch.Tensor, bounds: SequenceBounds
    ) -> torch.Tensor:
        """See AttentionBackend. bfloat16, head_dim a multiple of 8. The output of padding is zero."""
        out_PHd = output_of(q_PHd, bounds)
        self._operator(
            q_PHd,
            k_PHd,
            v_PHd,
            out=out_PHd,
            cu_seqlens_q=bounds.cu_seqlens,
            cu_seqlens_k=bounds.cu_seqlens,
            max_seqlen_q=bounds.max_seqlen,
            max_seqlen_k=bounds.max_seqlen,
            softmax_scale=q_PHd.shape[-1] ** -0.5,
            is_causal=False,
            num_splits=1,
        )
        return out_PHd


def import_interface() -> ModuleType:
    """The first interface that can be imported. Raises ImportError, which names both."""
    reasons = []
    for name in INTERFACES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    raise ImportError("no FlashAttention-3: " + "; ".join(reasons))


def find_operator(module: ModuleType) -> Callable[..., Any]:
    """The registered forward operator. Raises ImportError if it lacks an argument that is passed."""
    for attribute in INTERFACES.get(module.__name__, ()):
        operator: Any = getattr(getattr(module, attribute, None), "fwd", None)
        schema = getattr(getattr(operator, "default", None), "_schema", None)
        if schema is not None and {argument.name for argument in schema.arguments} >= OPERATOR_ARGUMENTS:
            forward: Callable[..., Any] = operator
            return forward
    raise ImportError(f"{module.__name__} has no operator with {', '.join(sorted(OPERATOR_ARGUMENTS))}")


def build(device: torch.device) -> list[AttentionBackend]:  # noqa: ARG001
    return [Fa3Attention()]
