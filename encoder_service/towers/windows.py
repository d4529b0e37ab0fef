"""Windows of merged positions within a frame, between which most of a tower's blocks do not attend.

Owns the order of patches in which each window is one run, the windows' lengths, and a batch in that order. A
frame is cut into squares of ``side`` merged positions, from the top left; those at its right and lower edge
may be smaller. The windows follow one another row by row, and within a window its merged positions likewise,
each with its patches in merge order. Frames stay one run each, so full attention needs no other order.

Shape legend: U merged positions of one frame, P patches, R rows, W windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from encoder_service.towers.tower import TowerInputs
from encoder_service.types import Grid


def window_order(height: int, width: int, merge_size: int, side: int) -> torch.Tensor:
    """Of each place of the window order, the merged position's place in merge order, int64 [U]. height,
    width: of the frame, in patches."""
    rows = torch.arange(height // merge_size)[:, None]
    columns = torch.arange(width // merge_size)[None]
    window = (rows // side) * -(-columns.shape[1] // side) + columns // side
    # Positions of a window keep the order of the frame.
    return window.flatten().argsort(stable=True)


def batch_order(grids: Iterable[Grid], merge_size: int, side: int) -> torch.Tensor:
    """``window_order`` of a batch, int64 [R], items in the given order."""
    orders, start = [], 0
    for frames, height, width in grids:
        order = window_order(height, width, merge_size, side)
        for _ in range(frames):
            orders.append(order + start)
            start += len(order)
    return torch.cat(orders)


def patches_of(order_R: torch.Tensor, merge_size: int) -> torch.Tensor:
    """The order of patches, int64 [P], that an order of merged positions implies."""
    return (order_R[:, None] * merge_size**2 + torch.arange(merge_size**2)).flatten()


def window_lengths(grids: Iterable[Grid], merge_size: int, side: int) -> npt.NDArray[np.int64]:
    """Patches of each window of a batch, int64 [W], frame by frame, items in the given order."""
    lengths = []
    for frames, height, width in grids:
        of_rows, of_columns = (_cut(length // merge_size, side) for length in (height, width))
        lengths.append(np.tile(np.outer(of_rows, of_columns).ravel() * merge_size**2, frames))
    return np.concatenate(lengths)


def most_windows(num_patches: int, num_frames: int, merge_size: int, side: int) -> int:
    """The most windows that frames with this many patches in total can have. A frame of U merged positions
    has at most U / side of them, rounded up, if it is one position wide."""
    return num_patches // (merge_size**2 * side) + num_frames


def _cut(length: int, side: int) -> npt.NDArray[np.int64]:
    """The lengths of an axis' pieces."""
    return np.minimum(side, length - np.arange(0, length, side))


@dataclass(frozen=True, kw_only=True)
class WindowedInputs(TowerInputs):
    """A batch whose tables are in window order. patch_order: int64 [P], the patch in merge order at each
    place. row_order: int64 [R], the place of each row. window_cu_seqlens: int32 [W + 1]. window_seqlens: the
    same lengths on the host."""

    patch_order: torch.Tensor
    row_order: torch.Tensor
    window_cu_seqlens: torch.Tensor
    window_seqlens: tuple[int, ...]

    @classmethod
    def of(cls, inputs: TowerInputs, grids: Sequence[Grid], merge_size: int, side: int) -> Self:
        """The batch of ``grids``, whose frames' tables are in window order."""
        order_R = batch_order(grids, merge_size, side)
        lengths = window_lengths(grids, merge_size, side).tolist()
        return cls(
            **vars(inputs),
            patch_order=patches_of(order_R, merge_size),
            row_order=order_R.argsort(),
            window_cu_seqlens=torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32),
            window_seqlens=tuple(lengths),
        )

    def within_windows(self) -> Self:
        """The same batch with a window as each attention sequence."""
        return replace(
            self,
            cu_seqlens=self.window_cu_seqlens,
            seqlens=self.window_seqlens,
            max_seqlen=max(self.window_seqlens),
        )
