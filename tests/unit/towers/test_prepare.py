"""Host tables of a batch, refused grids, and a forward that reads no value on the host."""

from __future__ import annotations

import pytest
import torch

from encoder_service.errors import GridMismatch
from encoder_service.towers.config import MoonViTConfig, QwenVisionConfig
from encoder_service.towers.moonvit import MoonViTTower
from encoder_service.towers.qwen3_vl import Qwen3VLTower
from encoder_service.towers.tower import Tower
from encoder_service.types import Grid

QWEN = QwenVisionConfig(
    depth=2,
    hidden_size=16,
    num_heads=2,
    intermediate_size=24,
    patch_size=4,
    temporal_patch_size=2,
    in_channels=3,
    merge_size=2,
    position_side=6,
    out_width=12,
    deepstack_visual_indexes=(0, 1),
)
MOONVIT = MoonViTConfig(
    depth=2,
    hidden_size=16,
    num_heads=2,
    intermediate_size=24,
    patch_size=4,
    merge_size=2,
    position_height=6,
    position_width=4,
    max_frames=4,
    out_width=12,
)
MIXED = [Grid(1, 4, 2), Grid(3, 2, 4), Grid(2, 2, 2)]


def filled(tower: Tower) -> Tower:
    """The tower with small random values."""
    generator = torch.Generator().manual_seed(0)
    for parameter in tower.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return tower.requires_grad_(False).eval()


def qwen() -> Tower:
    return filled(Qwen3VLTower(QWEN))


def moonvit() -> Tower:
    return filled(MoonViTTower(MOONVIT))


TOWERS = pytest.mark.parametrize("make", [qwen, moonvit])


def random_pixels(tower: Tower, grids: list[Grid]) -> torch.Tensor:
    num_patches = sum(grid.num_patches for grid in grids)
    return torch.randn(num_patches, tower.patch_dim, generator=torch.Generator().manual_seed(3))


def test_qwen_attends_per_frame_and_moonvit_over_the_clip() -> None:
    assert qwen().prepare(MIXED).seqlens == (8, 8, 8, 8, 4, 4)
    assert moonvit().prepare(MIXED).seqlens == (8, 24, 8)


@TOWERS
def test_p33_nan_pixels_of_one_item_reach_no_other_item(make: type[Tower]) -> None:
    tower = make()
    pixels = random_pixels(tower, MIXED)
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


@TOWERS
def test_forward_reads_no_value_on_the_host(make: type[Tower]) -> None:
    """On the meta device there are no values: .item(), .tolist() and data-dependent shapes raise."""
    tower = make()
    inputs = tower.prepare(MIXED).with_pixels(random_pixels(tower, MIXED))
    expected = tower(inputs).shape
    meta = torch.device("meta")
    rows = tower.to(meta)(inputs.to(meta))
    assert rows.is_meta
    assert rows.shape == expected == (sum(tower.num_rows(grid) for grid in MIXED), tower.width)


@TOWERS
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
    make: type[Tower], grid: Grid, figures: tuple[str, str]
) -> None:
    for refuse in (make().check_grid, lambda grid: make().prepare([Grid(1, 2, 2), grid])):
        with pytest.raises(GridMismatch) as refusal:
            refuse(grid)
        assert all(figure in refusal.value.message for figure in figures)


def test_more_frames_than_the_temporal_table_and_empty_batches_are_refused() -> None:
    with pytest.raises(GridMismatch, match="0 items"):
        qwen().prepare([])
    with pytest.raises(GridMismatch, match=r"has 5 frames, the temporal table has 4"):
        moonvit().check_grid(Grid(5, 2, 2))
    moonvit().check_grid(Grid(4, 2, 2))
    qwen().check_grid(Grid(300, 2, 2))
