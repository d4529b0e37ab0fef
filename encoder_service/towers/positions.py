"""Host tables of a frame (coordinates, position-table taps, merge order), and frames packed into a batch.

Owns the tables that depend on a frame's height and width alone, the byte-bounded cache of them, the check of
a grid's sides, and the concatenation of frame tables. ``rope.py`` has the rotary angles. Each tower's
``prepare`` decides which frames attend to each other and how they merge.

Shape legend: N patches of one frame, K position taps, T taps per axis.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from encoder_service.errors import GridMismatch
from encoder_service.towers.tower import TowerInputs
from encoder_service.types import Grid

# Keys' cubic convolution constant as torch.nn.functional.interpolate(mode="bicubic") has it.
BICUBIC_A = -0.75
# Bound of one tower's table cache. A 64x64 frame of 72-wide heads takes 2.5 to 3.3 MB.
TABLE_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class FrameTables:
    """Host tables of one h by w frame, in the order that the tower takes patches.

    position_index int64 [N, K], position_weight float32 [N, K]; rope_cos, rope_sin float32 [N, head_dim];
    merge_order int64 [N]: the patch that stands at each place of the merge order, or None where patches
    arrive in merge order.
    """

    position_index: torch.Tensor
    position_weight: torch.Tensor
    rope_cos: torch.Tensor
    rope_sin: torch.Tensor
    merge_order: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))


class FrameTableCache:
    """Least recently used frame tables within a bound of bytes. Thread-safe.

    Tables are built outside the lock: two threads that miss the same size both build it, which costs time
    once and never blocks a third. Tables larger than the bound are handed out and not kept.
    """

    def __init__(self, build: Callable[[int, int], FrameTables], capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._build = build
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[int, int], FrameTables] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, height: int, width: int) -> FrameTables:
        """Tables of a frame of height by width patches. Callers must not write to them."""
        size = (height, width)
        with self._lock:
            if size in self._entries:
                self._entries.move_to_end(size)
                return self._entries[size]
        tables = self._build(height, width)
        with self._lock:
            if size not in self._entries and tables.num_bytes <= self.capacity_bytes:
                # Room first: the bound holds at every moment, also for a reader without the lock.
                while self.num_bytes + tables.num_bytes > self.capacity_bytes:
                    _, evicted = self._entries.popitem(last=False)
                    self.num_bytes -= evicted.num_bytes
                self._entries[size] = tables
                self.num_bytes += tables.num_bytes
        return tables


def raster_coordinates(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each patch, int64 [N] each, row by row."""
    rows = torch.arange(height).repeat_interleave(width)
    columns = torch.arange(width).repeat(height)
    return rows, columns


def merge_order(height: int, width: int, merge_size: int) -> torch.Tensor:
    """Raster index of the patch at each place of the merge order, int64 [N]: blocks of merge_size squared
    patches in raster order, patches within a block likewise."""
    raster = torch.arange(height * width)
    blocks = raster.view(height // merge_size, merge_size, width // merge_size, merge_size)
    return blocks.transpose(1, 2).flatten()


def linear_taps(size: int, table_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps and weights, int64 and float32 [size, 2], that stretch a table over ``size`` places with both
    ends fixed: interpolate(mode="bilinear", align_corners=True) along one axis."""
    source = torch.arange(size, dtype=torch.float32) * (table_size - 1) / max(size - 1, 1)
    floor = source.floor()
    weight = source - floor
    taps = torch.stack([floor, floor + 1], dim=-1).long()
    return taps.clamp_(max=table_size - 1), torch.stack([1 - weight, weight], dim=-1)


def cubic_taps(size: int, table_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps and weights, int64 and float32 [size, 4], of interpolate(mode="bicubic", align_corners=False)
    along one axis: half-pixel centres, edge repeated, Keys' kernel (IEEE ASSP 29, 1981) with a = -0.75."""
    source = (torch.arange(size, dtype=torch.float32) + 0.5) * table_size / size - 0.5
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
    """Both axes together: position_index int64 and position_weight float32, [N, T * T], in raster order.

    row_taps, column_taps: indices and weights [height, T] and [width, T] into a table whose rows hold
    ``table_width`` entries.
    """
    (row_index, row_weight), (column_index, column_weight) = row_taps, column_taps
    # [height, width, T, T], then patches by taps.
    index = row_index[:, None, :, None] * table_width + column_index[None, :, None, :]
    weight = row_weight[:, None, :, None] * column_weight[None, :, None, :]
    num_patches = row_index.shape[0] * column_index.shape[0]
    return index.reshape(num_patches, -1), weight.reshape(num_patches, -1)


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
