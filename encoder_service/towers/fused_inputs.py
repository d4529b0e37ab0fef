"""Metadata of a packed batch for the fused path: what the host says so that the device can do the rest.

Owns the record, how it is built from grids, and how it is padded to a bucket. It is one row of five numbers
per item; what every patch needs is expanded from them on the device (kernels/expand.py), so that a step's
host work and transfer grow with items and not with patches.

Shape legend: I items, S attention sequences, P patches, R rows, F frames averaged into one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from encoder_service.errors import GridMismatch
from encoder_service.types import Grid

# Longest side, in patches, that the rotary table covers.
MAX_SIDE = 32_768
# Patches are numbered in int32.
MAX_BATCH_PATCHES = 2**31 - 1
# Grids whose check and sequence lengths are remembered.
MAX_KNOWN_GRIDS = 4096
# Columns of the item table: first patch, first merged place, then the grid.
ITEM_COLUMNS = ("first_patch", "first_place", "t", "h", "w")
NUM_COLUMNS = len(ITEM_COLUMNS)
# What a grid says of its item, and where it stands in BatchShape.shapes: patches, places after merging over
# frames, the grid, attention sequences, the length of each.
SHAPE_COLUMNS = ("patches", "places", "t", "h", "w", "sequences", "seqlen")
NUM_SHAPE_COLUMNS = len(SHAPE_COLUMNS)
PATCHES, PLACES, FRAMES, SEQUENCES, SEQLEN = (
    SHAPE_COLUMNS.index(name) for name in ("patches", "places", "t", "sequences", "seqlen")
)
Int64s: TypeAlias = npt.NDArray[np.int64]
Int32s: TypeAlias = npt.NDArray[np.int32]
# The grid of an item slot that nothing is in: no frames.
UNUSED_GRID = np.array((0, 1, 1), np.int32)
# int32 entries of 16 bytes, the alignment that kernels are compiled for.
ALIGNED_ENTRIES = 4


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

    table: int32, everything that the device reads beside the pixels, so that it travels in one piece: the
    bounds (``cu_seqlens``), then the items (``items``). num_slots: S. seqlens: the real lengths on the host.
    max_seqlen: their maximum, or the bucket's bound. num_patches, num_rows, num_frames: P, R and F of the
    batch, or of the bucket when padded; F is 1 where rows do not average over frames.
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
        """int32 [S + 1], a view of the table; padded slots repeat the last real bound."""
        return self.table[: self.num_slots + 1]

    @property
    def items(self) -> torch.Tensor:
        """int32 [I, 5], a view of the table: ITEM_COLUMNS of each item in the batch's order.

        An item's patches begin at first_patch. Where rows average over frames, its h * w places in the
        merged order, merge^2 to a row, begin at first_place. Padded slots name the batch's end and have no
        frames: (patches, places, 0, 1, 1).
        """
        return self.table[items_start(self.num_slots) :].view(-1, NUM_COLUMNS)

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


class ShapeRows:
    """SHAPE_COLUMNS of each item of a batch, and perhaps more columns, in memory that ``RowArrays`` gives to
    the next batch of as many items too: views of it, since making them costs more than what is done to them.

    values: int64 [C, I], by column. sums: [C, I + 1], what the items before each add up to, and all of them,
    once ``add_up`` was called.
    """

    __slots__ = ("_extremes", "_summands", "bounds", "ends", "firsts", "grids", "sums", "totals", "values")

    def __init__(self, values: Int64s, sums: Int64s, num_items: int) -> None:
        self._summands = values[:, : num_items + 1]
        self.values = values[:, 1 : num_items + 1]
        self._extremes = self.values[FRAMES : SEQLEN + 1]
        self.sums = sums[:, : num_items + 1]
        self.totals = self.sums[:, num_items]
        self.bounds = self.sums[PATCHES]
        self.firsts = self.sums[PATCHES:FRAMES, :num_items].T
        self.ends = self.totals[PATCHES:FRAMES]
        self.grids = self.values[FRAMES:SEQUENCES].T

    @classmethod
    def of(cls, rows: Int64s) -> ShapeRows:
        """rows: int64 [I, 7 or more], in memory of its own."""
        made = RowArrays(len(rows)).rows(len(rows))
        made.values[:] = rows[:, :NUM_SHAPE_COLUMNS].T
        return made

    def add_up(self) -> list[int]:
        """Fills ``sums`` and returns the last: each column's over the batch."""
        np.add.accumulate(self._summands, 1, None, self.sums)
        totals: list[int] = self.totals.tolist()
        return totals

    def largest(self) -> list[int]:
        """The largest of each column from FRAMES to SEQLEN."""
        found: list[int] = np.maximum.reduce(self._extremes, 1).tolist()
        return found


