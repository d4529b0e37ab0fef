"""Metadata of a packed batch for the fused path: one row of five numbers per item.

Owns the record, its construction from grids, and its padding to a bucket. The device expands the rows to
per-patch data (kernels/expand.py), so that a step's host work and transfer grow with the number of items and
of attention sequences, not of patches.

Shape legend: I items, S attention sequences, W windows, P patches, R rows, F frames averaged into one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from encoder_service.errors import GridMismatch
from encoder_service.towers.attention.backend import AttentionPlan
from encoder_service.towers.tower import BatchInputs
from encoder_service.towers.windows import most_windows, window_lengths
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
    sequence bounds (``cu_seqlens``), those of windows, then the items (``items``). num_slots: S. seqlens: the
    real lengths, on the host. max_seqlen: their maximum, or the bucket's bound. num_patches, num_rows,
    num_frames: P, R and F of the batch, or of the bucket after padding; F is 1 if rows do not average over
    frames. num_window_slots: W, 0 without windows. window_seqlens, max_window_seqlen: as seqlens and
    max_seqlen; the bound is that of a whole window. pixel_values: [P, patch_dim], or None until
    ``with_pixels``.
    """

    table: torch.Tensor
    num_slots: int
    seqlens: tuple[int, ...]
    max_seqlen: int
    num_patches: int
    num_rows: int
    num_frames: int
    num_window_slots: int = 0
    window_seqlens: tuple[int, ...] = ()
    max_window_seqlen: int = 0
    pixel_values: torch.Tensor | None = None

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 [S + 1], a view of the table. Padded slots repeat the last real bound."""
        return self.table[: self.num_slots + 1]

    @property
    def windows(self) -> AttentionPlan:
        """The bounds of the windows, int32 [W + 1], a view of the table, and their lengths."""
        start = bounds_size(self.num_slots)
        cu_seqlens = self.table[start : start + self.num_window_slots + 1]
        return AttentionPlan(cu_seqlens, self.window_seqlens, self.max_window_seqlen)

    @property
    def items(self) -> torch.Tensor:
        """int32 [I, 5], a view of the table: the ITEM_COLUMNS of each item, in the batch's order.

        An item's patches begin at first_patch. If rows average over frames, its h * w merged positions,
        merge^2 per row in merge order, begin at first_merged. Padded slots point to the batch's end and have
        no frames: (patches, merged positions, 0, 1, 1).
        """
        return self.table[items_start(self.num_slots, self.num_window_slots) :].view(-1, NUM_COLUMNS)


class FusedInputBuilder:
    """Builds and pads FusedInputs for one tower. Thread-safe.

    check_grid: the tower's own check, which raises GridMismatch. merges_time: whether rows average over an
    item's frames and attention spans them. window: merged positions of a window's side; 0 for no windows.
    """

    def __init__(
        self, check_grid: Callable[[Grid], None], *, merge_size: int, merges_time: bool, window: int = 0
    ) -> None:
        self._check_tower = check_grid
        self.merge_size = merge_size
        self.merges_time = merges_time
        self.window = window

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
        windows = np.empty(0, np.int64)
        if self.window:
            windows = window_lengths(grids, self.merge_size, self.window)
        start = items_start(num_slots, len(windows))
        table = np.empty(start + num_items * NUM_COLUMNS, np.int32)
        write_bounds(table, seqlens.cumsum(), num_slots)
        if self.window:
            write_bounds(table[bounds_size(num_slots) :], windows.cumsum(), len(windows))
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
            num_window_slots=len(windows),
            window_seqlens=tuple(windows.tolist()),
            max_window_seqlen=(self.window * self.merge_size) ** 2,
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
        num_windows = 0
        if self.window:
            num_windows = most_windows(bucket.num_patches, bucket.num_sequences, self.merge_size, self.window)
            assert len(inputs.window_seqlens) <= num_windows
        start = items_start(bucket.num_sequences, num_windows)
        # There are never more items than sequences.
        table = np.empty(start + bucket.num_sequences * NUM_COLUMNS, np.int32)
        write_bounds(table, inputs.cu_seqlens[1:].numpy(), bucket.num_sequences)
        if self.window:
            ends = inputs.windows.cu_seqlens[1:].numpy()
            write_bounds(table[bounds_size(bucket.num_sequences) :], ends, num_windows)
        items = inputs.items.numpy().ravel()
        table[start : start + len(items)] = items
        unused = table[start + len(items) :].reshape(-1, NUM_COLUMNS)
        unused[:] = (num_patches, inputs.num_rows * self.merge_size**2, 0, 1, 1)
        return dataclasses.replace(
            inputs,
            table=torch.from_numpy(table),
            num_slots=bucket.num_sequences,
            max_seqlen=bucket.max_seqlen,
            num_patches=bucket.num_patches,
            num_rows=bucket.num_patches // self.merge_size**2,
            num_frames=bucket.num_frames,
            num_window_slots=num_windows,
        )


def bounds_size(num_slots: int) -> int:
    """Entries of the table that the bounds of num_slots sequence slots take, aligned."""
    return -(-(num_slots + 1) // ALIGNED_ENTRIES) * ALIGNED_ENTRIES


def items_start(num_slots: int, num_window_slots: int = 0) -> int:
    """Index in the table at which the items begin: after the bounds."""
    return bounds_size(num_slots) + (bounds_size(num_window_slots) if num_window_slots else 0)


def write_bounds(table: npt.NDArray[np.int32], ends: npt.NDArray[Any], num_slots: int) -> None:
    """Writes the bounds of sequences to the beginning of ``table``: zero, each sequence's end, and the last
    end again for every unused slot and the alignment."""
    table[0] = 0
    table[1 : len(ends) + 1] = ends
    table[len(ends) + 1 : bounds_size(num_slots)] = ends[-1]
