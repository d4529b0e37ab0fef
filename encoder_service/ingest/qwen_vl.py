"""Preprocessing of Qwen3-VL and Qwen3.5: every image rounded to whole merge blocks within an area.

Owns the target size, the per-request area limits and the patch order. The reference is
``Qwen2VLImageProcessor`` with the torchvision backend (``transformers.models.qwen2_vl``).
Shape suffixes: T frames, H height, W width, C channels, P patches.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from encoder_service.errors import AspectRatioExceeded, InvalidOption
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.frames import (
    ImagePreprocessor,
    normalise_into,
    settings_fingerprint,
)
from encoder_service.ingest.preprocessor import Fit
from encoder_service.ingest.settings import QwenVLSettings
from encoder_service.types import Grid, PreprocessOptions

if TYPE_CHECKING:
    from encoder_service.ingest.clips import ClipPreprocessor

RULES = "qwen_vl.1"  # raise when the same settings give other pixels
MAX_ASPECT_RATIO = 200


class AreaLimits(NamedTuple):
    """Target areas, in pixels."""

    min_pixels: int
    max_pixels: int


def rounded_size(height: int, width: int, factor: int, area: AreaLimits) -> tuple[int, int]:
    """Target (height, width): multiples of ``factor`` near the image's own, inside ``area`` where that is
    possible, at nearly the same aspect.

    ``smart_resize`` of the reference, step for step in float64: rounding is to the even multiple, the area
    decides on the rounded sides, the scale is that of the original sides.
    """
    rounded_height, rounded_width = round(height / factor) * factor, round(width / factor) * factor
    if rounded_height * rounded_width > area.max_pixels:
        shrink = math.sqrt((height * width) / area.max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if rounded_height * rounded_width < area.min_pixels:
        grow = math.sqrt(area.min_pixels / (height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rounded_height, rounded_width


class QwenVLPreprocessor(ImagePreprocessor):
    """Qwen3-VL and Qwen3.5, dense and mixture-of-experts alike."""

    family = "qwen_vl"
    taken_options = ("min_pixels", "max_pixels")

    def __init__(
        self,
        settings: QwenVLSettings,
        limits: DecodeLimits,
        clips: ClipPreprocessor | None = None,
    ) -> None:
        self.settings = settings
        self.limits = limits
        self.clips = clips
        self.merge_size = settings.merge_size
        self.patch_dim = 3 * settings.temporal_patch_size * settings.patch_size**2
        self.fingerprint = settings_fingerprint(RULES, settings, clips)

    @property
    def patch_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.patch_dim,),)

    def check_values(self, options: PreprocessOptions) -> None:
        ceiling = max(self.limits.max_image_pixels, self.settings.max_pixels)
        given = options.given()
        for name in self.taken_options:
            if (value := given.get(name)) is not None:
                self.check_range(name, value, ceiling)
        area = self.area_limits(options)
        if area.min_pixels > area.max_pixels:
            raise InvalidOption(
                f"min_pixels {area.min_pixels} is above max_pixels {area.max_pixels}"
                " (an absent one is the checkpoint's)",
                min_pixels=area.min_pixels,
                max_pixels=area.max_pixels,
            )

    def area_limits(self, options: PreprocessOptions) -> AreaLimits:
        """The checkpoint's limits with the request's in their place where given."""
        min_pixels, max_pixels = options.min_pixels, options.max_pixels
        return AreaLimits(
            self.settings.min_pixels if min_pixels is None else min_pixels,
            self.settings.max_pixels if max_pixels is None else max_pixels,
        )

    def fit_of(self, height: int, width: int, options: PreprocessOptions) -> Fit:
        self.check_values(options)
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise AspectRatioExceeded(
                f"the image is {width}x{height}, its longer side "
                f"{max(height, width) / min(height, width):.1f} times the shorter, "
                f"the limit is {MAX_ASPECT_RATIO}",
                height=height,
                width=width,
                max_aspect_ratio=MAX_ASPECT_RATIO,
            )
        patch_size, merge_size = self.settings.patch_size, self.merge_size
        target_height, target_width = rounded_size(
            height, width, patch_size * merge_size, self.area_limits(options)
        )
        grid = Grid(1, target_height // patch_size, target_width // patch_size)
        return Fit(height, width, target_height, target_width, target_height, target_width, grid)

    def patchify(self, frames_THWC: torch.Tensor) -> torch.Tensor:
        """Order [t, H/m, W/m, m, m, C, tp, ph, pw]: the patches of one merge block stand together. The last
        frame repeats to fill a temporal patch, so that an image's only frame fills it alone."""
        num_frames, height, width, _ = frames_THWC.shape
        patch, merge, temporal = self.settings.patch_size, self.merge_size, self.settings.temporal_patch_size
        block = patch * merge
        if num_frames == 1:
            num_distinct = 1  # normalised once, then copied
        else:
            num_distinct = temporal
            missing = -num_frames % temporal
            frames_THWC = torch.cat([frames_THWC, frames_THWC[-1:].expand(missing, -1, -1, -1)])
        blocks_ThwC = frames_THWC.reshape(
            -1, num_distinct, height // block, merge, patch, width // block, merge, patch, 3
        )
        patches_PCtpp = blocks_ThwC.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(
            -1, 3, num_distinct, patch, patch
        )
        values_PCtpp = torch.empty(
            (patches_PCtpp.shape[0], 3, temporal, patch, patch),
            dtype=torch.float32,
            device=frames_THWC.device,
        )
        normalise_into(values_PCtpp[:, :, :num_distinct], patches_PCtpp, self.settings.normalisation)
        values_PCtpp[:, :, num_distinct:] = values_PCtpp[:, :, num_distinct - 1 : num_distinct]
        return values_PCtpp.view(-1, self.patch_dim)
