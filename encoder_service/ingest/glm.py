"""Preprocessing of GLM: 4.1V, 4.5V and 4.6V, GLM-OCR, and GLM-5.3-Flash.

Owns their settings, target sizes and the sampling of a clip's frames; patches are cut as Qwen's. An image
counts as the frames of one temporal patch, so that a limit of pixels is one of both frames together. The
processor that a checkpoint names decides how its clips are sampled: GLM-4.6V's differs from GLM-4.1V's.

Clips last as long as their number of frames at their rate. Where the number of sampled frames is odd, the
last is taken twice. The references are the image and video processors of ``transformers.models.glm4v``,
``glm46v`` and ``glm5_next``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from encoder_service.errors import InvalidOption
from encoder_service.ingest.decode import DecodeLimits, Transparent
from encoder_service.ingest.preprocessor import ImagePlan, overridden
from encoder_service.ingest.qwen_vl import AreaLimits, PairedClips, QwenVLPreprocessor, framed_size
from encoder_service.ingest.settings import QwenVLSettings, SettingsReader, parse_qwen_vl
from encoder_service.ingest.video.clip import ClipPlan
from encoder_service.ingest.video.source import ClipHeader, ClipLimits
from encoder_service.types import Grid, PreprocessOptions

# GLM-4.6V samples less often the longer a clip is: frames per second and temporal patch by seconds.
RATES_46 = ((30, 3.0), (300, 1.0), (math.inf, 0.5))
MAX_SECONDS_46 = 2400
MAX_FRAMES_46 = 640


@dataclass(frozen=True)
class Glm5NextSettings(QwenVLSettings):
    """As QwenVLSettings; sides are rounded to patch_expand_factor merge blocks. min_pixels, max_pixels: of
    ``min_image_tokens`` and ``max_image_tokens`` rows."""

    patch_expand_factor: int


@dataclass(frozen=True)
class GlmVideoSettings:
    """min_pixels, max_pixels: limits of frames times height times width of the target. fps: sampled frames
    per second. max_duration_s: longer clips get as many frames as this time; None for no such limit.
    max_frames: None for no such limit. GLM-4.6V uses only the first two."""

    min_pixels: int
    max_pixels: int
    fps: float
    max_duration_s: float | None
    max_frames: int | None


def glm4v_indices(
    num_source_frames: int, source_fps: float, *, fps: float, max_duration_s: float
) -> list[int]:
    """Indices of frames at ``fps``; of a clip longer than ``max_duration_s`` as many frames as that time has,
    spread evenly (``Glm4vVideoProcessor.sample_frames``). num_source_frames: at least 1."""
    last, duration_s = num_source_frames - 1, num_source_frames / source_fps
    if duration_s <= max_duration_s:
        count = max(math.floor(duration_s * fps), 1)
        indices = [min(last, math.ceil(index * source_fps / fps)) for index in range(count)]
    elif (count := max(1, int(max_duration_s * fps))) >= num_source_frames:
        indices = list(range(num_source_frames))
    else:
        indices = [min(last, math.ceil(at_s * source_fps)) for at_s in np.linspace(0, duration_s, count)]
    return _even(indices)


def glm46v_indices(num_source_frames: int, source_fps: float, *, temporal: int) -> list[int]:
    """Indices of frames at a rate that depends on the clip's length (``Glm46VVideoProcessor.sample_frames``).
    temporal: frames of a temporal patch. num_source_frames: at least 1."""
    counted_s = min(num_source_frames / source_fps, MAX_SECONDS_46)
    rate = next(rate for seconds, rate in RATES_46 if counted_s <= seconds)
    count = min(int(counted_s * rate * temporal), MAX_FRAMES_46)
    return _timed_indices(num_source_frames, source_fps, count, 1 / (temporal * rate))


def glm5_next_indices(
    num_source_frames: int,
    source_fps: float,
    *,
    fps: float,
    max_frames: int | None,
    max_duration_s: float | None,
) -> list[int]:
    """Indices of frames at ``fps`` (``Glm5NextVideoProcessor.sample_frames``). num_source_frames: at least
    1."""
    counted_s = num_source_frames / source_fps
    if max_duration_s is not None:
        counted_s = min(counted_s, max_duration_s)
    count = int(counted_s * fps)
    return _timed_indices(
        num_source_frames, source_fps, count if max_frames is None else min(count, max_frames), 1 / fps
    )


def _timed_indices(num_source_frames: int, source_fps: float, count: int, step_s: float) -> list[int]:
    """The first frame at or after every ``step_s``, up to the clip's last whole second. Unless these are
    ``count``: that many from the first to the last of them, or if they are more, from the clip's first to its
    last. A clip for which the reference takes no frame, and fails, has one."""
    count = max(count, 1)
    last_s, frame_s = int(num_source_frames / source_fps), 1 / source_fps
    indices: list[int] = []
    if num_source_frames >= count:
        next_s = 0.0
        for index in range(num_source_frames):
            if index * frame_s >= next_s:
                next_s += step_s
                indices.append(index)
                if next_s >= last_s:
                    break
    if len(indices) < count:
        first, last = (indices[0], indices[-1]) if indices else (0, num_source_frames - 1)
        indices = np.linspace(first, last, count, dtype=int).tolist()
    elif len(indices) > count:
        indices = np.linspace(0, num_source_frames - 1, count, dtype=int).tolist()
    return _even(indices)


def _even(indices: Sequence[int]) -> list[int]:
    """The different indices, and the last once more if their number is odd."""
    unique = list(dict.fromkeys(indices))
    return unique + unique[-1:] * (len(unique) % 2)


def canvas_size(
    num_frames: int, height: int, width: int, *, factor: int, temporal: int, area: AreaLimits
) -> tuple[int, int]:
    """GLM-5.3-Flash's canvas (height, width) of frames: sides rounded up to multiples of ``factor``, above
    the upper limit the largest with nearly the same aspect ratio that fits (``smart_resize`` of
    ``glm5_next``, step by step in float64). Raises InvalidOption if one block for each frame does not fit."""
    frames = max(temporal, round(num_frames / temporal) * temporal)

    def aligned(side: int) -> int:
        return math.ceil(side / factor) * factor

    canvas = aligned(height), aligned(width)
    if frames * canvas[0] * canvas[1] < area.min_pixels:
        grow = math.sqrt(area.min_pixels / (num_frames * height * width))
        canvas = aligned(max(1, math.ceil(height * grow))), aligned(max(1, math.ceil(width * grow)))
    if frames * canvas[0] * canvas[1] <= area.max_pixels:
        return canvas
    smallest = frames * factor**2
    if area.max_pixels < smallest:
        raise InvalidOption(
            f"max_pixels is {area.max_pixels}, {frames} frames of one block have {smallest}: raise it, or "
            "send fewer frames",
            option="max_pixels",
            found=area.max_pixels,
            needed=smallest,
        )
    low, high, best = 1, height, (factor, factor)
    while low <= high:
        middle = (low + high) // 2
        candidate = aligned(middle), aligned(max(1, math.floor(width * middle / height)))
        if frames * candidate[0] * candidate[1] <= area.max_pixels:
            best, low = candidate, middle + 1
        else:
            high = middle - 1
    return best


def content_size(
    num_frames: int, height: int, width: int, canvas: tuple[int, int], area: AreaLimits
) -> tuple[int, int]:
    """Target (height, width) of frames on a canvas, at their own aspect ratio. Frames that have the least
    number of pixels are never enlarged."""
    scale = min(canvas[0] / height, canvas[1] / width)
    if num_frames * height * width >= area.min_pixels:
        scale = min(1.0, scale)
    return (
        max(1, min(canvas[0], math.floor(height * scale))),
        max(1, min(canvas[1], math.floor(width * scale))),
    )


class GlmPreprocessor(QwenVLPreprocessor):
    """GLM-4.1V, 4.5V, 4.6V and GLM-OCR. min_pixels, max_pixels: of the frames of a temporal patch."""

    family = "glm4v"
    rules = "glm4v.1"

    def plan_image(self, height: int, width: int, options: PreprocessOptions) -> ImagePlan:
        patch_size, temporal = self.settings.patch_size, self.settings.temporal_patch_size
        area = AreaLimits(**overridden(AreaLimits._fields, self.settings, options))
        target = framed_size(
            temporal,
            height,
            width,
            factor=patch_size * self.merge_size,
            temporal=temporal,
            area=area,
            what="image counts as",
        )
        return ImagePlan(target, target, Grid(1, target[0] // patch_size, target[1] // patch_size))


class Glm5NextPreprocessor(QwenVLPreprocessor):
    """GLM-5.3-Flash. min_pixels, max_pixels: of the canvas of a temporal patch's frames."""

    family = "glm5_next"
    rules = "glm5_next.1"
    settings: Glm5NextSettings

    def plan_image(self, height: int, width: int, options: PreprocessOptions) -> ImagePlan:
        settings = self.settings
        patch_size, temporal = settings.patch_size, settings.temporal_patch_size
        area = AreaLimits(**overridden(AreaLimits._fields, settings, options))
        factor = patch_size * settings.merge_size * settings.patch_expand_factor
        canvas = canvas_size(temporal, height, width, factor=factor, temporal=temporal, area=area)
        target = content_size(temporal, height, width, canvas, area)
        return ImagePlan(target, canvas, Grid(1, canvas[0] // patch_size, canvas[1] // patch_size))


class GlmClips(PairedClips[GlmVideoSettings]):
    """GLM-4.1V and 4.5V."""

    rules = "glm4v_video.1"
    options: ClassVar[tuple[str, ...]] = ("min_pixels", "max_pixels", "fps")

    def sample(self, header: ClipHeader, options: PreprocessOptions) -> list[int]:
        settings = self.with_options(options)
        assert settings.max_duration_s is not None
        return glm4v_indices(
            header.num_frames, header.fps, fps=settings.fps, max_duration_s=settings.max_duration_s
        )

    def sized(self, num_frames: int, height: int, width: int, options: PreprocessOptions) -> ClipPlan:
        settings, images = self.with_options(options), self.images
        target = framed_size(
            num_frames,
            height,
            width,
            factor=images.patch_size * images.merge_size,
            temporal=images.temporal_patch_size,
            area=AreaLimits(settings.min_pixels, settings.max_pixels),
            what="clip's frames count as",
        )
        return ClipPlan((), (), self.grid(num_frames, target), *target)


class Glm46Clips(GlmClips):
    """GLM-4.6V and GLM-OCR, whose reference has no other rate."""

    rules = "glm46v_video.1"
    options = ("min_pixels", "max_pixels")

    def sample(self, header: ClipHeader, options: PreprocessOptions) -> list[int]:
        del options
        return glm46v_indices(header.num_frames, header.fps, temporal=self.images.temporal_patch_size)


class Glm5NextClips(GlmClips):
    """GLM-5.3-Flash: frames are padded to a canvas, as images are."""

    rules = "glm5_next_video.1"
    options = ("min_pixels", "max_pixels", "fps", "max_frames")
    images: Glm5NextSettings

    def sample(self, header: ClipHeader, options: PreprocessOptions) -> list[int]:
        settings = self.with_options(options)
        return glm5_next_indices(
            header.num_frames,
            header.fps,
            fps=settings.fps,
            max_frames=settings.max_frames,
            max_duration_s=settings.max_duration_s,
        )

    def sized(self, num_frames: int, height: int, width: int, options: PreprocessOptions) -> ClipPlan:
        settings, images = self.with_options(options), self.images
        temporal, area = images.temporal_patch_size, AreaLimits(settings.min_pixels, settings.max_pixels)
        factor = images.patch_size * images.merge_size * images.patch_expand_factor
        canvas = canvas_size(num_frames, height, width, factor=factor, temporal=temporal, area=area)
        target = content_size(num_frames, height, width, canvas, area)
        return ClipPlan((), (), self.grid(num_frames, canvas), *target)


def glm4v_preprocessor(
    reader: SettingsReader,
    video: SettingsReader | None,
    limits: DecodeLimits,
    clip_limits: ClipLimits,
    transparent: Transparent,
) -> GlmPreprocessor:
    """As ``preprocessor.Build``."""
    images = parse_qwen_vl(reader)
    clips = None
    if video is not None:
        kind = GlmClips if _video_processor(video) == "Glm4vVideoProcessor" else Glm46Clips
        clips = kind(parse_glm_video(video, images), images, clip_limits, transparent)
    return GlmPreprocessor(images, limits, clips, transparent)


def glm5_next_preprocessor(
    reader: SettingsReader,
    video: SettingsReader | None,
    limits: DecodeLimits,
    clip_limits: ClipLimits,
    transparent: Transparent,
) -> Glm5NextPreprocessor:
    """As ``preprocessor.Build``."""
    images = parse_glm5_next(reader)
    clips = None
    if video is not None:
        clips = Glm5NextClips(parse_glm5_next_video(video, images), images, clip_limits, transparent)
    return Glm5NextPreprocessor(images, limits, clips, transparent)


def _video_processor(video: SettingsReader) -> str:
    """The reference's class for clips: as named, or for a file of image settings the one that belongs to the
    named class for images. Raises UnsupportedCheckpoint."""
    known = ("Glm4vVideoProcessor", "Glm46VVideoProcessor")
    of_images = str(video.values.get("image_processor_type", "")).removesuffix("Fast")
    name = video.values.get("video_processor_type", of_images.replace("ImageProcessor", "VideoProcessor"))
    if name not in known:
        raise video.refuse("video_processor_type", name, " or ".join(known))
    return str(name)


def parse_glm_video(reader: SettingsReader, images: QwenVLSettings) -> GlmVideoSettings:
    """The clip settings of GLM-4.1V, 4.5V and 4.6V. Raises UnsupportedCheckpoint."""
    sizes = {name: reader.count(name) for name in ("patch_size", "merge_size", "temporal_patch_size")}
    reader.check_same(images, sizes)
    settings = GlmVideoSettings(
        min_pixels=reader.area("min_pixels", "shortest_edge"),
        max_pixels=reader.area("max_pixels", "longest_edge"),
        fps=reader.number("fps", default=2.0),
        max_duration_s=reader.number("max_duration", default=300.0),
        max_frames=None,
    )
    reader.check_order(settings, "min_pixels", "max_pixels")
    return settings


def _token_limits(reader: SettingsReader, temporal: int, factor: int) -> tuple[int, int]:
    """min_pixels and max_pixels of the limits in rows."""
    pixels = temporal * factor**2
    least, most = reader.count("min_image_tokens"), reader.count("max_image_tokens")
    if least > most:
        raise reader.refuse("min_image_tokens", least, f"at most max_image_tokens = {most}")
    return least * pixels, most * pixels


def parse_glm5_next(reader: SettingsReader) -> Glm5NextSettings:
    """The image settings of GLM-5.3-Flash. Raises UnsupportedCheckpoint."""
    patch_size, merge_size = reader.count("patch_size"), reader.count("merge_size")
    temporal, expand = reader.count("temporal_patch_size"), reader.count("patch_expand_factor", default=1)
    least, most = _token_limits(reader, temporal, patch_size * merge_size * expand)
    return Glm5NextSettings(patch_size, merge_size, temporal, least, most, reader.normalisation(), expand)


def parse_glm5_next_video(reader: SettingsReader, images: Glm5NextSettings) -> GlmVideoSettings:
    """The clip settings of GLM-5.3-Flash; a ``max_duration`` of 0 is none. Raises UnsupportedCheckpoint."""
    sizes = {name: reader.count(name) for name in ("patch_size", "merge_size", "temporal_patch_size")}
    sizes["patch_expand_factor"] = reader.count("patch_expand_factor", default=1)
    reader.check_same(images, sizes)
    factor = images.patch_size * images.merge_size * images.patch_expand_factor
    least, most = _token_limits(reader, images.temporal_patch_size, factor)
    has_duration = reader.has("max_duration") and reader.values["max_duration"] != 0
    return GlmVideoSettings(
        least,
        most,
        fps=reader.number("fps", default=2.0),
        max_duration_s=reader.number("max_duration") if has_duration else None,
        max_frames=reader.count("max_frames", default=2048),
    )
