"""Metadata of a packed batch for the fused path: what the host says so that the device can do the rest.

Owns the record, how it is built from grids, and how it is padded to a bucket. The device computes positions
and angles from it (fused.py and its kernels).

Shape legend: P patches, S attention sequences, R rows, F frames averaged into one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch

from encoder_service.errors import GridMismatch
from encoder_service.towers.moonvit import frame_rows, merge_tables
from encoder_service.towers.positions import FrameTableCache, FrameTables, merge_order, raster_coordinates
from encoder_service.types import Grid

# Longest side, in patches, that the rotary table covers.
MAX_SIDE = 32_768
COORDINATE_CACHE_BYTES = 64 << 20
PADDING_COORDINATES = (0, 0, 1, 1)


class BucketShape(Protocol):
    """What a bucket fixes; ``scheduler.buckets.Bucket`` is one."""

    @property
    def num_patches(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def max_seqlen(self) -> int: ...
    @property
    def num_frames(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class FusedInputs:
    """Metadata of one packed batch; the device computes everything else from it.

    coords: int32 [P, 4], row, column, height and width of each patch's frame; padding is (0, 0, 1, 1).
    cu_seqlens: int32 [S + 1]; padded slots repeat the last real bound. seqlens: the real lengths on the host.
    max_seqlen: their maximum, or the bucket's bound. frame_index: int32 [P], merge_index: int32
    [R * merge^2, F], merge_weight: float32 of the same shape (MoonViT only, otherwise None).
    pixel_values: [P, patch_dim], or None until ``with_pixels``.
    """

    coords: torch.Tensor
    cu_seqlens: torch.Tensor
    seqlens: tuple[int, ...]
    max_seqlen: int
    frame_index: torch.Tensor | None = None
    merge_index: torch.Tensor | None = None
    merge_weight: torch.Tensor | None = None
    pixel_values: torch.Tensor | None = None

    @property
    def num_patches(self) -> int:
        return self.coords.shape[0]

    @property
    def num_frames(self) -> int:
        """F, 1 where frames are not averaged."""
        return 1 if self.merge_index is None else self.merge_index.shape[1]

    def with_pixels(self, pixel_values: torch.Tensor) -> FusedInputs:
        """The same batch with its pixels [P, patch_dim]."""
        return dataclasses.replace(self, pixel_values=pixel_values)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by field name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device, *, non_blocking: bool = False) -> FusedInputs:
        """The same batch with every tensor on ``device``."""
        moved = {name: value.to(device, non_blocking=non_blocking) for name, value in self.tensors().items()}
        return dataclasses.replace(self, **moved)  # type: ignore[arg-type]


class FusedInputBuilder:
    """Builds and pads FusedInputs for one tower.

    check_grid: the tower's own check, raises GridMismatch. merges_time: rows average over an item's frames.
    """

    def __init__(self, check_grid: Callable[[Grid], None], *, merge_size: int, merges_time: bool) -> None:
        self._check_grid = check_grid
        self.merge_size = merge_size
        self.merges_time = merges_time
        self._coordinates = FrameTableCache(self._build_coordinates, COORDINATE_CACHE_BYTES)

    def check_grid(self, grid: Grid) -> None:
        self._check_grid(grid)
        if max(grid.h, grid.w) > MAX_SIDE:
            raise GridMismatch(
                f"grid {list(grid)} has a side of {max(grid.h, grid.w)} patches, the longest is {MAX_SIDE}",
                found=max(grid.h, grid.w),
                limit=MAX_SIDE,
            )

    def prepare(self, grids: Sequence[Grid]) -> FusedInputs:
        """Coordinates and bounds of a packed batch, items in the order given. Raises GridMismatch."""
        if not grids:
            raise GridMismatch("the batch has 0 items, needs at least 1", found=0)
        for grid in grids:
            self.check_grid(grid)
        tables = [self._coordinates.get(grid.h, grid.w) for grid in grids]
        coords = torch.cat(
            [table.position_index.repeat(grid.t, 1) for grid, table in zip(grids, tables, strict=True)]
        )
        if self.merges_time:
            seqlens = [grid.num_patches for grid in grids]
            index, weight = merge_tables(grids, tables)
            merge = {
                "frame_index": torch.cat([frame_rows(grid) for grid in grids]).to(torch.int32),
                "merge_index": index.to(torch.int32),
                "merge_weight": weight.float(),
            }
        else:
            seqlens = [grid.h * grid.w for grid in grids for _ in range(grid.t)]
            merge = {}
        return FusedInputs(
            coords=coords,
            cu_seqlens=torch.tensor(list(accumulate(seqlens, initial=0)), dtype=torch.int32),
            seqlens=tuple(seqlens),
            max_seqlen=max(seqlens),
            **merge,
        )

    def pad(self, inputs: FusedInputs, bucket: BucketShape) -> FusedInputs:
        """The batch in a bucket's static shapes, still on the host. Padding patches belong to no sequence
        and to no row that is returned. The batch must fit the bucket."""
        num_patches, num_sequences = inputs.num_patches, len(inputs.seqlens)
        assert num_patches <= bucket.num_patches
        assert num_sequences <= bucket.num_sequences
        assert inputs.max_seqlen <= bucket.max_seqlen
        extra = bucket.num_patches - num_patches
        padding = torch.tensor(PADDING_COORDINATES, dtype=torch.int32).expand(extra, 4)
        tail = inputs.cu_seqlens[-1:].expand(bucket.num_sequences - num_sequences)
        padded = dataclasses.replace(
            inputs,
            coords=torch.cat([inputs.coords, padding]),
            cu_seqlens=torch.cat([inputs.cu_seqlens, tail]),
            max_seqlen=bucket.max_seqlen,
        )
        if inputs.merge_index is None or inputs.merge_weight is None or inputs.frame_index is None:
            return padded
        assert inputs.num_frames <= bucket.num_frames
        # A merge reads its own first patch wherever it has no frame, and so does all padding: row zero.
        # The bucket has a place for every patch, which is what stills need; clips leave some unused.
        index = torch.zeros(bucket.num_patches, bucket.num_frames, dtype=torch.int32)
        weight = torch.zeros(bucket.num_patches, bucket.num_frames)
        used, frames = inputs.merge_index.shape
        index[:used] = inputs.merge_index[:, :1]
        index[:used, :frames] = inputs.merge_index
        weight[:used, :frames] = inputs.merge_weight
        return dataclasses.replace(
            padded,
            frame_index=torch.nn.functional.pad(inputs.frame_index, (0, extra)),
            merge_index=index,
            merge_weight=weight,
        )

    def _build_coordinates(self, height: int, width: int) -> FrameTables:
        """int32 [N, 4] in the order patches arrive; MoonViT's merge order beside it."""
        rows, columns = raster_coordinates(height, width)
        order = merge_order(height, width, self.merge_size)
        if not self.merges_time:
            rows, columns = rows[order], columns[order]
        sides = torch.tensor([height, width]).expand(height * width, 2)
        coords = torch.cat([rows[:, None], columns[:, None], sides], dim=1).to(torch.int32)
        empty = torch.empty(0)
        return FrameTables(coords, empty, empty, empty, order if self.merges_time else None)
