"""Preprocessing of Qwen2.5-VL. Images are Qwen's; each frame of a clip is sized like an image.

Owns the sampling of a clip's frames, their times, and the frames' target size, which Qwen3-Omni shares. The
reference is ``Qwen2VLVideoProcessor`` (``transformers.models.qwen2_vl``). Published checkpoints have one file
of settings, whose limits apply to images and to each frame of a clip.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from encoder_service.ingest.decode import DecodeLimits, Transparent
from encoder_service.ingest.qwen_vl import (
    AreaLimits,
    QwenClips,
    QwenVLPreprocessor,
    check_aspect,
    rounded_size,
)
from encoder_service.ingest.settings import SettingsReader, parse_qwen_video, parse_qwen_vl
from encoder_service.ingest.video.clip import ClipPlan
from encoder_service.ingest.video.source import ClipHeader, ClipLimits
from encoder_service.types import PreprocessOptions

MAX_VIDEO_TOKENS = 128_000
# Part of the tokens that a clip may take where each frame is capped.
CLIP_SHARE = 0.9


def framewise_indices(
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


class FramewiseClips(QwenClips):
    """Clips whose frames are sized one by one. min_pixels, max_pixels: limits of one frame's area. With
    cap_pixels_per_frame a frame also has no more than its share of max_video_tokens."""

    def sample(self, header: ClipHeader, options: PreprocessOptions) -> list[int]:
        settings = self.with_options(options)
        return framewise_indices(
            header.num_frames,
            header.fps,
            fps=settings.fps,
            min_frames=settings.min_frames,
            max_frames=settings.max_frames,
            temporal=self.temporal,
        )

    def sized(self, num_frames: int, height: int, width: int, options: PreprocessOptions) -> ClipPlan:
        check_aspect(height, width, "clip's frames are")
        settings = self.with_options(options)
        max_pixels = settings.max_pixels
        if settings.cap_pixels_per_frame:
            budget = int(settings.max_video_tokens * self.merge_pixels**2 * CLIP_SHARE)
            cap = min(max_pixels, budget * self.temporal // num_frames)
            max_pixels = max(cap, int(settings.min_pixels * 1.05))
        area = AreaLimits(settings.min_pixels, max_pixels)
        target = rounded_size(height, width, self.merge_pixels, area)
        return ClipPlan((), (), self.grid(num_frames, target), *target)


class Qwen25Clips(FramewiseClips):
    """Qwen2.5-VL."""

    rules = "qwen2_5_video.1"

    def times_s(self, indices: Sequence[int], header: ClipHeader) -> tuple[float, ...]:
        """At equal distances, as many as the reference counts a second (``VideoMetadata.sampled_fps``): the
        language model's positions are of the rate of the frames, not of the times that they were at."""
        sampled_fps = len(indices) / header.num_frames * header.fps
        return tuple(index / sampled_fps for index in range(len(indices)))


def qwen2_5_vl_preprocessor(
    reader: SettingsReader,
    video: SettingsReader | None,
    limits: DecodeLimits,
    clip_limits: ClipLimits,
    transparent: Transparent,
) -> QwenVLPreprocessor:
    """As ``preprocessor.Build``."""
    images = parse_qwen_vl(reader)
    settings = parse_qwen_video(video or reader, images, max_video_tokens=MAX_VIDEO_TOKENS)
    clips = Qwen25Clips(settings, images, clip_limits, transparent)
    return QwenVLPreprocessor(images, limits, clips, transparent)
