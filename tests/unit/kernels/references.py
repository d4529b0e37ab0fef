"""What each kernel computes, in plain torch; and how near a kernel has to come.

Shape legend: P rows or patches, E width, H heads, d head_dim.
"""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def padded_rows(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x on the device as a view whose rows lie apart, with NaN between them."""
    wide = torch.full((x.shape[0], x.shape[1] + 24), torch.nan, dtype=x.dtype, device=device)
    view = wide[:, 8 : 8 + x.shape[1]]
    view.copy_(x)
    return view


def padding_of(view: torch.Tensor) -> torch.Tensor:
    """The columns that ``padded_rows`` put before and behind the rows."""
    num_rows, width = view.shape
    wide = view.as_strided((num_rows, width + 24), (width + 24, 1), storage_offset=0)
    return torch.cat([wide[:, :8], wide[:, 8 + width :]], 1)


def norm_float32(
    x_PE: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """LayerNorm, or RMSNorm without a bias, computed in float64, returned as float32 and not rounded to x's
    dtype."""
    width = (x_PE.shape[-1],)
    if bias is None:
        return torch.nn.functional.rms_norm(x_PE.double(), width, weight.double(), eps).float()
    normed = torch.nn.functional.layer_norm(x_PE.double(), width, weight.double(), bias.double(), eps)
    return normed.float()


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """actual against expected float32. In float32: largest error below 1e-6 of the largest value. In a
    narrower dtype: within one unit in the last place of the rounded value, or within that float32 bound
    where terms cancel."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.shape == expected.shape
    assert torch.isfinite(actual.float()).all()
    bound = 1e-6 * expected.abs().max().item()
    error = (actual.float() - expected.to(actual.dtype).float()).abs()
    if actual.dtype is not torch.float32:
        rounded = expected.to(actual.dtype)
        one_up = torch.nextafter(rounded.abs(), torch.tensor(torch.inf, dtype=actual.dtype))
        error = error - (one_up - rounded.abs()).float()
    assert error.max().item() <= bound, f"error {error.max().item():.3e} above {bound:.3e}"
