"""What an attention backend is: the protocol, its bounds, and the output buffer that blocks share.

Owns the seam between the towers and the kernels. ``available.py`` lists the backends of a device,
``select.py`` measures them. A new backend implements ``AttentionBackend`` in a file of its own with a
function ``build``, gets a line in ``available.BUILDERS`` and its ``name`` in ``available.NAMES``;
tests/unit/towers/test_attention_backends.py runs every name. Graphs take no backend with ``static_lengths``.

Padding: kernels that fetch whole tiles of keys and values read past the end of the last sequence and give
those rows the weight zero, and zero times NaN is NaN. Libraries leave the output of padding uninitialised;
after the projection it is the next block's values, so it has to be finite. A backend that takes an output
buffer gets one that was zeroed before the first block (``plan_output``); the output of the others is masked
(``zero_padding``).

Shape legend: P patches of the batch, S sequences, H heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class SequenceBounds(Protocol):
    """Where sequences begin and end, on the device and on the host. TowerInputs is one.

    cu_seqlens: int32 [S + 1] on the device, zero-length sequences allowed; seqlens: the same lengths on the
    host; max_seqlen: an upper bound of them. Kernels read cu_seqlens and max_seqlen; seqlens serve backends
    that launch per length.
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
    dimension is contiguous, and returns [P, H, d]. Patches past the last sequence are padding: no row attends
    to them, and their output is finite, provided that their inputs are. It does not synchronise with the host
    and can be captured in a CUDA graph. Backends that compile do so in their first call, which must come
    before a capture.

    ``plan`` may be called once per forward pass, inside the graph; a backend without a plan inherits it from
    ``Unplanned``. Its result, passed as the bounds of every block's ``attend``, saves each block the zeroed
    output. With a plan, ``attend`` returns the plan's own buffer: use the result before the next call.

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


@dataclass(frozen=True)
class AttentionPlan:
    """Bounds of a batch (see SequenceBounds). out_PHd: buffer whose padding is zero, rewritten by every
    call."""

    cu_seqlens: torch.Tensor
    seqlens: tuple[int, ...]
    max_seqlen: int
    out_PHd: torch.Tensor | None = None


def plan_output(bounds: SequenceBounds, shape: Sequence[int], dtype: torch.dtype) -> AttentionPlan:
    """The bounds with a zeroed output of ``shape`` [P, H, d] on their device."""
    out_PHd = torch.zeros(tuple(shape), dtype=dtype, device=bounds.cu_seqlens.device)
    return AttentionPlan(bounds.cu_seqlens, bounds.seqlens, bounds.max_seqlen, out_PHd)


def output_of(q_PHd: torch.Tensor, bounds: SequenceBounds) -> torch.Tensor:
    """The plan's buffer, or a new zeroed one. Raises ValueError if the plan was made for another shape."""
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
    """Base of backends whose blocks share nothing."""

    def plan(
        self,
        bounds: SequenceBounds,
        shape: Sequence[int],  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
    ) -> SequenceBounds:
        """The bounds, unchanged."""
        return bounds
