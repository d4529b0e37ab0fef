"""Preprocessing of Qwen3-Omni. Images are Qwen's, clips have the rules of Qwen2.5-VL.

Owns the limits of a frame's area, which ``Qwen3OmniMoeProcessor`` (``transformers.models.qwen3_omni_moe``)
sets. Published checkpoints have no settings for clips, and the limits of images do not apply to them.
"""

from __future__ import annotations

from encoder_service.ingest.decode import DecodeLimits, Transparent
from encoder_service.ingest.qwen2_5_vl import FramewiseClips
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.settings import QwenVideoSettings, SettingsReader, parse_qwen_vl
from encoder_service.ingest.video.source import ClipLimits

MIN_FRAME_PIXELS, MAX_FRAME_PIXELS = 128 * 32 * 32, 768 * 32 * 32


class OmniClips(FramewiseClips):
    """Qwen3-Omni."""

    rules = "qwen3_omni_video.1"


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
