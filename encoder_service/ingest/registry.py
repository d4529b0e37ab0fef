"""Builds the preprocessor of a model family.

Owns the choice by family name. The settings come from the checkpoint's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from encoder_service.errors import UnsupportedCheckpoint
from encoder_service.ingest.decode import DecodeLimits, Transparent
from encoder_service.ingest.glm import glm4v_preprocessor, glm5_next_preprocessor
from encoder_service.ingest.kimi_k3 import kimi_k3_preprocessor
from encoder_service.ingest.kimi_vl import kimi_vl_preprocessor
from encoder_service.ingest.moonvit import moonvit_preprocessor
from encoder_service.ingest.preprocessor import Build, Preprocessor
from encoder_service.ingest.qwen2_5_vl import qwen2_5_vl_preprocessor
from encoder_service.ingest.qwen3_omni import qwen3_omni_preprocessor
from encoder_service.ingest.qwen_vl import ling_vl_preprocessor, qwen_vl_preprocessor
from encoder_service.ingest.settings import read_settings_file, read_video_settings_file
from encoder_service.ingest.video.source import ClipLimits

FAMILIES: Mapping[str, Build] = {
    "qwen3_vl": qwen_vl_preprocessor,
    "qwen3_5": qwen_vl_preprocessor,
    "kimi_k25": moonvit_preprocessor,
    "qwen4_exp": qwen_vl_preprocessor,
    "qwen3_omni_moe": qwen3_omni_preprocessor,
    "interns1_pro": qwen_vl_preprocessor,
    "intern_s2_preview": qwen_vl_preprocessor,
    "kimi_vl": kimi_vl_preprocessor,
    "kimi_k3": kimi_k3_preprocessor,
    "glm4v": glm4v_preprocessor,
    "glm_ocr": glm4v_preprocessor,
    "glm5_next": glm5_next_preprocessor,
    "ling_vl": ling_vl_preprocessor,
    "qwen2_5_vl": qwen2_5_vl_preprocessor,
}


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
    return FAMILIES[family](reader, video, limits, clip_limits or ClipLimits(), transparent)