class RowArrays:
    """Memory for the rows of batches of up to ``capacity`` items, one batch at a time."""

    def __init__(self, capacity: int, num_columns: int = NUM_SHAPE_COLUMNS) -> None:
        # The first item's sums begin at column 0, which stays zeros.
        self.values = np.zeros((num_columns, capacity + 1), np.int64)
        self.sums = np.zeros_like(self.values)

    def rows(self, num_items: int) -> ShapeRows:
        return ShapeRows(self.values, self.sums, num_items)


class TablePlaces:
    """Where a batch of so many items and sequences writes its part of FusedInputs.table, and the padding."""

    __slots__ = ("bounds", "firsts", "grids", "rest", "unused_firsts", "unused_grids")

    def __init__(self, table: Int32s, num_slots: int, num_items: int, num_sequences: int) -> None:
        start = items_start(num_slots)
        items = table[start:].reshape(-1, NUM_COLUMNS)
        self.bounds = table[: num_sequences + 1]
        self.rest = table[num_sequences + 1 : start]
        self.firsts, self.grids = items[:num_items, :2], items[:num_items, 2:]
        self.unused_firsts, self.unused_grids = items[num_items:, :2], items[num_items:, 2:]


class BatchShape:
    """What grids add up to, before anything is laid out: scalars to choose a bucket by, and ``write``, which
    puts the table where it is to be.

    rows: of the batch, in whose memory the next batch's may be soon: ``write`` and ``seqlens`` before that.
    totals: of each column. All work is on columns, so that items cost next to nothing each.
    """

    __slots__ = (
        "_rows",
        "max_seqlen",
        "num_frames",
        "num_items",
        "num_patches",
        "num_places",
        "num_rows",
        "num_sequences",
        "totals",
    )

    def __init__(self, rows: ShapeRows, *, merge_size: int, merges_time: bool) -> None:
        self._rows = rows
        self.totals = totals = rows.add_up()
        most = rows.largest()
        self.num_items = len(rows.bounds) - 1
        self.num_patches = totals[PATCHES]
        self.num_places = totals[PLACES]
        self.num_sequences = totals[SEQUENCES]
        self.max_seqlen = most[SEQLEN - FRAMES]
        self.num_frames = most[0] if merges_time else 1
        self.num_rows = self.num_places // (merge_size * merge_size)

    @property
    def seqlens(self) -> tuple[int, ...]:
        """The length of each attention sequence."""
        values = self._rows.values
        return tuple(np.repeat(values[SEQLEN], values[SEQUENCES]).tolist())

    def write(self, places: TablePlaces) -> None:
        """FusedInputs.table; what is beyond the batch's own becomes padding."""
        rows = self._rows
        if self.num_sequences == self.num_items:
            places.bounds[:] = rows.bounds
        else:
            places.bounds[0] = 0
            places.bounds[1:] = np.repeat(rows.values[SEQLEN], rows.values[SEQUENCES]).cumsum()
        places.rest.fill(self.num_patches)
        places.firsts[:] = rows.firsts
        places.grids[:] = rows.grids
        if len(places.unused_grids):
            places.unused_firsts[:] = rows.ends
            places.unused_grids[:] = UNUSED_GRID


def shape_row(grid: Grid, *, merges_time: bool) -> tuple[int, ...]:
    """SHAPE_COLUMNS of one item."""
    t, h, w = grid
    frame = h * w
    if merges_time:
        return (t * frame, frame, t, h, w, 1, t * frame)
    return (t * frame, t * frame, t, h, w, t, frame)


