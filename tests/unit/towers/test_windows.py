"""A bucket has room for the windows of every batch that fits it."""

from __future__ import annotations

import itertools

import pytest

from encoder_service.towers.windows import most_windows, window_lengths
from encoder_service.types import Grid


@pytest.mark.parametrize("side", [1, 2, 3, 4, 7])
def test_no_batch_has_more_windows_than_its_bucket(side: int) -> None:
    sides = range(1, 3 * side + 2)
    for height, width in itertools.product(sides, sides):
        grids = [Grid(1, 2 * height, 2 * width), Grid(3, 2, 2 * width)]
        num_patches = sum(grid.num_patches for grid in grids)
        lengths = window_lengths(grids, 2, side)
        assert lengths.sum() == num_patches
        assert len(lengths) <= most_windows(num_patches, 4, 2, side)
