"""Preprocessing of Kimi-K2.5 (MoonViT). Images and frames keep their size up to a patch budget and are
padded.

Owns the target size, the padding, the sampling of a clip's frames, the per-request overrides and the patch
order. The references are ``Kimi_K25ImageProcessor`` and ``Kimi_K25VideoProcessor``
(``transformers.models.kimi_k25``).

Shape suffixes: T frames, H height, W width, C channels, P patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch

from encoder_service.ingest.decode import DecodeLimits, Transparent
from encoder_service.ingest.preprocessor import ImagePlan, Preprocessor, check_range, overridden
from encoder_service.ingest.resize import normalise_into
from encoder_service.ingest.settings import (
    MoonViTSettings,
    MoonViTVideoSettings,
    SettingsReader,
    parse_moonvit,
    parse_moonvit_video,
)
from encoder_service.ingest.video.clip import ClipPlan, ClipRules
from encoder_service.ingest.video.source import ClipHeader, ClipLimits
from encoder_service.types import Grid, PreprocessOptions


class PatchLimits(NamedTuple):
    """Limits of the patches of one image before padding, and of the patches along one side."""

    max_patches: int
    max_patches_per_side: int


def limited_size(height: int, width: int, patch_size: int, limits: PatchLimits) -> tuple[int, int]:
    """Target (height, width) before padding: scaled down to the limits, never up, with sides rounded down.

    Follows ``navit_resize`` of the reference step by step in float64. The budget counts whole patches of the
    original image, so after padding an image may have slightly more patches than the budget.
    """
    num_patches = max(1.0, height // patch_size) * max(1.0, width // patch_size)
    max_side = limits.max_patches_per_side * patch_size
    scale = min(1.0, math.sqrt(limits.max_patches / num_patches), max_side / height, max_side / width)
    return min(max(1, int(height * scale)), max_side), min(max(1, int(width * scale)), max_side)


# Target (height, width) before padding, of height, width, patch size and limits.
SizeRule: TypeAlias = Callable[[int, int, int, PatchLimits], tuple[int, int]]


def most_patches(
    patch_size: int, merge_size: int, limits: PatchLimits, size_of: SizeRule = limited_size
) -> int:
    """Patches of the largest grid that the rule and padding give for an image of at least one patch per side.
    The largest comes from an image whose sides fall just short of one more patch, which the budget does not
    count."""
    most = 0
    for rows in range(1, limits.max_patches_per_side + 1):
        for columns in range(limits.max_patches // rows, limits.max_patches // rows + 3):
            sides = ((rows + 1) * patch_size - 1, (columns + 1) * patch_size - 1)
            grid_h, grid_w = (
                -(-side // (patch_size * merge_size)) * merge_size
                for side in size_of(*sides, patch_size, limits)
            )
            if max(grid_h, grid_w) <= limits.max_patches_per_side:
                most = max(most, grid_h * grid_w)
    return most


def moonvit_indices(
    num_source_frames: int, source_fps: float, *, fps: float, max_frames: int | None
) -> list[int]:
    """Splits the frames into equal spans, as many as ``fps`` asks for but at least one, and takes the first
    frame of each. If ``fps`` asks for more frames than there are, each is taken once; the reference fails
    there."""
    count = max(1, int(num_source_frames / source_fps * fps))
    count = min(count, num_source_frames, num_source_frames if max_frames is None else max_frames)
    return [int(index) for index in np.arange(count, dtype=int) * num_source_frames // count]


class MoonViTPreprocessor(Preprocessor):
    """Kimi-K2.5 and K2.6. No aspect ratio is refused: the limit per side bounds even a narrow strip."""

    family: ClassVar[str] = "kimi_k25"
    rules: ClassVar[str] = "moonvit.1"  # change when the same settings give different pixels
    options: ClassVar[tuple[str, ...]] = ("max_patches", "max_patches_per_side")
    merges_time = True
    clips: MoonViTClips | None

    def __init__(
        self,
        settings: MoonViTSettings,
        limits: DecodeLimits,
        clips: MoonViTClips | None = None,
        transparent: Transparent = "white",
    ) -> None:
        super().__init__(settings, limits, clips, transparent, frames_per_patch=1)
        self.settings = settings

    @property
    def longest_item(self) -> int:
        patch_size, merge_size = self.settings.patch_size, self.merge_size
        longest = most_patches(patch_size, merge_size, self.patch_limits(PreprocessOptions()))
        if self.clips is not None:
            frames = most_patches(patch_size, merge_size, self.clips.frame_limits(PreprocessOptions()))
            longest = max(longest, self.clips.settings.chunk_frames * frames)
        return longest

    @property
    def patch_shapes(self) -> tuple[tuple[int, ...], ...]:
        patch_size = self.settings.patch_size
        return ((self.patch_dim,), (3, patch_size, patch_size))

    def check_values(self, options: PreprocessOptions) -> None:
        self.patch_limits(options)

    def patch_limits(self, options: PreprocessOptions) -> PatchLimits:
        """The checkpoint's limits, overridden by those of the request. Raises InvalidOption."""
        return _patch_limits(self.settings, self.settings.patch_size, self.limits.max_image_pixels, options)

    def plan_image(self, height: int, width: int, options: PreprocessOptions) -> ImagePlan:
        patch_size = self.settings.patch_size
        target = limited_size(height, width, patch_size, self.patch_limits(options))
        grid = padded_grid(1, target, patch_size, self.merge_size)
        return ImagePlan(target, (grid.h * patch_size, grid.w * patch_size), grid)

    def patchify(self, frames_THWC: torch.Tensor) -> torch.Tensor:
        """Patches in row order within a frame, frame by frame: [t, h, w, C, ph, pw]."""
        num_frames, height, width, _ = frames_THWC.shape
        patch = self.settings.patch_size
        blocks_ThwC = frames_THWC.reshape(num_frames, height // patch, patch, width // patch, patch, 3)
        patches_PCpp = blocks_ThwC.permute(0, 1, 3, 5, 2, 4).reshape(-1, 3, patch, patch)
        values_PCpp = torch.empty(patches_PCpp.shape, dtype=torch.float32, device=frames_THWC.device)
        normalise_into(values_PCpp, patches_PCpp, self.settings.normalisation)
        return values_PCpp.view(-1, self.patch_dim)


class MoonViTClips(ClipRules):
    """Kimi-K2.5 and K2.6. The tower averages rows over the frames of a chunk. A chunk is one piece."""

    rules = "moonvit_video.1"
    options = ("max_patches", "max_patches_per_side", "fps", "max_frames")

    def __init__(
        self,
        settings: MoonViTVideoSettings,
        images: MoonViTSettings,
        limits: ClipLimits,
        transparent: Transparent = "white",
    ) -> None:
        super().__init__(settings, limits, images.patch_size, transparent)
        self.settings = settings
        self._merge_size = images.merge_size

    def check_values(self, options: PreprocessOptions) -> None:
        self.frame_limits(options)

    def frame_limits(self, options: PreprocessOptions) -> PatchLimits:
        """The limits of one frame: the checkpoint's, overridden by the request's. Raises InvalidOption."""
        return _patch_limits(self.settings, self.patch_size, self.limits.max_frame_pixels, options)

    def sample(self, header: ClipHeader, options: PreprocessOptions) -> list[int]:
        return moonvit_indices(
            header.num_frames,
            header.fps,
            fps=self.settings.fps if options.fps is None else options.fps,
            max_frames=self.settings.max_frames if options.max_frames is None else options.max_frames,
        )

    def sized(self, num_frames: int, height: int, width: int, options: PreprocessOptions) -> ClipPlan:
        target = limited_size(height, width, self.patch_size, self.frame_limits(options))
        grid = padded_grid(num_frames, target, self.patch_size, self._merge_size)
        chunk = self.settings.chunk_frames
        chunks = tuple(
            grid._replace(t=min(chunk, num_frames - start)) for start in range(0, num_frames, chunk)
        )
        return ClipPlan((), (), grid, *target, chunks)

    def piece_frames(self, plan: ClipPlan, max_patches: int) -> int:
        del plan, max_patches
        return self.settings.chunk_frames

    def depth(self, num_frames: int) -> int:
        return num_frames


def _patch_limits(
    settings: MoonViTSettings | MoonViTVideoSettings,
    patch_size: int,
    max_pixels: int,
    options: PreprocessOptions,
) -> PatchLimits:
    """The limits, overridden by the request's. max_pixels: limit of one image or frame. Raises
    InvalidOption."""
    # A side cannot exceed the checkpoint's limit, because the tower's rotary table ends there.
    ceilings = PatchLimits(
        max(max_pixels // patch_size**2, settings.max_patches), settings.max_patches_per_side
    )
    given = options.given()
    for name, ceiling in ceilings._asdict().items():
        if name in given:
            check_range(name, given[name], ceiling)
    return PatchLimits(**overridden(PatchLimits._fields, settings, options))


def padded_grid(num_frames: int, target: tuple[int, int], patch_size: int, merge_size: int) -> Grid:
    """The grid of frames padded to whole merge blocks. target: (height, width) in pixels."""
    grid_h, grid_w = (-(-side // (patch_size * merge_size)) * merge_size for side in target)
    return Grid(num_frames, grid_h, grid_w)


def moonvit_preprocessor(
    reader: SettingsReader,
    video: SettingsReader | None,
    limits: DecodeLimits,
    clip_limits: ClipLimits,
    transparent: Transparent,
) -> MoonViTPreprocessor:
    """As ``preprocessor.Build``."""
    images = parse_moonvit(reader)
    settings = None if video is None else parse_moonvit_video(video, images)
    clips = None if settings is None else MoonViTClips(settings, images, clip_limits, transparent)
    return MoonViTPreprocessor(images, limits, clips, transparent)
