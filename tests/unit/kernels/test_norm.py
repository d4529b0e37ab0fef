"""Norms against float64, the residual bit for bit, rows that lie apart."""

from __future__ import annotations

import pytest
import torch

from encoder_service.towers.kernels import add_norm
from tests.unit.kernels.references import (
    DTYPES,
    EPS,
    assert_near,
    norm_float32,
    padded_rows,
    padding_of,
    randn,
)

CASES = [
    *(((7, 144), dtype) for dtype in DTYPES),
    ((1, 64), torch.float32),
    ((40, 36), torch.float32),
    ((3, 1024), torch.float32),
    ((5, 1152), torch.bfloat16),
    ((2, 4608), torch.bfloat16),
]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("lie_apart", [False, True])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_add_norm_adds_in_place_and_norms_the_rounded_sum(
    shape: tuple[int, int],
    dtype: torch.dtype,
    has_delta: bool,
    lie_apart: bool,
    has_bias: bool,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    # An offset far from zero: a variance from mean squares would lose the digits.
    x, delta = (randn(generator, *shape) * 3 + 20).to(dtype), randn(generator, *shape).to(dtype)
    weight, bias = (randn(generator, shape[1]).to(dtype) for _ in range(2))
    held, held_delta = (
        padded_rows(one, device) if lie_apart else one.to(device, copy=True) for one in (x, delta)
    )
    given_bias = bias.to(device) if has_bias else None
    h = add_norm(held, held_delta if has_delta else None, weight.to(device), given_bias, EPS)
    expected = x + delta if has_delta else x
    assert torch.equal(held.cpu(), expected)
    assert h.dtype == dtype
    assert_near(h, norm_float32(expected, weight, bias if has_bias else None, EPS))
    if lie_apart:
        assert padding_of(held).isnan().all()
