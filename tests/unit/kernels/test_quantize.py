"""fp8 rows: scale, values and error of every kernel that writes them."""

from __future__ import annotations

import pytest
import torch

from encoder_service.towers.kernels import (
    add_norm_quantize,
    gelu_quantize,
    layer_norm_quantize,
    quantize_rows,
)
from tests.unit.kernels.references import DTYPES, EPS, norm_float32, padded_rows, randn

# A normal e4m3 number keeps three bits of its mantissa.
HALF_STEP = 2.0**-4


def assert_quantized(result: tuple[torch.Tensor, torch.Tensor], expected: torch.Tensor) -> None:
    """values * scale against the row expected in float32: the scale within 1e-6; every value at one of the
    nearest e4m3 numbers, so within half a step, or half the smallest step near zero, give or take 1e-6 of the
    largest; that one at 448."""
    values, scale = result[0].cpu(), result[1].cpu()
    assert values.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert scale.shape == (expected.shape[0], 1)
    largest = expected.abs().amax(dim=1, keepdim=True)
    assert ((scale - largest / 448).abs() <= 1e-6 * scale).all()
    assert (values.float().abs().amax(dim=1) == 448).all()
    scaled = expected / scale
    bound = torch.maximum(scaled.abs() * HALF_STEP, torch.tensor(2.0**-10))
    assert ((values.float() - scaled).abs() <= bound + 448e-6).all()
    # Rounded to nearest, not merely near: what differs from torch's rounding is as near, give or take a last
    # bit before the cast. A row whose scale is a round number has many ties.
    nearest = scaled.to(torch.float8_e4m3fn).float()
    assert ((values.float() - scaled).abs() <= (nearest - scaled).abs() + 2 * 448e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 64), (3, 1152), (2, 4304)])
def test_quantize_rows(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    x = randn(generator, *shape).to(dtype)
    x[0] *= 1000  # every row has a scale of its own
    held = x.to(device, copy=True)
    assert_quantized(quantize_rows(held), x.float())
    assert torch.equal(held.cpu(), x)


def test_a_row_of_zeros_has_a_scale(device: torch.device) -> None:
    values, scale = quantize_rows(torch.zeros(2, 144, device=device))
    assert (values.float() == 0).all()
    assert (scale > 0).all()


def test_a_nan_stays_a_nan(device: torch.device, generator: torch.Generator) -> None:
    """A finite value in its place would pass for a result."""
    x = randn(generator, 3, 144).bfloat16()
    x[1, 7] = torch.nan
    values, scale = (result.cpu() for result in quantize_rows(x.to(device)))
    rows = values.float() * scale
    assert rows[1, 7].isnan()
    assert torch.isfinite(rows[[0, 2]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 144), (3, 1152)])
def test_norms_quantize(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    x, delta = (randn(generator, *shape).to(dtype) for _ in range(2))
    weight, bias = (randn(generator, shape[1]).to(dtype) for _ in range(2))
    held = x.to(device, copy=True)
    on_device = weight.to(device), bias.to(device)
    assert_quantized(layer_norm_quantize(held, *on_device, EPS), norm_float32(x, weight, bias, EPS))
    assert torch.equal(held.cpu(), x)
    result = add_norm_quantize(held, delta.to(device), *on_device, EPS)
    assert torch.equal(held.cpu(), x + delta)
    assert_quantized(result, norm_float32(x + delta, weight, bias, EPS))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_quantizes(
    dtype: torch.dtype, approximate: str, device: torch.device, generator: torch.Generator
) -> None:
    x = (randn(generator, 3, 4304) * 2).to(dtype)
    expected = torch.nn.functional.gelu(x.double(), approximate=approximate).float()
    held = padded_rows(x, device)
    result = gelu_quantize(held, "tanh" if approximate == "tanh" else "none")
    assert_quantized(result, expected)
    assert torch.equal(held.cpu(), x)
