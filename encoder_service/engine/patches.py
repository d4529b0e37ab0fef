"""From an item's pixels to patches in the buffer that the forward pass reads.

Owns the check of what an item brings and the cut of frames into normalised patches on the device: by one
kernel for a whole batch on a GPU, by the preprocessor's own arithmetic elsewhere. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from encoder_service.engine.staging import UploadedPixels
from encoder_service.errors import PixelTensorMismatch
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.towers.tower import Tower
from encoder_service.types import FrameItem, TowerItem


def host_pixels(item: TowerItem, tower: Tower, dtype: torch.dtype) -> torch.Tensor:
    """The pixels of an item that are transferred, contiguous: its frames, or its patches in ``dtype``, the
    tower's. Rounding on the host and on the device give the same: to nearest, ties to even.

    Raises PixelTensorMismatch for pixels that do not match the grid: the kernel reads each item's where the
    grid puts them.
    """
    grid = item.grid
    if isinstance(item, FrameItem):
        pixels, side = item.frames_THWC, tower.patch_size
        depth = -(-len(pixels) // tower.temporal_patch_size)
        found, needed = (depth, *pixels.shape[1:]), (grid.t, grid.h * side, grid.w * side, 3)
        if found != needed or pixels.dtype != torch.uint8:
            raise PixelTensorMismatch(
                f"frames are {pixels.dtype} of shape {tuple(pixels.shape)}, {depth} patches deep, grid "
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
    return item.pixel_values.to(dtype).contiguous()


def num_frames(item: TowerItem) -> int:
    """Frames that the item brings, 0 for patches."""
    return len(item.frames_THWC) if isinstance(item, FrameItem) else 0


class Cutter(Protocol):
    def cut(
        self,
        items: Sequence[TowerItem],
        uploaded: UploadedPixels,
        items_I5: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Patches of a whole batch, uploaded, into out [P, patch_dim]. items_I5: FusedInputs.items of the
        batch on the device, perhaps padded."""


def cutter_for(preprocessor: Preprocessor, device: torch.device) -> Cutter:
    """How this preprocessor's frames become patches on ``device``."""
    if device.type == "cuda" and isinstance(preprocessor, QwenVLPreprocessor | MoonViTPreprocessor):
        return KernelCutter(preprocessor)
    return PlainCutter(preprocessor)


class PlainCutter:
    """The preprocessor's own arithmetic, item by item."""

    def __init__(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor

    def cut(
        self,
        items: Sequence[TowerItem],
        uploaded: UploadedPixels,
        items_I5: torch.Tensor,  # noqa: ARG002
        out: torch.Tensor,
    ) -> None:
        self.cut_pieces(items, uploaded.pieces, out)

    def cut_pieces(
        self, items: Sequence[TowerItem], pieces: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        """``cut`` of pixels that lie anywhere on the device."""
        first = 0
        for item, piece in zip(items, pieces, strict=True):
            patches = self._preprocessor.patchify(piece) if isinstance(item, FrameItem) else piece
            out[first : first + item.grid.num_patches].copy_(patches)
            first += item.grid.num_patches


class KernelCutter:
    """One kernel launch for a batch."""

    def __init__(self, preprocessor: QwenVLPreprocessor | MoonViTPreprocessor) -> None:
        from encoder_service.towers.kernels import patches  # triton, which only a GPU needs

        self._patchify_items = patches.patchify_items
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

    def cut(
        self,
        items: Sequence[TowerItem],  # noqa: ARG002
        uploaded: UploadedPixels,
        items_I5: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._patchify_items(
            uploaded.memory,
            items_I5,
            uploaded.sources_I2[: len(items_I5)],
            out,
            *self._normalisation,
            patch_size=self._patch_size,
            merge_size=self._merge_size,
            temporal_patch_size=self._temporal,
            merges_time=self._merges_time,
        )
