"""Patches of a batch on the device: uint8 frames cut and normalised, or a caller's own patches, into the
buffer that the forward pass reads.

Owns the choice between the kernels and the preprocessor's own arithmetic, which give the same bits. Where
pixels come from and when they may be read is the launch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.types import FrameItem, TowerItem

# Patches of one item's frames on the device, uint8 [T, H, W, 3], into out [P of the item, patch_dim].
CutFrames: TypeAlias = Callable[[torch.Tensor, torch.Tensor], object]


def cutter_for(preprocessor: Preprocessor, device: torch.device) -> CutFrames:
    """How this preprocessor's frames become patches on ``device``."""
    if device.type == "cuda" and isinstance(preprocessor, QwenVLPreprocessor | MoonViTPreprocessor):
        from encoder_service.towers.kernels.patches import patchify_qwen  # triton

        settings = preprocessor.settings
        if isinstance(preprocessor, QwenVLPreprocessor):
            merge_size, temporal = preprocessor.merge_size, preprocessor.settings.temporal_patch_size
        else:
            merge_size, temporal = 1, 1  # patches stand row by row
        normalisation = settings.normalisation

        def cut(frames_THWC: torch.Tensor, out: torch.Tensor) -> None:
            patchify_qwen(
                frames_THWC,
                out,
                normalisation.image_mean,
                normalisation.image_std,
                normalisation.rescale_factor,
                patch_size=settings.patch_size,
                merge_size=merge_size,
                temporal_patch_size=temporal,
            )

        return cut
    return lambda frames_THWC, out: out.copy_(preprocessor.patchify(frames_THWC))


def host_pixels(item: TowerItem, dtype: torch.dtype) -> torch.Tensor:
    """What of an item travels, contiguous: its frames, or its patches in the tower's dtype. Rounding here
    gives what rounding on the device would: both round to nearest, ties to even."""
    if isinstance(item, FrameItem):
        return item.frames_THWC.contiguous()
    return item.pixel_values.to(dtype).contiguous()


def write_patches(
    out: torch.Tensor, items: Sequence[TowerItem], pixels: Sequence[torch.Tensor], cut: CutFrames
) -> None:
    """A batch's patches into out [P, patch_dim]. pixels: each item's ``host_pixels`` on the device."""
    first = 0
    for item, given in zip(items, pixels, strict=True):
        rows = out[first : first + item.grid.num_patches]
        if isinstance(item, FrameItem):
            cut(given, rows)
        else:
            rows.copy_(given, non_blocking=True)
        first += item.grid.num_patches
