"""Chooses the gemm of each product by the number of rows, which is fixed in a graph.

Owns the lookup. ``select.py`` measures the choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from encoder_service.towers.gemm import STEPS, TORCH_GEMM, Gemm, Step


@dataclass(frozen=True)
class GemmChoices:
    """choices: for the product before each of STEPS, the gemm that was measured as fastest, by number of
    rows. Other numbers of rows get the choice of the nearest one, by ratio."""

    choices: Mapping[Step, Mapping[int, Gemm]]

    def choose(self, num_rows: int) -> dict[Step, Gemm]:
        """The gemm of each product of a block."""
        return {
            step: by_rows[min(by_rows, key=lambda rows: abs(math.log(max(num_rows, 1) / rows)))]
            for step, by_rows in self.choices.items()
        }

    @property
    def wants_pairs(self) -> bool:
        """Whether a block also keeps its qkv weight in pairs."""
        return any(gemm.wants_pairs for gemm in self.choices["rotate"].values())

    @property
    def names(self) -> dict[Step, dict[int, str]]:
        """The gemms' names by step and number of rows, for logs and results."""
        return {
            step: {rows: gemm.name for rows, gemm in by_rows.items()}
            for step, by_rows in self.choices.items()
        }


TORCH_CHOICES = GemmChoices({step: {1: TORCH_GEMM} for step in STEPS})
