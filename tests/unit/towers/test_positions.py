"""Position taps against torch's own interpolation, merge order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import interpolate

from encoder_service.towers.positions import (
    centred_linear_taps,
    cubic_taps,
    grid_taps,
    linear_taps,
)

SIDES = st.integers(1, 40)
TABLE_SIDES = st.integers(1, 24)


RESIZES = {
    "bicubic": (cubic_taps, {"mode": "bicubic", "align_corners": False}),
    "bilinear centred": (centred_linear_taps, {"mode": "bilinear", "align_corners": False}),
    "bilinear": (linear_taps, {"mode": "bilinear", "align_corners": True}),
}


def gather(table_HWE: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (table_HWE.flatten(0, 1)[index] * weight[:, :, None]).sum(1)


@pytest.mark.parametrize("resize", RESIZES)
@settings(deadline=None, max_examples=60)
@given(SIDES, SIDES, TABLE_SIDES, TABLE_SIDES)
def test_taps_equal_torchs_interpolation_on_any_sides(
    resize: str, height: int, width: int, table_height: int, table_width: int
) -> None:
    taps, mode = RESIZES[resize]
    table = torch.randn(table_height, table_width, 3, generator=torch.Generator().manual_seed(0))
    index, weight = grid_taps(taps(height, table_height), taps(width, table_width), table_width)
    resized = interpolate(table.permute(2, 0, 1)[None], size=(height, width), **mode)  # type: ignore[arg-type]
    expected = resized[0].flatten(1).T
    torch.testing.assert_close(gather(table, index, weight), expected, atol=2e-5, rtol=1e-5)
