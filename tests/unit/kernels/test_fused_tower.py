"""The fused tower says what the plain tower says: stills, clips, mixed batches, padded to buckets."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from encoder_service.errors import GridMismatch
from encoder_service.towers import load_tower
from encoder_service.towers.attention import SdpaAttention
from encoder_service.towers.fused import FusedTower
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.types import Grid
from tests.parity.tower_cases import errors, fresh_seed, report

pytest.importorskip("triton")

FAMILIES = ("qwen3_vl", "qwen3_5", "kimi_k25")
BATCHES = {
    "one": [Grid(1, 4, 6)],
    "smallest": [Grid(1, 2, 2)],
    "mixed": [Grid(1, 2, 8), Grid(1, 6, 4), Grid(1, 2, 2)],
    "clips": [Grid(3, 2, 4), Grid(1, 4, 4), Grid(2, 2, 2)],
}


class Bucket(NamedTuple):
    num_patches: int
    num_sequences: int
    max_seqlen: int
    num_frames: int


@pytest.fixture(scope="module", params=FAMILIES)
def towers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> tuple[torch.nn.Module, FusedTower]:
    path = tmp_path_factory.mktemp("fused") / request.param
    make_checkpoint(path, request.param, "tiny", 3)
    plain = load_tower(path, device=device, dtype=torch.float32).tower
    return plain, FusedTower(plain, SdpaAttention())  # type: ignore[arg-type]


def rows_of(tower: torch.nn.Module, grids: list[Grid], pixels: torch.Tensor) -> torch.Tensor:
    inputs = tower.prepare(grids).to(pixels.device).with_pixels(pixels)  # type: ignore[operator]
    with torch.inference_mode():
        rows: torch.Tensor = tower(inputs)
    return rows


def pixels_for(tower: torch.nn.Module, grids: list[Grid], device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(fresh_seed())
    num_patches = sum(grid.num_patches for grid in grids)
    return torch.randn(num_patches, tower.patch_dim, generator=generator).to(device)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", BATCHES)
def test_rows_equal_the_plain_tower(
    towers: tuple[torch.nn.Module, FusedTower], batch: str, device: torch.device
) -> None:
    plain, fused = towers
    grids = BATCHES[batch]
    pixels = pixels_for(plain, grids, device)
    figures = errors(rows_of(fused, grids, pixels), rows_of(plain, grids, pixels))
    report(f"fused {fused.family} {batch}", figures)
    assert figures.relative < 1e-5


@pytest.mark.parametrize("batch", BATCHES)
def test_p29_padding_changes_no_row_and_is_never_attended(
    towers: tuple[torch.nn.Module, FusedTower], batch: str, device: torch.device
) -> None:
    plain, fused = towers
    grids = BATCHES[batch]
    pixels = pixels_for(plain, grids, device)
    expected = rows_of(plain, grids, pixels)
    bucket = Bucket(num_patches=len(pixels) + 12, num_sequences=9, max_seqlen=64, num_frames=4)
    padded = fused.pad(fused.prepare(grids), bucket).to(device)
    # NaN in the padding would spread to any row that read it.
    filler = torch.full((12, pixels.shape[1]), float("nan"), device=device)
    with torch.inference_mode():
        rows = fused(padded.with_pixels(torch.cat([pixels, filler])))
    figures = errors(rows[: len(expected)], expected)
    report(f"padded {fused.family} {batch}", figures)
    assert figures.relative < 1e-5


def test_p31_an_item_is_the_same_alone_and_in_a_batch(
    towers: tuple[torch.nn.Module, FusedTower], device: torch.device
) -> None:
    _, fused = towers
    grids = BATCHES["clips"]
    pixels = pixels_for(fused, grids, device)
    together = rows_of(fused, grids, pixels).split([fused.num_rows(grid) for grid in grids])
    parts = pixels.split([grid.num_patches for grid in grids])
    for grid, part, expected in zip(grids, parts, together, strict=True):
        assert errors(rows_of(fused, [grid], part), expected).relative < 2e-6


def test_wrong_grids_are_refused(towers: tuple[torch.nn.Module, FusedTower]) -> None:
    _, fused = towers
    for grid in (Grid(1, 3, 4), Grid(0, 2, 2), Grid(1, 2, 40_000)):
        with pytest.raises(GridMismatch):
            fused.prepare([grid])
    with pytest.raises(GridMismatch, match="0 items"):
        fused.prepare([])
