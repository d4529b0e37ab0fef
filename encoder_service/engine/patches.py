"""Cuts an item's pixels into patches in the buffer that the forward pass reads.

Owns the check of an item's pixels and the cut of frames into normalised patches on the device. On a GPU one
kernel cuts a whole batch; elsewhere the preprocessor's own arithmetic is used. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from encoder_service.engine.staging import UploadedPixels
from encoder_service.errors import PixelTensorMismatch
from encoder_service.ingest.preprocessor import PatchLayout, Preprocessor
from encoder_service.towers.tower import Tower
from encoder_service.types import FrameItem, TowerItem


def host_pixels(item: TowerItem, tower: Tower, dtype: torch.dtype) -> torch.Tensor:
    """The pixels of an item that are transferred, contiguous: its frames, or its patches in the tower's
    ``dtype``. Host and device round in the same way: to nearest, ties to even.

    Raises PixelTensorMismatch for pixels that do not match the grid, because the kernel computes addresses
    from the grid.
    """
    grid = item.grid
    if isinstance(item, FrameItem):
        pixels, side = item.frames_THWC, tower.patch_size
        depth = -(-len(pixels) // tower.temporal_patch_size)
        shape, needed = (depth, *pixels.shape[1:]), (grid.t, grid.h * side, grid.w * side, 3)
        if shape != needed or pixels.dtype != torch.uint8:
            raise PixelTensorMismatch(
                f"frames are {pixels.dtype} of shape {tuple(pixels.shape)}, {depth} patches deep, grid "
                f"{tuple(grid)} needs torch.uint8 of height, width and colours {needed[1:]}",
                found=list(shape),
                needed=list(needed),
            )
        return pixels.contiguous()
    patches_shape, needed_shape = item.pixel_values.shape, (grid.num_patches, tower.patch_dim)
    if patches_shape != needed_shape:
        raise PixelTensorMismatch(
            f"pixels have shape {tuple(patches_shape)}, grid {tuple(grid)} needs {needed_shape}",
            found=list(patches_shape),
            needed=list(needed_shape),
        )
    return item.pixel_values.to(dtype).contiguous()


def num_frames(item: TowerItem) -> int:
    """Number of frames of the item; 0 for patches."""
    return len(item.frames_THWC) if isinstance(item, FrameItem) else 0


class Cutter(Protocol):
    def cut(
        self,
        items: Sequence[TowerItem],
        uploaded: UploadedPixels,
        items_I5: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Writes the patches of a whole uploaded batch to out [P, patch_dim]. items_I5: FusedInputs.items of
        the batch, on the device; it may be padded."""


def cutter_for(preprocessor: Preprocessor, device: torch.device) -> Cutter:
    """The cutter for this preprocessor's frames on ``device``."""
    layout = preprocessor.patch_layout if device.type == "cuda" else None
    return PlainCutter(preprocessor) if layout is None else KernelCutter(layout)


class PlainCutter:
    """Cuts with the preprocessor's own arithmetic, item by item."""

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
        """Like ``cut``, for pixels anywhere on the device."""
        first = 0
        for item, piece in zip(items, pieces, strict=True):
            patches = self._preprocessor.patchify(piece) if isinstance(item, FrameItem) else piece
            out[first : first + item.grid.num_patches].copy_(patches)
            first += item.grid.num_patches


class KernelCutter:
    """Cuts a batch with one kernel launch."""

    def __init__(self, layout: PatchLayout) -> None:
        from encoder_service.towers.kernels import patches  # needs triton, which only GPUs require

        self._patchify_items = patches.patchify_items
        self._layout = layout

    def cut(
        self,
        items: Sequence[TowerItem],  # noqa: ARG002
        uploaded: UploadedPixels,
        items_I5: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        layout, normalisation = self._layout, self._layout.normalisation
        self._patchify_items(
            uploaded.memory,
            items_I5,
            uploaded.sources_I2[: len(items_I5)],
            out,
            normalisation.image_mean,
            normalisation.image_std,
            normalisation.rescale_factor,
            patch_size=layout.patch_size,
            merge_size=layout.merge_size,
            temporal_patch_size=layout.temporal_patch_size,
            merges_time=layout.merges_time,
            in_steps=normalisation.in_steps,
        )
