"""Metadata of a packed batch for the fused path: one row of five numbers per item.

Owns the record, its construction from grids, and its padding to a bucket. The device expands the rows to
per-patch data (kernels/expand.py), so that a step's host work and transfer grow with the number of items, not
of patches.

Shape legend: I items, S attention sequences, P patches, R rows, F frames averaged into one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from encoder_service.errors import GridMismatch
from encoder_service.towers.tower import BatchInputs
from encoder_service.types import Grid

# Patches are numbered in int32.
MAX_BATCH_PATCHES = 2**31 - 1
# Columns of the item table: first patch, first position after merging over frames, then the grid.
ITEM_COLUMNS = ("first_patch", "first_merged", "t", "h", "w")
NUM_COLUMNS = len(ITEM_COLUMNS)
# Number of int32 entries in 16 bytes, the alignment that kernels are compiled for.
ALIGNED_ENTRIES = 4


class BucketShape(Protocol):
    """The static shape of a bucket, for example ``scheduler.buckets.Bucket``."""

    @property
    def num_patches(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def max_seqlen(self) -> int: ...
    @property
    def num_frames(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class FusedInputs(BatchInputs):
    """Metadata of one packed batch, from which the device computes everything else.

    table: int32, everything that the device reads besides the pixels, in one tensor for one transfer: the
    sequence bounds (``cu_seqlens``), then the items (``items``). num_slots: S. seqlens: the real lengths, on
    the host. max_seqlen: their maximum, or the bucket's bound. num_patches, num_rows, num_frames: P, R and F
    of the batch, or of the bucket after padding; F is 1 if rows do not average over frames.
    pixel_values: [P, patch_dim], or None until ``with_pixels``.
    """

    table: torch.Tensor
    num_slots: int
    seqlens: tuple[int, ...]
    max_seqlen: int
    num_patches: int
    num_rows: int
    num_frames: int
    pixel_values: torch.Tensor | None = None

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 [S + 1], a view of the table. Padded slots repeat the last real bound."""
        return self.table[: self.num_slots + 1]

    @property
    def items(self) -> torch.Tensor:
        """int32 [I, 5], a view of the table: the ITEM_COLUMNS of each item, in the batch's order.

        An item's patches begin at first_patch. If rows average over frames, its h * w merged positions,
        merge^2 per row in merge order, begin at first_merged. Padded slots point to the batch's end and have
        no frames: (patches, merged positions, 0, 1, 1).
        """
        return self.table[items_start(self.num_slots) :].view(-1, NUM_COLUMNS)


class FusedInputBuilder:
    """Builds and pads FusedInputs for one tower. Thread-safe.

    check_grid: the tower's own check, which raises GridMismatch. merges_time: whether rows average over an
    item's frames and attention spans them.
    """

    def __init__(self, check_grid: Callable[[Grid], None], *, merge_size: int, merges_time: bool) -> None:
        self._check_tower = check_grid
        self.merge_size = merge_size
        self.merges_time = merges_time

    def check_grid(self, grid: Grid) -> None:
        """Raises GridMismatch for a grid that the tower or the rotary table does not support."""
        self._check_tower(grid)

    def prepare(self, grids: Sequence[Grid]) -> FusedInputs:
        """Item table and sequence bounds of a packed batch, items in the given order. Raises GridMismatch."""
        if not grids:
            raise GridMismatch("the batch has 0 items, needs at least 1", found=0)
        for grid in grids:
            self.check_grid(grid)
        grids_I3 = np.array(grids, np.int64)
        frames, height, width = grids_I3.T
        frame_size = height * width
        patches = frames * frame_size
        # The number of positions after merging over frames, and the length of each attention sequence.
        merged = frame_size if self.merges_time else patches
        seqlens = patches if self.merges_time else np.repeat(frame_size, frames)
        num_patches, num_items, num_slots = int(patches.sum()), len(grids), len(seqlens)
        if num_patches > MAX_BATCH_PATCHES:
            raise GridMismatch(
                f"the batch has {num_patches} patches, at most {MAX_BATCH_PATCHES} can be numbered",
                found=num_patches,
                limit=MAX_BATCH_PATCHES,
            )
        start = items_start(num_slots)
        table = np.empty(start + num_items * NUM_COLUMNS, np.int32)
        table[0] = 0
        table[1 : num_slots + 1] = seqlens.cumsum()
        table[num_slots + 1 : start] = num_patches
        items = table[start:].reshape(-1, NUM_COLUMNS)
        items[:, 0] = patches.cumsum() - patches
        items[:, 1] = merged.cumsum() - merged
        items[:, 2:] = grids_I3
        return FusedInputs(
            table=torch.from_numpy(table),
            num_slots=num_slots,
            seqlens=tuple(seqlens.tolist()),
            max_seqlen=int(seqlens.max()),
            num_patches=num_patches,
            num_rows=int(merged.sum()) // self.merge_size**2,
            num_frames=int(frames.max()) if self.merges_time else 1,
        )

    def pad(self, inputs: FusedInputs, bucket: BucketShape) -> FusedInputs:
        """The batch in a bucket's static shapes, on the host. Padding patches belong to no sequence and to no
        row that is returned. The bucket has one merged position per patch, which images need; clips leave
        some unused. The batch must fit the bucket."""
        num_patches, num_sequences = inputs.num_patches, len(inputs.seqlens)
        assert num_patches <= bucket.num_patches
        assert num_sequences <= bucket.num_sequences
        assert inputs.max_seqlen <= bucket.max_seqlen
        assert inputs.num_frames <= bucket.num_frames
        unpadded = inputs.table.numpy()
        unpadded_items = unpadded[items_start(inputs.num_slots) :]
        start = items_start(bucket.num_sequences)
        # There are never more items than sequences.
        table = np.empty(start + bucket.num_sequences * NUM_COLUMNS, np.int32)
        table[: num_sequences + 1] = unpadded[: num_sequences + 1]
        table[num_sequences + 1 : start] = num_patches
        table[start : start + len(unpadded_items)] = unpadded_items
        unused = table[start + len(unpadded_items) :].reshape(-1, NUM_COLUMNS)
        unused[:] = (num_patches, inputs.num_rows * self.merge_size**2, 0, 1, 1)
        return FusedInputs(
            table=torch.from_numpy(table),
            num_slots=bucket.num_sequences,
            seqlens=inputs.seqlens,
            max_seqlen=bucket.max_seqlen,
            num_patches=bucket.num_patches,
            num_rows=bucket.num_patches // self.merge_size**2,
            num_frames=bucket.num_frames,
        )


def items_start(num_slots: int) -> int:
    """Index in the table at which the items begin: after the bounds of num_slots sequence slots, aligned."""
    return -(-(num_slots + 1) // ALIGNED_ENTRIES) * ALIGNED_ENTRIES
