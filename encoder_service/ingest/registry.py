"""Which preprocessor a family has.

Owns the choice by family name; the settings come from the checkpoint's folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from encoder_service.errors import UnsupportedCheckpoint
from encoder_service.ingest.clips import MoonViTClips, QwenClips
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.settings import SettingsReader, parse_moonvit, parse_qwen_vl, read_settings_file
from encoder_service.ingest.video_settings import (
    ClipLimits,
    has_moonvit_video,
    parse_moonvit_video,
    parse_qwen_video,
    read_video_settings_file,
)


def _qwen_vl(
    images: SettingsReader,
    clips: SettingsReader | None,
    limits: DecodeLimits,
    clip_limits: ClipLimits,
) -> Preprocessor:
    settings = parse_qwen_vl(images)
    if clips is None:
        return QwenVLPreprocessor(settings, limits)
    return QwenVLPreprocessor(
        settings, limits, QwenClips(parse_qwen_video(clips, settings), settings, clip_limits)
    )


def _moonvit(
    images: SettingsReader,
    clips: SettingsReader | None,
    limits: DecodeLimits,
    clip_limits: ClipLimits,
) -> Preprocessor:
    settings = parse_moonvit(images)
    if clips is None or not has_moonvit_video(clips):
        return MoonViTPreprocessor(settings, limits)
    return MoonViTPreprocessor(
        settings, limits, MoonViTClips(parse_moonvit_video(clips, settings), settings, clip_limits)
    )


PREPROCESSORS: dict[
    str,
    Callable[[SettingsReader, SettingsReader | None, DecodeLimits, ClipLimits], Preprocessor],
] = {
    "qwen3_vl": _qwen_vl,
    "qwen3_5": _qwen_vl,
    "kimi_k25": _moonvit,
}


def load_preprocessor(
    path: Path,
    family: str,
    limits: DecodeLimits,
    clip_limits: ClipLimits | None = None,
) -> Preprocessor:
    """The preprocessor of a checkpoint folder. clip_limits: their defaults when left out.

    Raises UnsupportedCheckpoint for an unknown family or for settings that are missing, invalid or unknown,
    CheckpointError when the folder has no settings file.
    """
    if family not in PREPROCESSORS:
        raise UnsupportedCheckpoint(
            f"family {family!r} has no preprocessor, known are {', '.join(PREPROCESSORS)}", family=family
        )
    return PREPROCESSORS[family](
        read_settings_file(path),
        read_video_settings_file(path),
        limits,
        clip_limits or ClipLimits(),
    )
