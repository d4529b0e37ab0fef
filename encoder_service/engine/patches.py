"""Patches of a batch on the device: uint8 frames cut and normalised, or a caller's own patches, into the
buffer that the forward pass reads.

Owns what of an item travels, with the check that it is there; the choice between the kernels and the
preprocessor's own arithmetic, which give the same bits; and the graphs that the kernel's launches are
captured in. Where pixels come from and when they may be read is the launch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import torch

from encoder_service.engine.staging import NUM_UPLOAD_COLUMNS, StagedPixels
from encoder_service.errors import PixelTensorMismatch
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.towers.fused_inputs import shape_row
from encoder_service.towers.tower import Tower
from encoder_service.types import FrameItem, PatchItem, TowerItem

if TYPE_CHECKING:
    from encoder_service.engine.resizing import Packed

ItemT = TypeVar("ItemT", bound=TowerItem)
# As numpy reads int64 of this machine.
ROW = Struct(f"={NUM_UPLOAD_COLUMNS}q")


@dataclass(frozen=True, slots=True)
class Upload:
    """What of an item travels to ``tower``, found out once. pixels: contiguous. row: staging's UPLOAD_COLUMNS
    as int64, in bytes, so that the rows of a batch are joined and read without a look at each. num_rows: the
    item's visual tokens. packed: of an image that the device resizes, which ``pixels`` are a part of then."""

    tower: Tower
    pixels: torch.Tensor
    row: bytes
    num_rows: int
    packed: Packed | None = None

    @property
    def staged(self) -> torch.Tensor:
        """What lies in a slot in the end: ``pixels``, or a tensor without memory that is like it."""
        return self.pixels if self.packed is None else self.packed.result


def upload_of(item: TowerItem, tower: Tower, is_readable: bool | None = None) -> Upload:
    """What of the item travels. is_readable: whether the tower's device reads the pixels where they are; None
    to find out. Raises PixelTensorMismatch and GridMismatch."""
    known = item.upload
    if type(known) is Upload and known.tower is tower:
        return known
    pixels = host_pixels(item, tower)
    tower.check_grid(item.grid)
    if is_readable is None:
        is_readable = tower.device.type == "cpu" or pixels.is_pinned()
    row = ROW.pack(
        *shape_row(item.grid, merges_time=tower.merges_time),
        pixels.data_ptr(),
        pixels.nbytes,
        len(pixels) if isinstance(item, FrameItem) else 0,
        is_readable,
        0,
    )
    return Upload(tower, pixels, row, tower.num_rows(item.grid))


def looked_through(item: ItemT, tower: Tower, is_readable: bool | None = None) -> ItemT:
    """The item with its ``upload``, for ingest's worker threads: launches then need not look at it. As, and
    raises as, ``upload_of`` does."""
    upload = upload_of(item, tower, is_readable)
    # With not two copies of patches that had to be rounded.
    made = (
        PatchItem(upload.pixels, item.grid, upload)
        if isinstance(item, PatchItem)
        else FrameItem(item.frames_THWC, item.grid, upload)
    )
    return cast("ItemT", made)


class Cutter(Protocol):
    def cut(self, frames_THWC: torch.Tensor, out: torch.Tensor) -> None:
        """One item's uint8 frames, on the device, into out [P of the item, patch_dim]."""

    def cut_staged(self, batch: StagedBatch, out: torch.Tensor) -> None:
        """A whole batch into out [P, patch_dim], frames and patches; rows past the batch's become zeros."""


@dataclass(frozen=True)
class StagedBatch:
    """A batch whose pixels lie in a slot. table, sources: FusedInputs.items of it on the device and, for each
    item, StagedPixels.sources; both perhaps padded to a bucket."""

    items: Sequence[TowerItem]
    staged: StagedPixels
    table_I5: torch.Tensor
    sources_I2: torch.Tensor


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
        slot, offsets, held = batch.staged.slot, batch.staged.offsets, batch.staged.held
        first = 0
        for item, offset, pixels in zip(batch.items, offsets.tolist(), held, strict=True):
            rows = out[first : first + item.grid.num_patches]
            if isinstance(item, FrameItem):
                self.cut(slot.read(offset, pixels), rows)
            else:
                rows.copy_(slot.read(offset, pixels))
            first += item.grid.num_patches
        out[first:].zero_()


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
        self.cut_table(batch.staged.slot.all_memory, batch.table_I5, batch.sources_I2, out)

    def cut_table(
        self, memory: torch.Tensor, table_I5: torch.Tensor, sources_I2: torch.Tensor, out: torch.Tensor
    ) -> None:
        """``cut_staged`` of what tensors say alone. memory: that of both pixel slots."""
        self._kernels.patchify_items(
            memory,
            table_I5,
            sources_I2[: len(table_I5)],
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
    patches = item.pixel_values
    return (patches if patches.dtype == tower.dtype else patches.to(tower.dtype)).contiguous()
