"""Frames to one packed batch: the part of ``prepare`` that both towers share.

Owns the check of a grid's sides and the concatenation of frame tables. Which frames attend to each other,
and how frames merge, is each tower's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from encoder_service.errors import GridMismatch
from encoder_service.towers.positions import FrameTables
from encoder_service.towers.tower import TowerInputs
from encoder_service.types import Grid

# Bound of one tower's table cache. A 64x64 frame of 72-wide heads takes 2.5 to 3.3 MB.
TABLE_CACHE_BYTES = 256 << 20


def check_sides(grid: Grid, merge_size: int) -> None:
    """Raises GridMismatch unless all sides are positive and h and w multiples of merge_size."""
    if min(grid) < 1:
        raise GridMismatch(f"grid {list(grid)} has a side of {min(grid)}, needs at least 1", found=min(grid))
    for name, side in (("height", grid.h), ("width", grid.w)):
        if side % merge_size:
            raise GridMismatch(
                f"grid {list(grid)} has {name} {side}, needs a multiple of the merge size {merge_size}",
                found=side,
                merge_size=merge_size,
            )


def pack_frames(frames: Sequence[FrameTables], seqlens: Sequence[int]) -> TowerInputs:
    """One batch of frames in the order given, cut into attention sequences of ``seqlens`` patches.

    Raises GridMismatch for a batch without items.
    """
    if not frames:
        raise GridMismatch("the batch has 0 items, needs at least 1", found=0)
    return TowerInputs(
        position_index=torch.cat([frame.position_index for frame in frames]),
        position_weight=torch.cat([frame.position_weight for frame in frames]),
        rope_cos=torch.cat([frame.rope_cos for frame in frames]),
        rope_sin=torch.cat([frame.rope_sin for frame in frames]),
        cu_seqlens=torch.tensor(list(accumulate(seqlens, initial=0)), dtype=torch.int32),
        seqlens=tuple(seqlens),
        max_seqlen=max(seqlens),
    )
