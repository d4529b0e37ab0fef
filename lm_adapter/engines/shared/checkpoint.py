"""What config.json of a vision-language checkpoint states: placeholder ids, geometry, family.

Owns reading the file. ``hf.model`` loads the language model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lm_adapter.errors import InvalidRequest
from lm_adapter.items import Modality
from lm_adapter.prefill.clip_texts import qwen_patch_distance_s
from lm_adapter.prefill.placeholders import PromptItem, prompt_item

# What transformers takes where a config.json of Qwen2.5-VL states none; all published ones state 2.
TOKENS_PER_SECOND = 4


class _Family(NamedTuple):
    """name: the tower's family, as the encoder names it. merges_time: an item's frames are averaged into one
    set of rows. uses_mrope: positions have three axes. has_timestamps: a clip's frames have texts between
    them. section: of config.json, that states what the file states of other models. has_image_frames: the
    frames of a clip have the placeholder of images. centres_images: as ``centred`` of ``mrope_positions``.
    uses_seconds: the time axis of a clip is of seconds, see ``VisionInterface.time_step``."""

    name: str
    merges_time: bool = False
    uses_mrope: bool = True
    has_deepstack: bool = False
    has_timestamps: bool = True
    section: str = ""
    has_image_frames: bool = False
    centres_images: bool = False
    uses_seconds: bool = False


_FAMILIES = {
    "qwen3_vl": _Family("qwen3_vl", has_deepstack=True),
    "qwen3_vl_moe": _Family("qwen3_vl", has_deepstack=True),
    "qwen3_5": _Family("qwen3_5"),
    "qwen3_5_moe": _Family("qwen3_5"),
    "qwen4_exp": _Family("qwen4_exp", has_deepstack=True),
    "qwen3_omni_moe": _Family(
        "qwen3_omni_moe", has_deepstack=True, has_timestamps=False, section="thinker_config"
    ),
    "interns1_pro": _Family("interns1_pro", uses_mrope=False, has_deepstack=True),
    "intern_s2_preview": _Family("intern_s2_preview"),
    "kimi_k25": _Family("kimi_k25", merges_time=True, uses_mrope=False),
    "kimi_vl": _Family("kimi_vl", merges_time=True, uses_mrope=False),
    "kimi_k3": _Family("kimi_k3", merges_time=True, uses_mrope=False),
    "glm4v": _Family("glm4v", has_image_frames=True),
    "glm4v_moe": _Family("glm4v", has_image_frames=True),
    "glm46v": _Family("glm4v", has_image_frames=True),
    "glm_ocr": _Family("glm_ocr", has_image_frames=True),
    "glm5_next": _Family("glm5_next", uses_mrope=False, has_image_frames=True),
    "bailing_moe_v3_vl": _Family("ling_vl", centres_images=True),
    "qwen2_5_vl": _Family("qwen2_5_vl", has_timestamps=False, uses_seconds=True),
}
"""By config.json's model_type."""


@dataclass(frozen=True)
class VisionInterface:
    """What the language model must know about the tower: placeholder ids, geometry, deepstack levels. family:
    as in ``ModelInfo``. positions_per_second: of clips; None where their time axis counts patches."""

    model_type: str
    family: str
    image_placeholder_id: int
    video_placeholder_id: int
    merge_size: int
    merges_time: bool
    uses_mrope: bool
    num_deepstack_levels: int
    has_timestamps: bool = True
    centres_images: bool = False
    positions_per_second: float | None = None

    @property
    def placeholder_ids(self) -> tuple[int, int]:
        return self.image_placeholder_id, self.video_placeholder_id

    def prompt_item(self, grid: Sequence[int], modality: Modality) -> PromptItem:
        """Raises InvalidRequest for a grid that the merge does not divide."""
        return prompt_item(
            grid,
            placeholder_id=self.placeholder_ids[0 if modality is Modality.IMAGE else 1],
            merge_size=self.merge_size,
            modality=modality,
            merges_time=self.merges_time,
            has_timestamps=self.has_timestamps,
        )

    def time_step(self, timestamps_s: Sequence[float]) -> float:
        """Positions from one temporal patch of a clip to the next, one of ``time_steps`` of
        ``mrope_positions``. timestamps_s: from the clip's result. Raises InvalidRequest as
        ``qwen_patch_distance_s``."""
        if self.positions_per_second is None:
            return 1.0
        return qwen_patch_distance_s(timestamps_s) * self.positions_per_second


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory. Raises InvalidRequest if it cannot be read."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {file}: {error}", reason="CHECKPOINT") from error
    if not isinstance(config, dict):
        raise InvalidRequest(f"{file} holds a {type(config).__name__}, needs an object", reason="CHECKPOINT")
    return config


def vision_interface(config: Mapping[str, Any]) -> VisionInterface:
    """Reads the interface from config.json. Raises InvalidRequest for other families.

    Kimi's published files have one placeholder for images and clips, ``media_placeholder_token_id``; files
    saved by the reference have ``image_token_id`` and ``video_token_id``.
    """
    model_type = str(config.get("model_type"))
    if model_type not in _FAMILIES:
        raise InvalidRequest(
            f"model_type {model_type!r} is not driven here, needs {' or '.join(_FAMILIES)}",
            reason="CHECKPOINT",
        )
    family = _FAMILIES[model_type]
    if family.section:
        config = config.get(family.section, {})
    vision = config.get("vision_config", {})
    image_id = config.get("image_token_id", config.get("media_placeholder_token_id"))
    merge = vision.get("spatial_merge_size") or vision.get("merge_kernel_size", (2, 2))[0]
    if image_id is None:
        raise InvalidRequest(
            "config.json names no placeholder: neither image_token_id nor media_placeholder_token_id",
            reason="CHECKPOINT",
        )
    video_id = image_id if family.has_image_frames else config.get("video_token_id", image_id)
    levels = vision.get("deepstack_visual_indexes") or () if family.has_deepstack else ()
    return VisionInterface(
        model_type=model_type,
        family=family.name,
        image_placeholder_id=int(image_id),
        video_placeholder_id=int(video_id),
        merge_size=int(merge),
        merges_time=family.merges_time,
        uses_mrope=family.uses_mrope,
        num_deepstack_levels=len(levels),
        has_timestamps=family.has_timestamps,
        centres_images=family.centres_images,
        positions_per_second=vision.get("tokens_per_second", TOKENS_PER_SECOND)
        if family.uses_seconds
        else None,
    )
