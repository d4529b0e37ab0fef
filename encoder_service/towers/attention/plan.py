"""What the blocks of one forward pass share: the output buffer.

Owns the record and how padding stays finite. Who needs which part is each backend's own.

Padding matters although no row attends to it: kernels that fetch whole tiles of keys and values read past
the end of the last sequence and give those rows the weight zero, and zero times NaN is NaN. Libraries leave
the output of padding as memory was. Once through the projection it is the next block's value rows, so it has
to be finite: zeroed in one buffer before the first block, which every block writes again and none beyond the
sequences, or masked after the call where a library takes no buffer.

Shape legend: P patches of the batch, S sequences, H heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from encoder_service.towers.attention import SequenceBounds


@dataclass(frozen=True)
class AttentionPlan:
    """Bounds of a batch (see SequenceBounds) with what a backend prepared for one forward pass.

    out_PHd: buffer whose padding is zero, rewritten by every call.
    """

    cu_seqlens: torch.Tensor
    seqlens: tuple[int, ...]
    max_seqlen: int
    out_PHd: torch.Tensor | None = None


def plan_output(bounds: SequenceBounds, shape: Sequence[int], dtype: torch.dtype) -> AttentionPlan:
    """The bounds with a zeroed output of ``shape`` [P, H, d] on their device."""
    return AttentionPlan(
        cu_seqlens=bounds.cu_seqlens,
        seqlens=bounds.seqlens,
        max_seqlen=bounds.max_seqlen,
        out_PHd=torch.zeros(tuple(shape), dtype=dtype, device=bounds.cu_seqlens.device),
    )


def output_of(q_PHd: torch.Tensor, bounds: SequenceBounds) -> torch.Tensor:
    """Where a call may write: the plan's buffer, or a zeroed one of its own. Raises ValueError if the plan
    was made for another shape."""
    if not isinstance(bounds, AttentionPlan) or bounds.out_PHd is None:
        return torch.zeros(q_PHd.shape, dtype=q_PHd.dtype, device=q_PHd.device)
    if bounds.out_PHd.shape != q_PHd.shape or bounds.out_PHd.dtype != q_PHd.dtype:
        raise ValueError(
            f"the plan's output is {tuple(bounds.out_PHd.shape)} {bounds.out_PHd.dtype}, "
            f"the queries are {tuple(q_PHd.shape)} {q_PHd.dtype}"
        )
    return bounds.out_PHd


def zero_padding(out_PHd: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Zeroes, in place, the rows past the last sequence; the bound is read on the device."""
    rows = torch.arange(out_PHd.shape[0], device=out_PHd.device)
    return out_PHd.masked_fill_((rows >= cu_seqlens[-1])[:, None, None], 0)


class Unplanned:
    """Base of backends that have nothing to share between the blocks."""

    def plan(
        self,
        bounds: SequenceBounds,
        shape: Sequence[int],  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
    ) -> SequenceBounds:
        """The bounds as they are."""
        return bounds
