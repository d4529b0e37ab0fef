"""Patches of a batch on the device: uint8 frames cut and normalised, or a caller's own patches, into the
buffer that the forward pass reads.

Owns the choice between the kernels and the preprocessor's own arithmetic, which give the same bits, and the
check that what is cut is there. Where pixels come from and when they may be read is the launch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from encoder_service.engine.staging import PixelSlot
from encoder_service.errors import PixelTensorMismatch
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.towers.tower import Tower
from encoder_service.types import FrameItem, TowerItem


@dataclass(frozen=True)
class StagedBatch:
    """A batch whose pixels lie in a slot, each item's from its byte in ``offsets`` on. table: its
    FusedInputs.items on the device, perhaps padded to a bucket."""

    items: Sequence[TowerItem]
    slot: PixelSlot
    offsets: Sequence[int]
    table_I5: torch.Tensor


class Cutter(Protocol):
    def cut(self, frames_THWC: torch.Tensor, out: torch.Tensor) -> None:
        """One item's uint8 frames, on the device, into out [P of the item, patch_dim]."""

    def cut_staged(self, batch: StagedBatch, out: torch.Tensor) -> None:
        """The frames of a whole batch into out [P, patch_dim]; the rows of items that came as patches stay
        as they are."""


def cutter_for(preprocessor: Preprocessor, device: torch.device) -> Cutter:
    """How this preprocessor's frames become patches on ``device``."""
    if device.type == "cuda" and isinstance(preprocessor, QwenVLPreprocessor | MoonViTPreprocessor):
        return KernelCutter(preprocessor)
    return PlainCutter(preprocessor)


class PlainCutter:
    """The preprocessor's own arithmetic, item by item."""

    def __init__(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor

    def cut(self, frames_THWC: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._preprocessor.patchify(frames_THWC))

    def cut_staged(self, batch: StagedBatch, out: torch.Tensor) -> None:
        first = 0
        for item, offset in zip(batch.items, batch.offsets, strict=True):
            rows = out[first : first + item.grid.num_patches]
            if isinstance(item, FrameItem):
                self.cut(batch.slot.read(offset, item.frames_THWC), rows)
            first += item.grid.num_patches


class KernelCutter:
    """Kernels: one launch for a batch that was staged."""

    def __init__(self, preprocessor: QwenVLPreprocessor | MoonViTPreprocessor) -> None:
        from encoder_service.towers.kernels import patches  # triton, which only a GPU needs

        self._kernels = patches
        settings = preprocessor.settings
        normalisation = settings.normalisation
        self._normalisation = (
            normalisation.image_mean,
            normalisation.image_std,
            normalisation.rescale_factor,
        )
        self._patch_size = settings.patch_size
        self._merge_size = preprocessor.merge_size
        self._temporal, self._merges_time = 1, True
        if isinstance(preprocessor, QwenVLPreprocessor):
            self._temporal, self._merges_time = preprocessor.settings.temporal_patch_size, False

    def cut(self, frames_THWC: torch.Tensor, out: torch.Tensor) -> None:
        self._kernels.patchify_qwen(
            frames_THWC,
            out,
            *self._normalisation,
            patch_size=self._patch_size,
            merge_size=1 if self._merges_time else self._merge_size,  # 1: row by row
            temporal_patch_size=self._temporal,
        )

    def cut_staged(self, batch: StagedBatch, out: torch.Tensor) -> None:
        if not any(isinstance(item, FrameItem) for item in batch.items):
            return
        self._kernels.patchify_items(
            batch.slot.memory,
            batch.table_I5,
            batch.slot.sources[: len(batch.table_I5)],
            out,
            *self._normalisation,
            patch_size=self._patch_size,
            merge_size=self._merge_size,
            temporal_patch_size=self._temporal,
            merges_time=self._merges_time,
        )


def host_pixels(item: TowerItem, tower: Tower) -> torch.Tensor:
    """What of an item travels, contiguous: its frames, or its patches in the tower's dtype. Rounding here
    gives what rounding on the device would: both round to nearest, ties to even.

    Raises PixelTensorMismatch for pixels that are not what the grid says: a launch for many items reads
    each where its grid puts it.
    """
    grid = item.grid
    if isinstance(item, FrameItem):
        pixels, side = item.frames_THWC, tower.patch_size
        slots = -(-len(pixels) // tower.temporal_patch_size)
        found, needed = (slots, *pixels.shape[1:]), (grid.t, grid.h * side, grid.w * side, 3)
        if found != needed or pixels.dtype != torch.uint8:
            raise PixelTensorMismatch(
                f"frames are {pixels.dtype} of shape {tuple(pixels.shape)}, {slots} patches deep, grid "
                f"{tuple(grid)} needs torch.uint8 of height, width and colours {needed[1:]}",
                found=list(found),
                needed=list(needed),
            )
        return pixels.contiguous()
    given, expected = item.pixel_values.shape, (grid.num_patches, tower.patch_dim)
    if given != expected:
        raise PixelTensorMismatch(
            f"pixels have shape {tuple(given)}, grid {tuple(grid)} needs {expected}",
            found=list(given),
            needed=list(expected),
        )
    return item.pixel_values.to(tower.dtype).contiguous()
