"""What attention backends are measured on: packed batches that resemble the buckets.

Owns the batches, their random inputs, and what counts as a wrong result. ``available.py`` gives the backends,
``selection.py`` measures them. One case takes about as long as a few hundred attention calls.

Shape legend: P patches of the batch, S sequences, H heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from encoder_service.towers.attention.backend import AttentionBackend, AttentionPlan
from encoder_service.towers.attention.sdpa import SdpaAttention
from encoder_service.towers.layers import BlockShape
from encoder_service.towers.selection import Case, Selection, Trial, WrongResult, relative_error

# The operation's name in logs, metrics and kept choices.
ATTENTION = "attention"
# Largest error on normal random values. Rounding probabilities and output to bfloat16 gives 2e-3 to 4e-3; a
# wrong mask, scale or bound gives 1e-1 and more.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Repeated timings differ by about this share.
TIE_SHARE = 0.02
# Attention calls with one plan in a timed run; towers have 27 blocks.
NUM_BLOCKS = 8


@dataclass(frozen=True)
class PackedBatch:
    """Sequences of ``seqlens`` in num_patches rows and num_sequences slots, with the bound max_seqlen."""

    seqlens: tuple[int, ...]
    num_patches: int
    num_sequences: int
    max_seqlen: int

    @classmethod
    def mixed(cls, num_patches: int, num_sequences: int, max_seqlen: int) -> PackedBatch:
        """A bucket filled in three equal parts with sequences of max_seqlen, three quarters and one quarter
        of it. If a third of the bucket cannot hold max_seqlen: as many sequences of max_seqlen as fit, and
        one for the remainder."""
        lengths = [max_seqlen * quarters // 4 for quarters in (4, 3, 1)]
        if num_patches // len(lengths) >= max_seqlen and min(lengths) >= 1:
            seqlens = [length for length in lengths for _ in range(num_patches // len(lengths) // length)]
        else:
            seqlens = [max_seqlen] * (num_patches // max_seqlen)
            if num_patches % max_seqlen:
                seqlens.append(num_patches % max_seqlen)
        return cls(tuple(seqlens[:num_sequences]), num_patches, num_sequences, max_seqlen)

    def bounds(self, device: torch.device) -> AttentionPlan:
        """Slots without a sequence repeat the last bound."""
        ends = [0, *accumulate(self.seqlens)]
        ends += ends[-1:] * (self.num_sequences + 1 - len(ends))
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
        return AttentionPlan(cu_seqlens, self.seqlens, self.max_seqlen)


# Mixed lengths, single rows, no whole tile, padding.
CHECK_BATCH = PackedBatch((200, 1, 77, 1, 300, 64, 130), 800, 10, 773)


def attention_selection(
    backends: Sequence[AttentionBackend],
    batches: Iterable[PackedBatch],
    block: BlockShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> Selection[AttentionBackend]:
    """Chooses a backend by number of patches and max_seqlen.

    backends: none with static_lengths, because a bucket must work for any lengths. deterministic: only
    backends whose rows for a sequence are bit-equal alone and in a batch, and one backend for all cases,
    because two backends round differently.
    """
    assert not any(backend.static_lengths for backend in backends)

    def case_of(batch: PackedBatch, *, is_invariant: bool = False) -> Case[AttentionBackend]:
        make = partial(make_trial, batch, block, dtype, device, is_invariant=is_invariant)
        return Case((batch.num_patches, batch.max_seqlen), make)

    return Selection(
        ATTENTION,
        backends,
        [case_of(batch) for batch in batches],
        TIE_SHARE,
        checks=[case_of(CHECK_BATCH, is_invariant=deterministic)],
        one_for_all=deterministic,
        errors_are_local=True,
    )


def make_trial(
    batch: PackedBatch,
    block: BlockShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_invariant: bool = False,
) -> Trial[AttentionBackend]:
    """A trial on normal values; zeros would run faster than a real batch. is_invariant: also refuse backends
    whose rows for a sequence depend on the other sequences."""
    qkv = torch.randn(batch.num_patches, 3, block.num_heads, block.head_dim, dtype=dtype, device=device)
    q_PHd, k_PHd, v_PHd = qkv.unbind(1)
    bounds = batch.bounds(device)
    total = sum(batch.seqlens)
    expected = attend(SdpaAttention(), qkv[:total].float(), bounds)

    def error(backend: AttentionBackend) -> float:
        out_PHd = backend.attend(q_PHd, k_PHd, v_PHd, backend.plan(bounds, q_PHd.shape, q_PHd.dtype))
        deviation = relative_error(out_PHd[:total], expected)
        if deviation <= TOLERANCES[dtype]:
            if not bool(out_PHd[total:].isfinite().all()):
                raise WrongResult("padding is not finite")
            if is_invariant:
                check_invariance(backend, batch, qkv)
        return deviation

    def run(backend: AttentionBackend) -> None:
        plan = backend.plan(bounds, q_PHd.shape, q_PHd.dtype)
        for _ in range(NUM_BLOCKS):
            backend.attend(q_PHd, k_PHd, v_PHd, plan)

    return Trial(error, run, TOLERANCES[dtype], NUM_BLOCKS)


def check_invariance(backend: AttentionBackend, batch: PackedBatch, qkv: torch.Tensor) -> None:
    """Raises WrongResult if the first sequence's rows differ between the batch and the sequence alone."""
    length = batch.seqlens[0]
    alone = PackedBatch((length,), length, 1, length)
    batched = attend(backend, qkv, batch.bounds(qkv.device))[:length]
    single = attend(backend, qkv[:length], alone.bounds(qkv.device))
    num_differing = int((batched != single).sum())
    if num_differing:
        raise WrongResult(f"{num_differing} values of a sequence depend on the batch around it")


def attend(backend: AttentionBackend, qkv: torch.Tensor, bounds: AttentionPlan) -> torch.Tensor:
    """qkv: [P, 3, H, d]."""
    q_PHd, k_PHd, v_PHd = qkv.unbind(1)
    return backend.attend(q_PHd, k_PHd, v_PHd, bounds)
