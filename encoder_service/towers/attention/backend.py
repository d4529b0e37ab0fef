"""The protocol of attention backends, its sequence bounds, and the output buffer that blocks share.

Owns the interface between the towers and the kernels. ``available.py`` lists the backends of a device,
``cases.py`` says what they are measured on. A new backend implements ``AttentionBackend`` in its own file
with a function ``build``; add it to ``available.BUILDERS`` and its ``name`` to ``available.NAMES``.
tests/unit/towers/test_attention_backends.py runs every name. Graphs use no backend with ``static_lengths``.

Padding: kernels that fetch whole tiles of keys and values read past the end of the last sequence and give
those rows the weight zero, but zero times NaN is NaN. Libraries leave the output of padding uninitialised.
After the projection it becomes the values of the next block, so it must be finite. A backend that accepts an
output buffer gets one that is zeroed before the first block (``plan_output``). The output of other backends
is masked (``zero_padding``).

Shape legend: P patches of the batch, S sequences, H heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class SequenceBounds(Protocol):
    """The bounds of the sequences, on the device and on the host. Implemented by TowerInputs.

    cu_seqlens: int32 [S + 1] on the device; zero-length sequences are allowed. seqlens: the same lengths on
    the host. max_seqlen: an upper bound of the lengths. Kernels read cu_seqlens and max_seqlen; seqlens are
    for backends that launch once per length.
    """

    @property
    def cu_seqlens(self) -> torch.Tensor: ...

    @property
    def seqlens(self) -> tuple[int, ...]: ...

    @property
    def max_seqlen(self) -> int: ...


class AttentionBackend(Protocol):
    """Full attention within each sequence, scaled by 1 / sqrt(d).

    ``attend`` takes q, k, v as [P, H, d] and returns [P, H, d]. The inputs may be strided views of one packed
    projection whose last dimension is contiguous. Patches after the last sequence are padding: no row attends
    to them, and their output is finite if their inputs are. ``attend`` does not synchronise with the host and
    can be captured in a CUDA graph. Backends that compile do so in their first call, which must come before a
    capture.

    ``plan`` may be called once per forward pass, inside the graph. A backend without a plan inherits it from
    ``Unplanned``. Pass its result as the bounds of every block's ``attend``; this saves each block the
    zeroing of its output. With a plan, ``attend`` returns the plan's own buffer, so use the result before the
    next call.

    static_lengths: the lengths on the host are baked into the launches, so that a graph is valid only for the
    lengths it was captured with. batch_invariant: a sequence's rows are bit-equal regardless of the other
    sequences in the batch and of the baked bounds.
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


@dataclass(frozen=True)
class AttentionPlan:
    """Bounds of a batch (see SequenceBounds). out_PHd: output buffer whose padding is zero; every call
    overwrites it."""

    cu_seqlens: torch.Tensor
    seqlens: tuple[int, ...]
    max_seqlen: int
    out_PHd: torch.Tensor | None = None


def plan_output(bounds: SequenceBounds, shape: Sequence[int], dtype: torch.dtype) -> AttentionPlan:
    """The bounds with a zeroed output buffer of ``shape`` [P, H, d] on the same device."""
    out_PHd = torch.zeros(tuple(shape), dtype=dtype, device=bounds.cu_seqlens.device)
    return AttentionPlan(bounds.cu_seqlens, bounds.seqlens, bounds.max_seqlen, out_PHd)


def output_of(q_PHd: torch.Tensor, bounds: SequenceBounds) -> torch.Tensor:
    """The plan's buffer, or a new zeroed one. Raises ValueError if its shape or dtype is another."""
    if not isinstance(bounds, AttentionPlan) or bounds.out_PHd is None:
        return torch.zeros(q_PHd.shape, dtype=q_PHd.dtype, device=q_PHd.device)
    if bounds.out_PHd.shape != q_PHd.shape or bounds.out_PHd.dtype != q_PHd.dtype:
        raise ValueError(
            f"the plan's output is {tuple(bounds.out_PHd.shape)} {bounds.out_PHd.dtype}, "
            f"the queries are {tuple(q_PHd.shape)} {q_PHd.dtype}"
        )
    return bounds.out_PHd


def zero_padding(out_PHd: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Zeroes the rows after the last sequence in place. Reads the bound on the device."""
    rows = torch.arange(out_PHd.shape[0], device=out_PHd.device)
    return out_PHd.masked_fill_((rows >= cu_seqlens[-1])[:, None, None], 0)


class Unplanned:
    """Base class of backends whose blocks share nothing."""

    def plan(
        self,
        bounds: SequenceBounds,
        shape: Sequence[int],  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
    ) -> SequenceBounds:
        """The bounds, unchanged."""
        return bounds
