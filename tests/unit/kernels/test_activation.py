"""GELU in place and SwiGLU against float64."""

from __future__ import annotations

import pytest
import torch

from encoder_service.towers import layers
from encoder_service.towers.kernels import gelu_, swiglu
from tests.unit.kernels.references import DTYPES, assert_near, padded_rows, padding_of, randn


@pytest.mark.parametrize("lie_apart", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 77), (7, 4304), (3, 1024)])
def test_gelu_equals_float64(
    shape: tuple[int, int],
    dtype: torch.dtype,
    lie_apart: bool,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    x = (randn(generator, *shape) * 4).to(dtype)
    x[0, 0], x[0, 1] = -1e4, 1e4  # far out, where exponentials overflow
    held = padded_rows(x, device) if lie_apart else x.to(device, copy=True)
    assert gelu_(held) is held
    assert abs(held[0, 0].item()) < 1e-30
    assert held[0, 1].item() == x[0, 1].item()
    held[0, 1] = 0  # the bound is relative to the largest value: without the outlier
    expected = torch.nn.functional.gelu(x.double()).float()
    expected[0, 1] = 0
    assert_near(held, expected)
    if lie_apart:
        assert padding_of(held).isnan().all()


@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("lie_apart", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2 * 77), (7, 2 * 1368)])
def test_swiglu_equals_float64(
    shape: tuple[int, int],
    dtype: torch.dtype,
    lie_apart: bool,
    limit: float | None,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    x = (randn(generator, *shape) * 2).to(dtype)
    x[0, 0], x[0, 1] = -1e4, 1e4  # gates far out, where exponentials overflow
    x[0, shape[1] // 2 + 1] = 3.0
    held = padded_rows(x, device) if lie_apart else x.to(device)
    out = swiglu(held, limit)
    assert out.shape == (shape[0], shape[1] // 2)
    assert abs(out[0, 0].item()) < 1e-30
    if limit is None:
        assert out[0, 1].item() == torch.tensor(3e4).to(dtype).item()
        out[0, 1] = 0
    expected = layers.swiglu(x.double(), limit).float()
    if limit is None:
        expected[0, 1] = 0  # the bound is relative to the largest value: without the outlier
    assert_near(out, expected)


@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan(dtype: torch.dtype, limit: float | None, device: torch.device) -> None:
    """A clamp that took the limit for NaN would hide a broken picture or weight in rows that look real."""
    nan = torch.nan
    gates, ups = [1.0, nan, 1.0, nan, 9.0], [1.0, 1.0, nan, nan, -9.0]
    out = swiglu(torch.tensor([gates + ups], dtype=dtype, device=device), limit)
    assert out.isnan().tolist() == [[False, True, True, True, False]]
    assert gelu_(torch.tensor([gates], dtype=dtype, device=device)).isnan().tolist() == [
        [False, True, False, True, False]
    ]
