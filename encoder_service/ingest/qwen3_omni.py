"""Preprocessing of Qwen3-Omni. Images are Qwen's; each frame of a clip is sized like an image.

Owns the sampling of a clip's frames, the frames' target size and the limits of its area. The references are
``Qwen2VLVideoProcessor`` (``transformers.models.qwen2_vl``) and what ``Qwen3OmniMoeProcessor``
(``transformers.models.qwen3_omni_moe``) sets of it. Published checkpoints have no settings for clips, and the
limits of images do not apply to them.
"""

from __future__ import annotations

import torch

from encoder_service.ingest.decode import DecodeLimits, Transparent
from encoder_service.ingest.preprocessor import overridden
from encoder_service.ingest.qwen_vl import (
    AreaLimits,
    QwenClips,
    QwenVLPreprocessor,
    check_aspect,
    rounded_size,
)
from encoder_service.ingest.settings import QwenVideoSettings, SettingsReader, parse_qwen_vl
from encoder_service.ingest.video.clip import ClipPlan
from encoder_service.ingest.video.source import ClipHeader, ClipLimits
from encoder_service.types import Grid, PreprocessOptions

MIN_FRAME_PIXELS, MAX_FRAME_PIXELS = 128 * 32 * 32, 768 * 32 * 32


def omni_indices(
    num_source_frames: int, source_fps: float, *, fps: float, min_frames: int, max_frames: int, temporal: int
) -> list[int]:
    """Indices of frames at equal steps from the first: as many as ``fps`` asks for within the bounds, at most
    all, and a multiple of ``temporal``, or one more (``Qwen2VLVideoProcessor.sample_frames``). A clip with
    fewer frames than ``temporal``, which the reference refuses, is taken whole. num_source_frames: at least
    1."""
    most = min(max_frames, num_source_frames) // temporal * temporal
    count = min(max(num_source_frames / source_fps * fps, min_frames), most)
    count = int(count / temporal) * temporal
    if not count:
        return list(range(num_source_frames))
    # In float32 and with one step more where the last rounds down, as the reference; a step onto the end,
    # where there is no frame, is left out.
    steps: list[int] = torch.arange(0, num_source_frames, num_source_frames / count).int().tolist()
    return [index for index in steps if index < num_source_frames]


class OmniClips(QwenClips):
    """Qwen3-Omni. min_pixels, max_pixels: limits of one frame's area."""

    rules = "qwen3_omni_video.1"

    def sample(self, header: ClipHeader, options: PreprocessOptions) -> list[int]:
        settings = self.with_options(options)
        return omni_indices(
            header.num_frames,
            header.fps,
            fps=settings.fps,
            min_frames=settings.min_frames,
            max_frames=settings.max_frames,
            temporal=self.temporal,
        )

    def sized(self, num_frames: int, height: int, width: int, options: PreprocessOptions) -> ClipPlan:
        check_aspect(height, width, "clip's frames are")
        area = AreaLimits(**overridden(AreaLimits._fields, self.settings, options))
        target = rounded_size(height, width, self.merge_pixels, area)
        grid = Grid(self.depth(num_frames), target[0] // self.patch_size, target[1] // self.patch_size)
        return ClipPlan((), (), grid, *target)


def qwen3_omni_preprocessor(
    reader: SettingsReader,
    video: SettingsReader | None,
    limits: DecodeLimits,
    clip_limits: ClipLimits,
    transparent: Transparent,
) -> QwenVLPreprocessor:
    """As ``preprocessor.Build``. Of the settings for clips only the sampling is read."""
    images = parse_qwen_vl(reader)
    if video is not None:
        video.require("num_frames", None)
        names = ("patch_size", "merge_size", "temporal_patch_size")
        video.check_same(images, {name: video.count(name) for name in names if video.has(name)})
    video = video or reader
    settings = QwenVideoSettings(
        min_pixels=MIN_FRAME_PIXELS,
        max_pixels=MAX_FRAME_PIXELS,
        fps=video.number("fps", default=2.0),
        min_frames=video.count("min_frames", default=4),
        max_frames=video.count("max_frames", default=768),
        max_video_tokens=768,
        cap_pixels_per_frame=False,
    )
    video.check_order(settings, "min_frames", "max_frames")
    return QwenVLPreprocessor(
        images, limits, OmniClips(settings, images, clip_limits, transparent), transparent
    )
