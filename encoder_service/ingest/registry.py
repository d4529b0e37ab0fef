"""Which preprocessor a family has.

Owns the choice by family name; the settings come from the checkpoint's folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from encoder_service.errors import UnsupportedCheckpoint
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.settings import SettingsReader, parse_moonvit, parse_qwen_vl, read_settings_file


def _qwen_vl(reader: SettingsReader, limits: DecodeLimits) -> Preprocessor:
    return QwenVLPreprocessor(parse_qwen_vl(reader), limits)


def _moonvit(reader: SettingsReader, limits: DecodeLimits) -> Preprocessor:
    return MoonViTPreprocessor(parse_moonvit(reader), limits)


PREPROCESSORS: dict[str, Callable[[SettingsReader, DecodeLimits], Preprocessor]] = {
    "qwen3_vl": _qwen_vl,
    "qwen3_5": _qwen_vl,
    "kimi_k25": _moonvit,
}


def load_preprocessor(path: Path, family: str, limits: DecodeLimits) -> Preprocessor:
    """The preprocessor of a checkpoint folder.

    Raises UnsupportedCheckpoint for an unknown family or for settings that are missing, invalid or unknown,
    CheckpointError when the folder has no settings file.
    """
    if family not in PREPROCESSORS:
        raise UnsupportedCheckpoint(
            f"family {family!r} has no preprocessor, known are {', '.join(PREPROCESSORS)}", family=family
        )
    return PREPROCESSORS[family](read_settings_file(path), limits)
