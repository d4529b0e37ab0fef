"""Position taps against torch's own interpolation, merge order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import interpolate

from encoder_service.towers.layers import interpolate_positions
from encoder_service.towers.positions import (
    cubic_taps,
    grid_taps,
    linear_taps,
    merge_order,
    raster_coordinates,
)

SIDES = st.integers(1, 40)
TABLE_SIDES = st.integers(1, 24)


RESIZES = {
    "bicubic": (cubic_taps, {"mode": "bicubic", "align_corners": False}),
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


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_merge_order_holds_each_patch_once_and_blocks_together(rows: int, columns: int, merge: int) -> None:
    height, width = rows * merge, columns * merge
    order = merge_order(height, width, merge)
    assert sorted(order.tolist()) == list(range(height * width))
    row, column = raster_coordinates(height, width)
    block = (row // merge * columns + column // merge)[order].view(-1, merge * merge)
    assert torch.equal(block, torch.arange(rows * columns)[:, None].expand_as(block))


def test_positions_of_a_bfloat16_table_are_summed_in_float32() -> None:
    """Bicubic weights alternate in sign: rounded to the table's dtype, they would no longer sum to one."""
    table = torch.randn(64 * 64, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    index, weight = grid_taps(cubic_taps(38, 64), cubic_taps(26, 64), 64)
    found = interpolate_positions(table, index, weight)
    expected = gather(table.double().view(64, 64, 32), index, weight.double())
    assert found.dtype == torch.float32
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-6