class FusedInputBuilder:
    """Builds and pads FusedInputs for one tower. Thread-safe.

    check_grid: the tower's own check, raises GridMismatch; its answer depends on the grid alone.
    merges_time: rows average over an item's frames, and attention spans them.
    """

    def __init__(self, check_grid: Callable[[Grid], None], *, merge_size: int, merges_time: bool) -> None:
        self._check_grid = check_grid
        self.merge_size = merge_size
        self.merges_time = merges_time
        # A grid that is refused raises, and is not remembered.
        self._shape = lru_cache(MAX_KNOWN_GRIDS)(self._describe)

    def check_grid(self, grid: Grid) -> None:
        self._check_grid(grid)
        if max(grid.h, grid.w) > MAX_SIDE:
            raise GridMismatch(
                f"grid {list(grid)} has a side of {max(grid.h, grid.w)} patches, the longest is {MAX_SIDE}",
                found=max(grid.h, grid.w),
                limit=MAX_SIDE,
            )

    def shape_of(self, shapes: ShapeRows) -> BatchShape:
        """A batch of items that ``check_grid`` let pass. Adds up its rows."""
        return BatchShape(shapes, merge_size=self.merge_size, merges_time=self.merges_time)

    def prepare(self, grids: Sequence[Grid]) -> FusedInputs:
        """Item table and bounds of a packed batch, items in the order given. Raises GridMismatch."""
        if not grids:
            raise GridMismatch("the batch has 0 items, needs at least 1", found=0)
        rows = b"".join([self._shape(grid) for grid in grids])
        batch = self.shape_of(ShapeRows.of(np.frombuffer(rows, np.int64).reshape(-1, NUM_SHAPE_COLUMNS)))
        if batch.num_patches > MAX_BATCH_PATCHES:
            raise GridMismatch(
                f"the batch has {batch.num_patches} patches, at most {MAX_BATCH_PATCHES} can be numbered",
                found=batch.num_patches,
                limit=MAX_BATCH_PATCHES,
            )
        num_slots = batch.num_sequences
        table = np.empty(items_start(num_slots) + batch.num_items * NUM_COLUMNS, np.int32)
        batch.write(TablePlaces(table, num_slots, batch.num_items, num_slots))
        return FusedInputs(
            table=torch.from_numpy(table),
            num_slots=num_slots,
            seqlens=batch.seqlens,
            max_seqlen=batch.max_seqlen,
            num_patches=batch.num_patches,
            num_rows=batch.num_rows,
            num_frames=batch.num_frames,
        )

    def pad(self, inputs: FusedInputs, bucket: BucketShape) -> FusedInputs:
        """The batch in a bucket's static shapes, still on the host. Padding patches belong to no sequence
        and to no row that is returned. The bucket has a merged place for every patch, which is what stills
        need; clips leave some unused. The batch must fit the bucket."""
        num_patches, num_sequences = inputs.num_patches, len(inputs.seqlens)
        assert num_patches <= bucket.num_patches
        assert num_sequences <= bucket.num_sequences
        assert inputs.max_seqlen <= bucket.max_seqlen
        assert inputs.num_frames <= bucket.num_frames
        given = inputs.table.numpy()
        given_items = given[items_start(inputs.num_slots) :]
        start = items_start(bucket.num_sequences)
        # Items never outnumber sequences.
        table = np.empty(start + bucket.num_sequences * NUM_COLUMNS, np.int32)
        table[: num_sequences + 1] = given[: num_sequences + 1]
        table[num_sequences + 1 : start] = num_patches
        table[start : start + len(given_items)] = given_items
        unused = table[start + len(given_items) :].reshape(-1, NUM_COLUMNS)
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

    def _describe(self, grid: Grid) -> bytes:
        self.check_grid(grid)
        return np.array(shape_row(grid, merges_time=self.merges_time), np.int64).tobytes()


def items_start(num_slots: int) -> int:
    """Where the items begin in a table with this many sequence slots: after the bounds, aligned."""
    return -(-(num_slots + 1) // ALIGNED_ENTRIES) * ALIGNED_ENTRIES
