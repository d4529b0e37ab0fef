"""Rotary tables and the half-split permutation against complex rotation of adjacent pairs."""

from __future__ import annotations

import torch

from encoder_service.towers.rope import inverse_frequencies, permute_pairs, rotary_tables, rotate

NUM_HEADS, HEAD_DIM = 3, 24
ROWS = torch.tensor([0, 0, 1, 5, 511])
COLUMNS = torch.tensor([0, 3, 1, 2, 300])


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_half_split_rotation_of_permuted_rows_equals_complex_rotation_of_adjacent_pairs() -> None:
    """MoonViT as published: pair 2j turns by the column's j-th frequency, pair 2j + 1 by the row's."""
    frequencies = inverse_frequencies(HEAD_DIM, 10_000.0)
    angles = torch.stack([COLUMNS[:, None] * frequencies, ROWS[:, None] * frequencies], dim=-1).flatten(1)
    turns = torch.polar(torch.ones_like(angles), angles)

    width = NUM_HEADS * HEAD_DIM
    q_weight, k_weight, x = randn(width, width), randn(2, width, width)[1], randn(5, width)
    q, k = (
        torch.view_as_real(
            torch.view_as_complex((x @ weight.T).view(5, NUM_HEADS, -1, 2)) * turns[:, None]
        ).flatten(2)
        for weight in (q_weight, k_weight)
    )
    expected = torch.einsum("phd,qhd->hpq", q, k)

    cos, sin = rotary_tables(ROWS, COLUMNS, HEAD_DIM, 10_000.0, "interleaved")
    q, k = (
        rotate((x @ permute_pairs(weight, NUM_HEADS).T).view(5, NUM_HEADS, HEAD_DIM), cos, sin)
        for weight in (q_weight, k_weight)
    )
    found = torch.einsum("phd,qhd->hpq", q, k)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
