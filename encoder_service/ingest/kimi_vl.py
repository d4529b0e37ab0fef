"""Preprocessing of Kimi-VL. Images keep their size up to a patch budget and are padded; clips are refused.

Owns the target size and the refusal of long sides. Patches, padding and options are Kimi-K2.5's. The
reference is ``KimiVLImageProcessor`` in the published checkpoints, which resizes with Pillow.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from encoder_service.errors import ImageTooLarge
from encoder_service.ingest.decode import DecodeLimits, OpenImage, Transparent
from encoder_service.ingest.moonvit import MoonViTPreprocessor, PatchLimits, most_patches, padded_grid
from encoder_service.ingest.preprocessor import ImagePlan
from encoder_service.ingest.resize import pad, pillow_bytes, resize_pillow
from encoder_service.ingest.settings import MoonViTSettings, SettingsReader, SteppedNormalisation
from encoder_service.ingest.video.source import ClipLimits
from encoder_service.types import Modality, PreprocessOptions

# The processor refuses 512 patches and more, the side of the tower's table of rotary positions.
MAX_PATCHES_PER_SIDE = 511


def budgeted_size(height: int, width: int, patch_size: int, limits: PatchLimits) -> tuple[int, int]:
    """Target (height, width) before padding: scaled down to the budget of whole patches, sides rounded down.

    Follows ``rescale`` of the reference in float64. A strip narrower than a patch has no whole patch and is
    not scaled.
    """
    num_patches = (width // patch_size) * (height // patch_size)
    if num_patches <= limits.max_patches:
        return height, width
    scale = math.sqrt(limits.max_patches / num_patches)
    return max(1, int(height * scale)), max(1, int(width * scale))


class KimiVLPreprocessor(MoonViTPreprocessor):
    """Kimi-VL-A3B."""

    family = "kimi_vl"
    rules = "kimi_vl.1"  # change when the same settings give different pixels
    options = ("max_patches",)
    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE,)

    @property
    def longest_item(self) -> int:
        limits = self.patch_limits(PreprocessOptions())
        return most_patches(self.settings.patch_size, self.merge_size, limits, budgeted_size)

    def plan_image(self, height: int, width: int, options: PreprocessOptions) -> ImagePlan:
        """Also raises ImageTooLarge for a side of too many patches."""
        patch_size = self.settings.patch_size
        target = budgeted_size(height, width, patch_size, self.patch_limits(options))
        grid = padded_grid(1, target, patch_size, self.merge_size)
        longest = max(grid.h, grid.w)
        if longest > MAX_PATCHES_PER_SIDE:
            raise ImageTooLarge(
                f"the image of {width}x{height} has {longest} patches along a side, Kimi-VL takes"
                f" {MAX_PATCHES_PER_SIDE}: send it in parts or reduced",
                found_patches=longest,
                max_patches=MAX_PATCHES_PER_SIDE,
            )
        return ImagePlan(target, (grid.h * patch_size, grid.w * patch_size), grid)

    def image_bytes(self, image: OpenImage, plan: ImagePlan) -> int:
        resizing = pillow_bytes(*image.size, plan.target, plan.padded, has_alpha=False)
        return max(image.decoded_bytes, resizing)

    def resized(self, image_HWC: torch.Tensor, plan: ImagePlan) -> torch.Tensor:
        return pad(resize_pillow(image_HWC, *plan.target), plan.padded)


def kimi_vl_preprocessor(
    reader: SettingsReader,
    video: SettingsReader | None,  # noqa: ARG001
    limits: DecodeLimits,
    clip_limits: ClipLimits,  # noqa: ARG001
    transparent: Transparent,
) -> KimiVLPreprocessor:
    """As ``preprocessor.Build``."""
    if reader.values.get("pad_input") is not True:
        # The reference would cut the sides instead.
        raise reader.refuse("pad_input", reader.values.get("pad_input"), "True")
    plain = reader.normalisation()
    settings = MoonViTSettings(
        patch_size=reader.count("patch_size"),
        merge_size=reader.square("merge_kernel_size") if reader.has("merge_kernel_size") else 2,
        max_patches=reader.count("in_token_limit"),
        max_patches_per_side=MAX_PATCHES_PER_SIDE,
        normalisation=SteppedNormalisation(plain.image_mean, plain.image_std, 1 / 255),
    )
    return KimiVLPreprocessor(settings, limits, None, transparent)
