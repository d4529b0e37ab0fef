"""The gemm of each product by the number of rows, which a graph fixes.

Owns the lookup. ``select.py`` measures the choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from encoder_service.towers.gemm import TORCH_GEMM, Gemm


@dataclass(frozen=True)
class PerRows:
    """The fastest gemm by number of rows, as measured; other numbers take that of the nearest one, by
    ratio."""

    choices: Mapping[int, Gemm]

    def choose(self, num_rows: int) -> Gemm:
        if not num_rows:
            return TORCH_GEMM
        return self.choices[min(self.choices, key=lambda rows: abs(math.log(num_rows / rows)))]


class BlockGemms(NamedTuple):
    """The gemm of each product of a block at one number of rows: rotate serves qkv, gelu fc1, add_attention
    proj, add_mlp fc2."""

    rotate: Gemm
    gelu: Gemm
    add_attention: Gemm
    add_mlp: Gemm


@dataclass(frozen=True)
class GemmChoices:
    """The gemms of a block by number of rows, in the order of STEPS; see BlockGemms."""

    rotate: PerRows
    gelu: PerRows
    add_attention: PerRows
    add_mlp: PerRows

    def choose(self, num_rows: int) -> BlockGemms:
        return BlockGemms(*(per_rows.choose(num_rows) for per_rows in vars(self).values()))

    @property
    def wants_pairs(self) -> bool:
        """Whether a block keeps its qkv weight in pairs as well."""
        return any(gemm.wants_pairs for gemm in self.rotate.choices.values())

    @property
    def names(self) -> dict[str, dict[int, str]]:
        """By step and number of rows, for logs and results."""
        return {
            step: {rows: gemm.name for rows, gemm in per_rows.choices.items()}
            for step, per_rows in vars(self).items()
        }


TORCH_CHOICES = GemmChoices(*(PerRows({1: TORCH_GEMM}) for _ in range(4)))
