"""Per-patch tables made on the host, with bucket padding: the oracle of the expansion on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from encoder_service.towers.moonvit import frame_rows, merge_tables
from encoder_service.towers.positions import merge_order, raster_coordinates
from encoder_service.types import Grid


def host_coords(grids: Sequence[Grid], num_patches: int, merge_size: int, merges_time: bool) -> torch.Tensor:
    """int32 [num_patches, 4], row, column, height, width of each patch's frame; padding is (0, 0, 1, 1)."""
    frames = []
    for t, height, width in grids:
        row, column = raster_coordinates(height, width)
        if not merges_time:
            order = merge_order(height, width, merge_size)
            row, column = row[order], column[order]
        sides = torch.tensor([height, width]).expand(height * width, 2)
        frames += [torch.cat([row[:, None], column[:, None], sides], dim=1)] * t
    real = torch.cat(frames)
    padding = torch.tensor([0, 0, 1, 1]).expand(num_patches - len(real), 4)
    return torch.cat([real, padding]).int()


def host_frame_index(grids: Sequence[Grid], num_patches: int) -> torch.Tensor:
    """int32 [num_patches], 0 for stills and padding, f + 1 in frame f of a clip."""
    real = torch.cat([frame_rows(grid) for grid in grids])
    return pad(real, (0, num_patches - len(real))).int()


def host_merge(
    grids: Sequence[Grid], num_merged: int, num_frames: int, merge_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """merge_index int32 and merge_weight float32, [num_merged, num_frames]. Frames beyond the batch's repeat
    a position's first, padding names patch 0, both with weight zero."""
    real_index, real_weight = merge_tables(grids, merge_size)
    used, frames = real_index.shape
    index = torch.zeros(num_merged, num_frames, dtype=torch.int32)
    weight = torch.zeros(num_merged, num_frames)
    index[:used] = real_index[:, :1]
    index[:used, :frames] = real_index
    weight[:used, :frames] = real_weight
    return index, weight


def grids_of(items: torch.Tensor) -> list[Grid]:
    """The grids of an item table, without padded slots."""
    return [Grid(t, h, w) for _, _, t, h, w in items.tolist() if t]
