"""The plain attention backend against masked softmax, sequence by sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.towers.attention import SdpaAttention, sdpa
from tests.unit.towers.attention_cases import bounds_of, packed


def masked_softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqlens: tuple[int, ...]
) -> torch.Tensor:
    """[P, H, d] through one P by P matrix in which other sequences are masked."""
    sequence = torch.repeat_interleave(torch.arange(len(seqlens)), torch.tensor(seqlens))
    scores = torch.einsum("phd,qhd->hpq", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(sequence[:, None] != sequence[None, :], -torch.inf)
    return torch.einsum("hpq,qhd->phd", scores.softmax(-1), v)


@pytest.mark.parametrize("one_by_one", [False, True])
@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([1, 4, 4, 6, 30]), min_size=1, max_size=8))
def test_sequences_attend_within_themselves_only(one_by_one: bool, lengths: list[int]) -> None:
    q, k, v = packed(sum(lengths), 2, 8)
    found = SdpaAttention(one_by_one=one_by_one).attend(q, k, v, bounds_of(lengths))
    torch.testing.assert_close(found, masked_softmax(q, k, v, tuple(lengths)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("one_by_one", "calls"),
    [(False, [(3, 2, 8, 8), (1, 2, 6, 8)]), (True, [(1, 2, 8, 8)] * 3 + [(1, 2, 6, 8)])],
)
def test_a_run_of_equal_lengths_is_one_call_or_one_for_each(
    one_by_one: bool, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def counted(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(tuple(q.shape))
        return original(q, *rest)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", counted)
    SdpaAttention(one_by_one=one_by_one).attend(*packed(30, 2, 8), bounds_of((8, 8, 8, 6)))
    assert shapes == calls


def test_p29_padding_is_attended_by_none_and_stays_finite() -> None:
    q, k, v = packed(16, 2, 8)
    alone = SdpaAttention().attend(q[:10], k[:10], v[:10], bounds_of((6, 4)))
    poisoned = q.clone(), k.clone(), v.clone()
    for x in poisoned:
        x[10:] = torch.nan
    found = SdpaAttention().attend(*poisoned, bounds_of((6, 4)))
    assert found.shape == q.shape
    torch.testing.assert_close(found[:10], alone)
    assert torch.equal(found[10:], torch.zeros_like(found[10:]))
