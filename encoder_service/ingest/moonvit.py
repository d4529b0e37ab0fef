"""Preprocessing of Kimi-K2.5 (MoonViT): images keep their size up to a patch budget and are padded.

Owns the target size, the padding, the per-request patch limits and the patch order. The reference is
``Kimi_K25ImageProcessor`` (``transformers.models.kimi_k25``).
Shape suffixes: T frames, H height, W width, C channels, P patches.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.frames import (
    ImagePreprocessor,
    normalise_into,
    settings_fingerprint,
)
from encoder_service.ingest.preprocessor import Fit
from encoder_service.ingest.settings import MoonViTSettings
from encoder_service.types import Grid, PreprocessOptions

if TYPE_CHECKING:
    from encoder_service.ingest.clips import MoonViTClips

RULES = "moonvit.1"  # raise when the same settings give other pixels


class PatchLimits(NamedTuple):
    """Patches of one image before padding, and of one of its sides."""

    max_patches: int
    max_patches_per_side: int


def limited_size(height: int, width: int, patch_size: int, limits: PatchLimits) -> tuple[int, int]:
    """Target (height, width) before padding: scaled down to the limits, never up, sides floored.

    ``navit_resize`` of the reference, step for step in float64. The budget counts whole patches of the
    original image, so that after padding an image may hold slightly more patches than the budget.
    """
    num_patches = max(1.0, height // patch_size) * max(1.0, width // patch_size)
    max_side = limits.max_patches_per_side * patch_size
    scale = min(1.0, math.sqrt(limits.max_patches / num_patches), max_side / height, max_side / width)
    return min(max(1, int(height * scale)), max_side), min(max(1, int(width * scale)), max_side)


def most_patches(patch_size: int, merge_size: int, limits: PatchLimits) -> int:
    """Patches of the largest grid that ``limited_size`` and padding make of any image with a whole patch on
    each side: of one whose sides fall just short of another patch, which the budget does not count."""
    most = 0
    for rows in range(1, limits.max_patches_per_side + 1):
        for columns in range(limits.max_patches // rows, limits.max_patches // rows + 3):
            sides = ((rows + 1) * patch_size - 1, (columns + 1) * patch_size - 1)
            grid_h, grid_w = (
                -(-side // (patch_size * merge_size)) * merge_size
                for side in limited_size(*sides, patch_size, limits)
            )
            most = max(most, grid_h * grid_w)
    return most


class MoonViTPreprocessor(ImagePreprocessor):
    """Kimi-K2.5 and K2.6. No aspect is refused: the limit of a side bounds every strip."""

    family = "kimi_k25"
    taken_options = ("max_patches", "max_patches_per_side")

    def __init__(
        self,
        settings: MoonViTSettings,
        limits: DecodeLimits,
        clips: MoonViTClips | None = None,
    ) -> None:
        self.settings = settings
        self.limits = limits
        self.clips: MoonViTClips | None = clips
        self.merge_size = settings.merge_size
        self.patch_dim = 3 * settings.patch_size**2
        self.fingerprint = settings_fingerprint(RULES, settings, clips)

    @property
    def longest_item(self) -> int:
        limits = [(1, self.patch_limits(PreprocessOptions()))]
        if self.clips is not None:
            limits.append(self.clips.chunk_limits)
        return max(
            num_frames * most_patches(self.settings.patch_size, self.merge_size, of_frame)
            for num_frames, of_frame in limits
        )

    @property
    def patch_shapes(self) -> tuple[tuple[int, ...], ...]:
        patch_size = self.settings.patch_size
        return ((self.patch_dim,), (3, patch_size, patch_size))

    def check_values(self, options: PreprocessOptions) -> None:
        # The side's ceiling is the checkpoint's: the tower's rotary table ends there.
        ceilings = {
            "max_patches": max(
                self.limits.max_image_pixels // self.settings.patch_size**2, self.settings.max_patches
            ),
            "max_patches_per_side": self.settings.max_patches_per_side,
        }
        for name, ceiling in ceilings.items():
            if (value := options.given().get(name)) is not None:
                self.check_range(name, value, ceiling)

    def patch_limits(self, options: PreprocessOptions) -> PatchLimits:
        """The checkpoint's limits with the request's in their place where given."""
        max_patches, per_side = options.max_patches, options.max_patches_per_side
        return PatchLimits(
            self.settings.max_patches if max_patches is None else max_patches,
            self.settings.max_patches_per_side if per_side is None else per_side,
        )

    def target_size(self, height: int, width: int, options: PreprocessOptions) -> tuple[int, int]:
        """Pixels of the resized image, before padding. Raises InvalidOption."""
        self.check_values(options)
        return limited_size(height, width, self.settings.patch_size, self.patch_limits(options))

    def fit_of(self, height: int, width: int, options: PreprocessOptions) -> Fit:
        target = self.target_size(height, width, options)
        patch_size, merge_size = self.settings.patch_size, self.merge_size
        grid_h, grid_w = (-(-side // (patch_size * merge_size)) * merge_size for side in target)
        return Fit(height, width, *target, grid_h * patch_size, grid_w * patch_size, Grid(1, grid_h, grid_w))

    def patchify(self, frames_THWC: torch.Tensor) -> torch.Tensor:
        """Row by row within a frame, frames one after the other: [t, h, w, C, ph, pw]."""
        num_frames, height, width, _ = frames_THWC.shape
        patch = self.settings.patch_size
        blocks_ThwC = frames_THWC.reshape(num_frames, height // patch, patch, width // patch, patch, 3)
        patches_PCpp = blocks_ThwC.permute(0, 1, 3, 5, 2, 4).reshape(-1, 3, patch, patch)
        values_PCpp = torch.empty(patches_PCpp.shape, dtype=torch.float32, device=frames_THWC.device)
        normalise_into(values_PCpp, patches_PCpp, self.settings.normalisation)
        return values_PCpp.view(-1, self.patch_dim)
