"""Chooses the attention backend of a batch by the batch's shape.

Owns the lookup. ``select.py`` measures the choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from encoder_service.towers.attention.backend import AttentionBackend


@dataclass(frozen=True)
class PerShapeAttention:
    """choices: the backend that was measured as best, by (number of patches, max_seqlen); at least one. A
    shape that was not measured gets the choice of the nearest one, by the ratios of both numbers."""

    choices: Mapping[tuple[int, int], AttentionBackend]

    def choose(self, num_patches: int, max_seqlen: int) -> AttentionBackend:
        def distance(shape: tuple[int, int]) -> float:
            patches, seqlen = shape
            return abs(math.log(num_patches / patches)) + 2 * abs(math.log(max_seqlen / seqlen))

        return self.choices[min(self.choices, key=distance)]
