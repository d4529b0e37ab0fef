"""Builds the preprocessor of a model family.

Owns the choice by family name. The settings come from the checkpoint's folder.
"""

from __future__ import annotations

from pathlib import Path

from encoder_service.errors import UnsupportedCheckpoint
from encoder_service.ingest.decode import DecodeLimits, Transparent
from encoder_service.ingest.moonvit import MoonViTClips, MoonViTPreprocessor
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.qwen_vl import QwenClips, QwenVLPreprocessor
from encoder_service.ingest.settings import (
    parse_moonvit,
    parse_moonvit_video,
    parse_qwen_video,
    parse_qwen_vl,
    read_settings_file,
    read_video_settings_file,
)
from encoder_service.ingest.video.source import ClipLimits

FAMILIES = ("qwen3_vl", "qwen3_5", "kimi_k25")


def load_preprocessor(
    path: Path,
    family: str,
    limits: DecodeLimits,
    clip_limits: ClipLimits | None = None,
    transparent: Transparent = "white",
) -> Preprocessor:
    """The preprocessor of a checkpoint folder. clip_limits: None for the default limits. transparent: how
    alpha is handled, see ``decode``.

    Raises UnsupportedCheckpoint for an unknown family or for settings that are missing or invalid,
    CheckpointError if the folder has no settings file.
    """
    if family not in FAMILIES:
        raise UnsupportedCheckpoint(f"family {family!r} has no preprocessor, known are {', '.join(FAMILIES)}")
    reader, video = read_settings_file(path), read_video_settings_file(path)
    clip_limits = clip_limits or ClipLimits()
    if family == "kimi_k25":
        moonvit = parse_moonvit(reader)
        frames = None if video is None else parse_moonvit_video(video, moonvit)
        moonvit_clips = None if frames is None else MoonViTClips(frames, moonvit, clip_limits, transparent)
        return MoonViTPreprocessor(moonvit, limits, moonvit_clips, transparent)
    qwen = parse_qwen_vl(reader)
    clips = None if video is None else parse_qwen_video(video, qwen)
    qwen_clips = None if clips is None else QwenClips(clips, qwen, clip_limits, transparent)
    return QwenVLPreprocessor(qwen, limits, qwen_clips, transparent)
