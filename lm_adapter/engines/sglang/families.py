"""SGLang's models whose rows come from the encoder: their classes and towers. A new family has its
lines here.

Owns names of SGLang's only, which ``models`` and ``processors`` import.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping
from types import ModuleType

from lm_adapter.engines.shared.glm_grids import GLM

logger = logging.getLogger("sglang.vision_encoder")

SERVED: Mapping[str, str] = {
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp",
    "Qwen3OmniMoeForConditionalGeneration": "qwen3_omni_moe",
    "InternS2PreviewForConditionalGeneration": "interns2preview",
    "KimiVLForConditionalGeneration": "kimi_vl",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "Glm4vForConditionalGeneration": "glm4v",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe",
    "GlmOcrForConditionalGeneration": "glm_ocr",
    "Glm5NextForConditionalGeneration": "glm5_next",
    "BailingMoeV3VLForConditionalGeneration": "bailing_mm_v3",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
}
"""A model's class -> its module in ``sglang.srt.models``. Intern-S1-Pro is not among them: SGLang 0.5.23
cannot build its class (``InternS1ProTextDecoderLayer`` does not take ``start_layer``)."""
TOWERS: Mapping[str, tuple[str, ...]] = {
    "qwen3_vl": ("Qwen3VLMoeVisionModel",),
    "kimi_k25": ("MoonViT3dPretrainedModel", "K2VLMultiModalProjector"),
    "qwen3_omni_moe": ("Qwen3OmniMoeVisionEncoder", "Qwen3OmniMoeAudioEncoder"),
    "kimi_vl": ("MoonVitPretrainedModel", "KimiVLMultiModalProjector"),
    "kimi_k3": ("KimiK3VisionTower", "KimiK3MultiModalProjector"),
    "glm4v": ("Glm4vVisionModel",),
    "glm4v_moe": ("Glm4vVisionModel",),
    "glm_ocr": ("GlmOcrVisionModel",),
    "glm5_next": ("Glm5NextVisionModel",),
    "bailing_mm_v3": ("Qwen3VLMoeVisionModel",),
    "qwen2_5_vl": ("Qwen2_5_VisionTransformer",),
}
"""Module -> the names in it by which constructors of models find their tower."""
PROJECTORS = ("linear_proj",)
"""Attributes of models whose constructor builds a projector under no name of its module."""
TOWER_PREFIXES = (
    *("model.visual.", "visual.", "vision_tower.", "mm_projector.", "multi_modal_projector."),
    *("thinker.visual.", "thinker.audio_tower.", "linear_proj."),
)
"""Published names of the towers' tensors."""
LING = "bailing_moe_v3_vl"
"""model_type of the model whose processor writes a line break after each image."""
KIMI = ("kimi_k25", "kimi_vl", "kimi_k3")


def image_marks(model_type: str) -> tuple[str, str]:
    """The texts around an image's placeholder in a prompt; Kimi's models have none."""
    if model_type in KIMI:
        return "", ""
    if model_type in GLM:
        return "<|begin_of_image|>", "<|end_of_image|>"
    return "<|vision_start|>", "<|vision_end|>"


@functools.cache
def module_of(name: str) -> ModuleType | None:
    """Of ``sglang.srt.models``. None, with a warning, where it cannot be imported: SGLang would go on without
    this plugin, also for the other models."""
    try:
        return importlib.import_module(f"sglang.srt.models.{name}")
    except Exception as error:  # whatever its kernels need
        logger.warning("no image rows for sglang.srt.models.%s: %s: %s", name, type(error).__name__, error)
        return None


def served_classes() -> tuple[type, ...]:
    """Those of this SGLang."""
    found = (getattr(module_of(module), name, None) for name, module in SERVED.items())
    return tuple(kind for kind in found if kind is not None)
