"""Preprocessing of Qwen3-VL and Qwen3.5. Sides are rounded to whole merge blocks, within limits of the area.

Owns the target sizes, the sampling of a clip's frames, the per-request overrides and the patch order. The
references are ``Qwen2VLImageProcessor`` with the torchvision backend (``transformers.models.qwen2_vl``) and
``Qwen3VLVideoProcessor`` (``transformers.models.qwen3_vl``).

Shape suffixes: T frames, H height, W width, C channels, P patches.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from encoder_service.errors import AspectRatioExceeded, InvalidOption
from encoder_service.ingest.decode import DecodeLimits, Transparent
from encoder_service.ingest.preprocessor import ImagePlan, Preprocessor, check_range, overridden
from encoder_service.ingest.resize import normalise_into
from encoder_service.ingest.settings import (
    QwenVideoSettings,
    QwenVLSettings,
    Settings,
    SettingsReader,
    parse_qwen_video,
    parse_qwen_vl,
)
from encoder_service.ingest.video.clip import ClipPlan, ClipRules
from encoder_service.ingest.video.source import ClipHeader, ClipLimits
from encoder_service.types import Grid, Modality, PreprocessOptions

MAX_ASPECT_RATIO = 200


class AreaLimits(NamedTuple):
    """Limits of the target area, in pixels."""

    min_pixels: int
    max_pixels: int


def rounded_size(height: int, width: int, factor: int, area: AreaLimits) -> tuple[int, int]:
    """Target (height, width): multiples of ``factor`` near the image's own size, within ``area`` if possible,
    at nearly the same aspect ratio. If the limits contradict each other, an image above the upper one is
    reduced to it, and any other is enlarged to the lower one.

    Follows ``smart_resize`` of the reference step by step in float64: halves round to the even multiple, the
    area is compared with the rounded sides, and the scale is computed from the original sides.
    """
    return _rounded_volume(height, width, factor, area, num_frames=1, counted_frames=1)


def _rounded_volume(
    height: int, width: int, factor: int, area: AreaLimits, *, num_frames: int, counted_frames: int
) -> tuple[int, int]:
    """``rounded_size`` of frames that share an area. counted_frames: num_frames rounded to whole temporal
    patches, as the reference does before it compares the area."""
    rounded = round(height / factor) * factor, round(width / factor) * factor
    volume = counted_frames * rounded[0] * rounded[1]
    if volume > area.max_pixels:
        shrink = math.sqrt((num_frames * height * width) / area.max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if volume < area.min_pixels:
        grow = math.sqrt(area.min_pixels / (num_frames * height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rounded


def qwen_indices(
    num_source_frames: int, source_fps: float, *, fps: float, min_frames: int, max_frames: int
) -> list[int]:
    """Indices of frames spread evenly from the first to the last: as many as ``fps`` asks for within the
    bounds, and at most all of them (``Qwen3VLVideoProcessor.sample_frames``). num_source_frames: at least
    1."""
    wanted = int(num_source_frames / source_fps * fps)
    count = min(max(wanted, min_frames), max_frames, num_source_frames)
    indices = np.linspace(0, num_source_frames - 1, count).round().astype(int)
    return [int(index) for index in indices]


def qwen_target_size(
    num_frames: int, height: int, width: int, *, factor: int, temporal: int, settings: QwenVideoSettings
) -> tuple[int, int]:
    """Target (height, width) of a clip's frames: multiples of ``factor``; all frames together fit the area.

    Follows ``smart_resize`` of the video processor step by step in float64. A single frame, which the
    reference refuses, is repeated to a whole temporal patch and counts as one. Raises AspectRatioExceeded.
    """
    num_frames = max(num_frames, temporal)
    max_pixels = settings.max_pixels
    if settings.cap_pixels_per_frame:
        cap = min(settings.max_video_tokens * factor * factor, max_pixels // num_frames)
        max_pixels = max(cap, int(settings.min_pixels * 1.05)) * num_frames
    area = AreaLimits(settings.min_pixels, max_pixels)
    what = "clip's frames count as"
    return framed_size(num_frames, height, width, factor=factor, temporal=temporal, area=area, what=what)


def framed_size(
    num_frames: int, height: int, width: int, *, factor: int, temporal: int, area: AreaLimits, what: str
) -> tuple[int, int]:
    """Target (height, width) of frames that share an area, for Qwen's clips, and for images and clips of GLM.
    Sides below ``factor`` are first enlarged to it. what: names the frames in AspectRatioExceeded."""
    num_frames = max(num_frames, temporal)
    if height < factor or width < factor:
        grow = max(factor / height, factor / width)
        height, width = int(height * grow), int(width * grow)
    check_aspect(height, width, what)
    return _rounded_volume(
        height,
        width,
        factor,
        area,
        num_frames=num_frames,
        counted_frames=round(num_frames / temporal) * temporal,
    )


def check_aspect(height: int, width: int, what: str) -> None:
    """Raises AspectRatioExceeded if the longer side exceeds MAX_ASPECT_RATIO times the shorter."""
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        ratio = max(height, width) / min(height, width)
        raise AspectRatioExceeded(
            f"the {what} {width}x{height}, the longer side {ratio:.1f} times the shorter, the limit is "
            f"{MAX_ASPECT_RATIO}",
            height=height,
            width=width,
            max_aspect_ratio=MAX_ASPECT_RATIO,
        )


def check_pair(options: PreprocessOptions, low: str, high: str) -> None:
    """Raises InvalidOption if a request's lower limit is above its upper one. One alone may contradict the
    checkpoint's other: the upper limit is compared first, as in the reference."""
    least, most = getattr(options, low), getattr(options, high)
    if least is not None and most is not None and least > most:
        raise InvalidOption(
            f"{low} {least} is above {high} {most}: lower one, raise the other, or leave one out",
            **{low: least, high: most},
        )


