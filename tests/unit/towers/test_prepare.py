"""Host tables of a batch, refused grids, and a forward that reads no value on the host."""

from __future__ import annotations

import pytest
import torch

from encoder_service.checkpoints.synthetic import config_for
from encoder_service.errors import GridMismatch
from encoder_service.towers.registry import parse_config
from encoder_service.towers.tower import Tower
from encoder_service.types import Grid
from tests.parity.tower_cases import random_pixels

MIXED = [Grid(1, 4, 2), Grid(3, 2, 4), Grid(2, 2, 2)]


def tower_of(family: str) -> Tower:
    """A tiny tower with small random values."""
    parsed_family, config = parse_config(config_for(family, "tiny"))
    tower = parsed_family.build(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in tower.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return tower.requires_grad_(False).eval()


@pytest.fixture(params=["qwen3_vl", "kimi_k25"])
def tower(request: pytest.FixtureRequest) -> Tower:
    return tower_of(request.param)


def test_p33_nan_pixels_of_one_item_reach_no_other_item(tower: Tower) -> None:
    pixels = random_pixels(tower, MIXED, seed=3)
    inputs = tower.prepare(MIXED)
    clean = tower(inputs.with_pixels(pixels))
    row_bounds = [0]
    for grid in MIXED:
        row_bounds.append(row_bounds[-1] + tower.num_rows(grid))
    start = 0
    for item, grid in enumerate(MIXED):
        poisoned = pixels.clone()
        poisoned[start : start + grid.num_patches] = torch.nan
        rows = tower(inputs.with_pixels(poisoned))
        own = slice(row_bounds[item], row_bounds[item + 1])
        assert not rows[own].isfinite().any()
        others = torch.ones(len(rows), dtype=torch.bool)
        others[own] = False
        assert torch.equal(rows[others], clean[others])
        start += grid.num_patches


@pytest.mark.parametrize(
    ("grid", "figures"),
    [
        (Grid(0, 2, 2), ("0", "1")),
        (Grid(1, 0, 2), ("0", "1")),
        (Grid(1, 2, -2), ("-2", "1")),
        (Grid(1, 3, 2), ("height 3", "2")),
        (Grid(1, 2, 5), ("width 5", "2")),
    ],
)
def test_grids_that_do_not_merge_are_refused_with_both_figures(
    tower: Tower, grid: Grid, figures: tuple[str, str]
) -> None:
    for refuse in (tower.check_grid, lambda grid: tower.prepare([Grid(1, 2, 2), grid])):
        with pytest.raises(GridMismatch) as refusal:
            refuse(grid)
        assert all(figure in refusal.value.message for figure in figures)


def test_more_frames_than_the_temporal_table_and_empty_batches_are_refused() -> None:
    qwen, moonvit = tower_of("qwen3_vl"), tower_of("kimi_k25")
    with pytest.raises(GridMismatch, match="0 items"):
        qwen.prepare([])
    with pytest.raises(GridMismatch, match=r"has 5 frames, the temporal table has 4"):
        moonvit.check_grid(Grid(5, 2, 2))
    moonvit.check_grid(Grid(4, 2, 2))
    qwen.check_grid(Grid(300, 2, 2))
