"""Host tables of a frame (coordinates, position-table taps, merge order), and frames packed into a batch.

Owns the tables that depend only on a frame's height and width, the check of a grid's sides, and the
concatenation of frame tables. ``rope.py`` computes the rotary angles. Each tower's ``prepare`` decides which
frames attend to each other and how they are merged.

Shape legend: N patches of one frame, K position taps, T taps per axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from encoder_service.errors import GridMismatch
from encoder_service.towers.tower import TowerInputs
from encoder_service.types import Grid

# Longest side of a grid, in patches.
MAX_SIDE = 32_768

# Keys' cubic convolution constant, with the value that torch.nn.functional.interpolate(mode="bicubic") uses.
BICUBIC_A = -0.75


class FrameTables(NamedTuple):
    """Host tables of one h by w frame, in the tower's patch order.

    position_index int64 [N, K], position_weight float32 [N, K]; rope_cos, rope_sin float32 [N, head_dim].
    """

    position_index: torch.Tensor
    position_weight: torch.Tensor
    rope_cos: torch.Tensor
    rope_sin: torch.Tensor


def raster_coordinates(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each patch in raster order, int64 [N] each."""
    rows = torch.arange(height).repeat_interleave(width)
    columns = torch.arange(width).repeat(height)
    return rows, columns


def merge_order(height: int, width: int, merge_size: int) -> torch.Tensor:
    """Raster index of the patch at each position of the merge order, int64 [N]: blocks of merge_size squared
    patches in raster order, and patches within a block likewise."""
    raster = torch.arange(height * width)
    blocks = raster.view(height // merge_size, merge_size, width // merge_size, merge_size)
    return blocks.transpose(1, 2).flatten()


def linear_taps(size: int, table_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps and weights, int64 and float32 [size, 2], that stretch a table over ``size`` points with both ends
    fixed, as interpolate(mode="bilinear", align_corners=True) does along one axis."""
    return _two_taps(
        torch.arange(size, dtype=torch.float32) * (table_size - 1) / max(size - 1, 1), table_size
    )


def centred_linear_taps(size: int, table_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps and weights, int64 and float32 [size, 2], as in interpolate(mode="bilinear", align_corners=False)
    along one axis: half-pixel centres, edges repeated."""
    return _two_taps(half_pixel_centres(size, table_size), table_size)


def _two_taps(source: torch.Tensor, table_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    floor = source.floor()
    weight = source - floor
    taps = torch.stack([floor, floor + 1], dim=-1).long()
    return taps.clamp_(0, table_size - 1), torch.stack([1 - weight, weight], dim=-1)


def half_pixel_centres(size: int, table_size: int) -> torch.Tensor:
    """float32 [size]: where the centres of ``size`` points are on an axis of table_size entries."""
    return (torch.arange(size, dtype=torch.float32) + 0.5) * table_size / size - 0.5


def cubic_taps(size: int, table_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps and weights, int64 and float32 [size, 4], as in interpolate(mode="bicubic", align_corners=False)
    along one axis: half-pixel centres, edges repeated, Keys' kernel (IEEE ASSP 29, 1981) with a = -0.75."""
    source = half_pixel_centres(size, table_size)
    floor = source.floor()
    offsets = torch.arange(-1, 3)
    distance = ((source - floor)[:, None] - offsets).abs()
    a = BICUBIC_A
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    taps = (floor.long()[:, None] + offsets).clamp_(0, table_size - 1)
    return taps, torch.where(distance <= 1, near, far)


def grid_taps(
    row_taps: tuple[torch.Tensor, torch.Tensor],
    column_taps: tuple[torch.Tensor, torch.Tensor],
    table_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines both axes: position_index int64 and position_weight float32, both [N, T * T], in raster order.

    row_taps, column_taps: indices and weights [height, T] and [width, T] into a table whose rows have
    ``table_width`` entries.
    """
    (row_index, row_weight), (column_index, column_weight) = row_taps, column_taps
    # [height, width, T, T], then patches by taps.
    index = row_index[:, None, :, None] * table_width + column_index[None, :, None, :]
    weight = row_weight[:, None, :, None] * column_weight[None, :, None, :]
    num_patches = row_index.shape[0] * column_index.shape[0]
    return index.reshape(num_patches, -1), weight.reshape(num_patches, -1)


def check_sides(grid: Grid, merge_size: int) -> None:
    """Raises GridMismatch unless all sides are positive, and h and w are multiples of merge_size, up to
    MAX_SIDE."""
    if min(grid) < 1:
        raise GridMismatch(f"grid {list(grid)} has a side of {min(grid)}, needs at least 1", found=min(grid))
    for name, side in (("height", grid.h), ("width", grid.w)):
        if side % merge_size:
            raise GridMismatch(
                f"grid {list(grid)} has {name} {side}, needs a multiple of the merge size {merge_size}",
                found=side,
                merge_size=merge_size,
            )
    if (longest := max(grid.h, grid.w)) > MAX_SIDE:
        raise GridMismatch(
            f"grid {list(grid)} has a side of {longest} patches, the longest is {MAX_SIDE}",
            found=longest,
            limit=MAX_SIDE,
        )


def pack_frames(frames: Sequence[FrameTables], seqlens: Sequence[int]) -> TowerInputs:
    """Packs frames, in the given order, into one batch with attention sequences of ``seqlens`` patches.

    Raises GridMismatch for a batch without items.
    """
    if not frames:
        raise GridMismatch("the batch has 0 items, needs at least 1", found=0)
    position_index, position_weight, rope_cos, rope_sin = map(torch.cat, zip(*frames, strict=True))
    return TowerInputs(
        position_index,
        position_weight,
        rope_cos,
        rope_sin,
        cu_seqlens=torch.tensor(list(accumulate(seqlens, initial=0)), dtype=torch.int32),
        seqlens=tuple(seqlens),
        max_seqlen=max(seqlens),
    )
