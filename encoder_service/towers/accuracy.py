"""How far rows of one tower stand from another's: cosine of each row, relative error of all.

Owns the figures that tests and benches report for a precision. What is near enough is theirs to say.

Shape legend: R rows, D language-model width, L deepstack levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from encoder_service.towers.tower import Tower
from encoder_service.types import Grid


@dataclass(frozen=True)
class RowAccuracy:
    """cosine_mean, cosine_min: over rows, each deepstack level of a row by itself. relative_error: norm of
    the difference over norm of what was expected, all rows together. All are NaN when any value found is."""

    cosine_mean: float
    cosine_min: float
    relative_error: float


def compare_rows(found: torch.Tensor, expected: torch.Tensor, num_deepstack_levels: int = 0) -> RowAccuracy:
    """Rows [R, D * (1 + L)] found against those expected, of any float dtypes and devices, in float64."""
    assert found.shape == expected.shape, f"{list(found.shape)} against {list(expected.shape)}"
    parts = (found.shape[0] * (1 + num_deepstack_levels), -1)
    found, expected = (rows.detach().cpu().double().reshape(parts) for rows in (found, expected))
    # Not torch's cosine_similarity, whose floor under the norms would pass for a wrong direction.
    norms = found.norm(dim=1) * expected.norm(dim=1)
    cosine = torch.where(norms == 0, (found == expected).all(1).double(), (found * expected).sum(1) / norms)
    return RowAccuracy(
        cosine_mean=float(cosine.mean()),
        cosine_min=float(cosine.min()),
        relative_error=float((found - expected).norm() / expected.norm()),
    )


def compare_towers(
    tower: Tower, references: Mapping[str, Tower], grids: Sequence[Grid], pixels: torch.Tensor
) -> dict[str, RowAccuracy]:
    """One batch through a tower and through each reference, by the reference's name: ``bfloat16`` and
    ``float32`` say what a precision costs, and what it costs in all. pixels: [P, patch_dim]."""
    found = rows_of(tower, grids, pixels)
    return {
        name: compare_rows(found, rows_of(reference, grids, pixels), tower.num_deepstack_levels)
        for name, reference in references.items()
    }


@torch.inference_mode()
def rows_of(tower: Tower, grids: Sequence[Grid], pixels: torch.Tensor) -> torch.Tensor:
    """Rows of a batch, eager, on the tower's device."""
    inputs = tower.prepare(grids).to(tower.device).with_pixels(pixels.to(tower.device))
    rows: torch.Tensor = tower(inputs)
    return rows