class QwenVLPreprocessor(Preprocessor):
    """Qwen3-VL and Qwen3.5, both dense and mixture-of-experts."""

    family = "qwen_vl"
    rules = "qwen_vl.1"  # change when the same settings give different pixels
    options = ("min_pixels", "max_pixels")

    def __init__(
        self,
        settings: QwenVLSettings,
        limits: DecodeLimits,
        clips: ClipRules | None = None,
        transparent: Transparent = "white",
    ) -> None:
        super().__init__(settings, limits, clips, transparent, frames_per_patch=settings.temporal_patch_size)
        self.settings = settings

    @property
    def patch_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.patch_dim,),)

    def check_values(self, options: PreprocessOptions) -> None:
        ceiling = max(self.limits.max_image_pixels, self.settings.max_pixels)
        for name, value in options.given().items():
            if name in self.options:
                check_range(name, value, ceiling)
        check_pair(options, "min_pixels", "max_pixels")

    def plan_image(self, height: int, width: int, options: PreprocessOptions) -> ImagePlan:
        check_aspect(height, width, "image is")
        patch_size = self.settings.patch_size
        area = AreaLimits(**overridden(AreaLimits._fields, self.settings, options))
        target = rounded_size(height, width, patch_size * self.merge_size, area)
        return ImagePlan(target, target, Grid(1, target[0] // patch_size, target[1] // patch_size))

    def patchify(self, frames_THWC: torch.Tensor) -> torch.Tensor:
        """Patches in the order [t, H/m, W/m, m, m, C, tp, ph, pw], so that the patches of one merge block are
        adjacent. The last frame is repeated to fill a temporal patch; an image's only frame fills it
        alone."""
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


SettingsT = TypeVar("SettingsT", bound=Settings)


class PairedClips(ClipRules, Generic[SettingsT]):
    """What the clips of Qwen and GLM have in common: settings that options replace by name, and pieces of any
    number of whole temporal patches. temporal: frames of one of them; the last may have fewer. merge_pixels:
    pixels of a merge block's side."""

    def __init__(
        self,
        settings: SettingsT,
        images: QwenVLSettings,
        limits: ClipLimits,
        transparent: Transparent = "white",
    ) -> None:
        super().__init__(settings, limits, images.patch_size, transparent)
        self.settings = settings
        self.images = images
        self.merge_pixels = images.patch_size * images.merge_size
        self.temporal = images.temporal_patch_size

    def check_values(self, options: PreprocessOptions) -> None:
        for name in ("min_pixels", "max_pixels"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise InvalidOption(f"{name} is {value}, needs at least 1", option=name, found=value)
        check_pair(options, "min_pixels", "max_pixels")
        check_pair(options, "min_frames", "max_frames")

    def with_options(self, options: PreprocessOptions) -> SettingsT:
        """The checkpoint's settings, overridden by those of the request."""
        given: dict[str, Any] = options.given()
        return dataclasses.replace(self.settings, **given)

    def piece_frames(self, plan: ClipPlan, max_patches: int) -> int:
        return max(1, max_patches // (plan.grid.h * plan.grid.w)) * self.temporal

    def depth(self, num_frames: int) -> int:
        return -(-num_frames // self.temporal)

    def grid(self, num_frames: int, padded: tuple[int, int]) -> Grid:
        """padded: (height, width) of the target in pixels."""
        return Grid(self.depth(num_frames), padded[0] // self.patch_size, padded[1] // self.patch_size)


class QwenClips(PairedClips[QwenVideoSettings]):
    """Qwen3-VL and Qwen3.5."""

    rules = "qwen_video.1"
    options = ("min_pixels", "max_pixels", "fps", "min_frames", "max_frames")

    def sample(self, header: ClipHeader, options: PreprocessOptions) -> list[int]:
        settings = self.with_options(options)
        return qwen_indices(
            header.num_frames,
            header.fps,
            fps=settings.fps,
            min_frames=settings.min_frames,
            max_frames=settings.max_frames,
        )

    def sized(self, num_frames: int, height: int, width: int, options: PreprocessOptions) -> ClipPlan:
        target = qwen_target_size(
            num_frames,
            height,
            width,
            factor=self.merge_pixels,
            temporal=self.temporal,
            settings=self.with_options(options),
        )
        return ClipPlan((), (), self.grid(num_frames, target), *target)


class LingPreprocessor(QwenVLPreprocessor):
    """Ling-3.0-VL: images alone, by Qwen's rules."""

    family = "ling_vl"
    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE,)


def qwen_vl_preprocessor(
    reader: SettingsReader,
    video: SettingsReader | None,
    limits: DecodeLimits,
    clip_limits: ClipLimits,
    transparent: Transparent,
) -> QwenVLPreprocessor:
    """As ``preprocessor.Build``."""
    images = parse_qwen_vl(reader)
    settings = None if video is None else parse_qwen_video(video, images)
    clips = None if settings is None else QwenClips(settings, images, clip_limits, transparent)
    return QwenVLPreprocessor(images, limits, clips, transparent)


def ling_vl_preprocessor(
    reader: SettingsReader,
    video: SettingsReader | None,  # noqa: ARG001
    limits: DecodeLimits,
    clip_limits: ClipLimits,  # noqa: ARG001
    transparent: Transparent,
) -> LingPreprocessor:
    """As ``preprocessor.Build``."""
    return LingPreprocessor(parse_qwen_vl(reader), limits, None, transparent)
