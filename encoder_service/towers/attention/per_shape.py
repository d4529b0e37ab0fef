"""One attention backend made of several: each forward pass looks its backend up by the batch's shape.

Owns the lookup. ``select.py`` measures the choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from encoder_service.towers.attention.backend import AttentionBackend, SequenceBounds


@dataclass(frozen=True)
class ChosenPlan:
    """A backend's own plan, and the backend."""

    backend: AttentionBackend
    inner: SequenceBounds

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return self.inner.cu_seqlens

    @property
    def seqlens(self) -> tuple[int, ...]:
        return self.inner.seqlens

    @property
    def max_seqlen(self) -> int:
        return self.inner.max_seqlen


class PerShapeAttention:
    """choices: the backend measured best by (number of patches, max_seqlen); a shape that was not measured
    takes the choice of the nearest one, by the ratios of both. At least one choice."""

    name = "auto"
    static_lengths = False

    def __init__(self, choices: Mapping[tuple[int, int], AttentionBackend]) -> None:
        assert choices
        self.choices = dict(choices)
        assert not any(backend.static_lengths for backend in self.choices.values())

    @property
    def batch_invariant(self) -> bool:
        """Only when one backend serves all shapes: two round differently."""
        backends = {id(backend): backend for backend in self.choices.values()}
        return len(backends) == 1 and all(backend.batch_invariant for backend in backends.values())

    def choose(self, num_patches: int, max_seqlen: int) -> AttentionBackend:
        """The backend of the nearest measured shape."""

        def distance(shape: tuple[int, int]) -> float:
            patches, seqlen = shape
            return abs(math.log(num_patches / patches)) + 2 * abs(math.log(max_seqlen / seqlen))

        return self.choices[min(self.choices, key=distance)]

    def plan(self, bounds: SequenceBounds, shape: Sequence[int], dtype: torch.dtype) -> SequenceBounds:
        backend = self.choose(shape[0], bounds.max_seqlen)
        return ChosenPlan(backend, backend.plan(bounds, shape, dtype))

    def attend(
        self, q_PHd: torch.Tensor, k_PHd: torch.Tensor, v_PHd: torch.Tensor, bounds: SequenceBounds
    ) -> torch.Tensor:
        """See AttentionBackend. Without a ChosenPlan the backend is looked up in each call."""
        if isinstance(bounds, ChosenPlan):
            return bounds.backend.attend(q_PHd, k_PHd, v_PHd, bounds.inner)
        backend = self.choose(q_PHd.shape[0], bounds.max_seqlen)
        return backend.attend(q_PHd, k_PHd, v_PHd, bounds)
