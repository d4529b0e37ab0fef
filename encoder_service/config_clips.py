"""Settings of clips. ``config.Settings`` has them among the others."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings

MIB = 1 << 20


class ClipSettings(BaseSettings):
    """See ``config.Settings``. max_image_pixels there holds for a clip's frames as well."""

    max_clip_bytes: int = Field(256 * MIB, ge=1024, description="Largest clip file.")
    max_clip_duration_s: float = Field(7200.0, ge=1, le=604_800, description="Longest clip, in seconds.")
    max_clip_decoded_pixels: int = Field(
        250_000_000_000,
        ge=1,
        description="Pixels of all frames of one clip that are decoded, sampled or not; an hour of 1920x1080 "
        "at 30 frames a second has 2.2e11.",
    )
    max_clip_frames: int = Field(2048, ge=1, le=65_536, description="Frames sampled from one clip.")
    max_clip_patches: int = Field(262_144, ge=4, description="Patches of all frames sampled from one clip.")
    clip_piece_patches: int = Field(
        8192,
        ge=4,
        description="Patches of a piece that a clip is encoded in; at least one frame pair or chunk.",
    )
