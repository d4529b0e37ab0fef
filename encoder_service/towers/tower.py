"""The interface of every vision tower: host tables per grid, then a forward pass on tensors only.

A tower splits its work in two:

* ``prepare(grids)`` runs on the host, once per batch. It computes gather indices and weights for the position
  table, rotary angles, sequence bounds and merge indices.
* ``forward(inputs)`` reads tensors only, never synchronises with the host, and does the same work for the
  same shapes, so that it can be captured in a CUDA graph.

Shape legend: P patches of the batch, S attention sequences, R rows (visual tokens), K position taps,
E tower width, D language-model width, L deepstack levels, F frames averaged into one row.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Self

import torch
from torch import nn

from encoder_service.types import Grid, Modality


class BatchInputs:
    """Base class of the tensors of a packed batch. Subclasses are frozen dataclasses whose ``pixel_values``,
    [P, patch_dim], is None until ``with_pixels``."""

    def with_pixels(self, pixel_values: torch.Tensor) -> Self:
        """The same batch with its pixels [P, patch_dim]."""
        return self._replaced(pixel_values=pixel_values)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by field name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """The same batch with every tensor on ``device``."""
        moved = {name: value.to(device, non_blocking=non_blocking) for name, value in self.tensors().items()}
        return self._replaced(**moved)

    def _replaced(self, **tensors: torch.Tensor) -> Self:
        return dataclasses.replace(self, **tensors)  # type: ignore[type-var]


@dataclasses.dataclass(frozen=True)
class TowerInputs(BatchInputs):
    """One packed batch.

    position_index: int64 [P, K], rows of the learned position table. position_weight: float32 [P, K].
    frame_index: int64 [P], row of the temporal table, or None if the family has none. rope_cos, rope_sin:
    float32 [P, head_dim], rotary tables per patch. cu_seqlens: int32 [S + 1]. seqlens: the same lengths on
    the host. max_seqlen: their maximum. merge_index: int64 [R * merge^2, F], patches averaged into each
    merger input, or None if patches are already in merge order. merge_weight: float32 [R * merge^2, F], zero
    in unused entries.
    """

    position_index: torch.Tensor
    position_weight: torch.Tensor
    rope_cos: torch.Tensor
    rope_sin: torch.Tensor
    cu_seqlens: torch.Tensor
    seqlens: tuple[int, ...]
    max_seqlen: int
    frame_index: torch.Tensor | None = None
    merge_index: torch.Tensor | None = None
    merge_weight: torch.Tensor | None = None
    pixel_values: torch.Tensor | None = None

    @property
    def num_patches(self) -> int:
        return self.position_index.shape[0]


class Tower(nn.Module, abc.ABC):
    """A vision tower with its merger or projector: patches in, rows out.

    A subclass sets these attributes: family. patch_size: pixels per side. merge_size: patches per side.
    temporal_patch_size: frames. patch_dim: elements of one flattened patch. out_width: D.
    num_deepstack_levels: L. merges_time: whether an item's frames are averaged into one set of rows.
    max_frames: the most frames that are averaged; 1 unless ``merges_time``.
    """

    family: str
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    patch_dim: int
    out_width: int
    num_deepstack_levels: int
    merges_time: bool
    max_frames: int = 1
    modalities: tuple[Modality, ...] = (Modality.IMAGE, Modality.VIDEO)

    @property
    def width(self) -> int:
        """Elements of one row: D * (1 + L)."""
        return self.out_width * (1 + self.num_deepstack_levels)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def num_rows(self, grid: Grid) -> int:
        """Number of visual tokens of one item."""
        return grid.num_rows(self.merge_size, merges_time=self.merges_time)

    @abc.abstractmethod
    def check_grid(self, grid: Grid) -> None:
        """Raises GridMismatch if the tower does not support this grid: zero sides, sides that are not
        multiples of the merge size, more frames than the temporal table has."""

    @abc.abstractmethod
    def prepare(self, grids: Sequence[Grid]) -> TowerInputs:
        """Host tables of a packed batch, items in the given order. Raises GridMismatch."""

    @abc.abstractmethod
    def forward(self, inputs: TowerInputs) -> torch.Tensor:
        """The batch's rows, [R, D * (1 + L)] in the tower's dtype, items in the order of ``prepare``."""
