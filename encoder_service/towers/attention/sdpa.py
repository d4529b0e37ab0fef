"""Attention through torch's scaled_dot_product_attention: every device, every dtype.

Owns the plain backend. It splits sequences by their lengths on the host, so a captured graph is valid only
for the lengths it was captured with.

Shape legend: P patches of the batch, B sequences of one run, H heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch.nn.functional import scaled_dot_product_attention

from encoder_service.towers.attention.backend import SequenceBounds, Unplanned


class SdpaAttention(Unplanned):
    """Makes one call per run of adjacent sequences of equal length or, if one_by_one, one call per sequence.
    The latter is slower, but a sequence's rows then depend on that sequence alone; otherwise the library may
    choose its kernel and split its work by the number of sequences in a call."""

    name = "sdpa"
    static_lengths = True

    def __init__(self, *, one_by_one: bool = False) -> None:
        self.batch_invariant = one_by_one

    def attend(
        self, q_PHd: torch.Tensor, k_PHd: torch.Tensor, v_PHd: torch.Tensor, bounds: SequenceBounds
    ) -> torch.Tensor:
        """See AttentionBackend. The output of padding is zero."""
        outputs = []
        start = 0
        for length, count in self._runs(bounds.seqlens):
            stop = start + count * length
            # [B, H, length, d], a view even if the inputs are strided parts of one packed projection.
            q, k, v = (
                x_PHd[start:stop].view(count, length, *x_PHd.shape[1:]).transpose(1, 2)
                for x_PHd in (q_PHd, k_PHd, v_PHd)
            )
            outputs.append(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
            start = stop
        if start < q_PHd.shape[0]:
            outputs.append(q_PHd.new_zeros(q_PHd.shape[0] - start, *q_PHd.shape[1:]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _runs(self, seqlens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The sequence length and the number of sequences of each call. Empty sequences are skipped."""
        for length, run in groupby(seqlens):
            if length == 0:
                continue
            count = len(list(run))
            if self.batch_invariant:
                yield from [(length, 1)] * count
            else:
                yield length, count
