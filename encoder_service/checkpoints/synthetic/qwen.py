"""Sizes of the random checkpoints with Qwen's towers.

Towers of size ``full`` have the published dimensions of Qwen3-VL-8B, Qwen3.5-9B, Qwen3.8-Flash-Next,
Qwen3-Omni-30B-A3B, Intern-S1-Pro and Intern-S2-Preview. Language models are always small, but as wide as the
tower's rows.
"""

from __future__ import annotations

from typing import Any

from encoder_service.checkpoints.synthetic.family import LanguageTensors, SyntheticFamily
from encoder_service.checkpoints.synthetic.tokens import OMNI_TOKENS, QWEN_TOKENS

TOWERS = {
    "tiny": {"depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 160, "side": 16},
    "small": {"depth": 8, "hidden_size": 256, "num_heads": 4, "intermediate_size": 1024, "side": 48},
    "full": {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "side": 48},
}
# The language model has at least one layer per deepstack level, so that every level influences the logits.
DEEPSTACK_LEVELS = {"tiny": [1, 2], "small": [1, 3, 5], "full": [8, 16, 24]}

# SGLang takes three of mixture-of-experts models.
OMNI_DEEPSTACK_LEVELS = DEEPSTACK_LEVELS | {"tiny": [1, 2, 3]}

# Hidden size, layers, heads, key-value heads, head dim, intermediate size.
QWEN3_LANGUAGE_MODELS = {
    "tiny": (64, 4, 4, 2, 32, 128),
    "small": (256, 4, 4, 2, 64, 768),
    "full": (4096, 3, 32, 8, 128, 4096),
}
# Engines have kernels for linear heads from 64 wide.
QWEN3_5_LANGUAGE_MODELS = {
    "tiny": (64, 4, 2, 1, 64, 128),
    "small": (256, 8, 4, 2, 64, 768),
    "full": (4096, 2, 16, 4, 256, 4096),
}
# Of models whose every MLP is routed: half of an expert's width is a quarter of these.
OMNI_LANGUAGE_MODELS = QWEN3_LANGUAGE_MODELS | {"full": (2048, 3, 32, 4, 128, 3072)}
INTERN_S2_LANGUAGE_MODELS = QWEN3_5_LANGUAGE_MODELS | {"full": (2048, 2, 16, 2, 256, 2048)}
QWEN4_EXP_LANGUAGE_MODELS = QWEN3_5_LANGUAGE_MODELS | {"full": (2560, 2, 24, 2, 256, 2560)}
# Intern-S1-Pro's.
INTERN_S1_TOWERS = TOWERS | {
    "full": {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "side": 48}
}
# Number of rotary frequencies of the time, height and width axes, by half of the rotary dimension. The
# interleaved layout requires that three times the number of the height or the width is at most that half plus
# two.
MROPE_SECTIONS = {8: [3, 3, 2], 16: [6, 5, 5], 32: [11, 11, 10], 64: [24, 20, 20]}


def set_qwen3_vl(config: dict[str, Any], size: str) -> None:
    text = config["text_config"]
    set_language_model(text, QWEN3_LANGUAGE_MODELS[size])
    text["rope_scaling"]["mrope_section"] = list(MROPE_SECTIONS[text["head_dim"] // 2])
    set_tower(config, size, DEEPSTACK_LEVELS[size])


def set_qwen3_5(config: dict[str, Any], size: str) -> None:
    set_language_model(config["text_config"], QWEN3_5_LANGUAGE_MODELS[size])
    set_linear_attention(config["text_config"], size)
    set_tower(config, size, [])


def set_qwen3_omni(config: dict[str, Any], size: str) -> None:
    thinker = config["thinker_config"]
    text = thinker["text_config"]
    set_language_model(text, OMNI_LANGUAGE_MODELS[size])
    set_experts(text)
    text["rope_scaling"]["mrope_section"] = list(MROPE_SECTIONS[text["head_dim"] // 2])
    thinker["audio_config"]["output_dim"] = text["hidden_size"]
    set_tower(thinker, size, OMNI_DEEPSTACK_LEVELS[size])
    vision = thinker["vision_config"]
    # Of which engines derive the learned table's side.
    vision["image_size"] = TOWERS[size]["side"] * vision["patch_size"]


def set_interns1_pro(config: dict[str, Any], size: str) -> None:
    """The published model has no deepstack levels, and does not name any."""
    set_language_model(config["text_config"], QWEN3_LANGUAGE_MODELS[size])
    set_experts(config["text_config"])
    set_tower(config, size, [], INTERN_S1_TOWERS)
    del config["vision_config"]["deepstack_visual_indexes"]


def set_intern_s2_preview(config: dict[str, Any], size: str) -> None:
    text = config["text_config"]
    set_language_model(text, INTERN_S2_LANGUAGE_MODELS[size])
    set_linear_attention(text, size)
    set_experts(text)
    text["shared_expert_intermediate_size"] = text.pop("intermediate_size")
    set_tower(config, size, [])


def set_qwen4_exp(config: dict[str, Any], size: str) -> None:
    text = config["text_config"]
    set_language_model(text, QWEN4_EXP_LANGUAGE_MODELS[size])
    set_linear_attention(text, size)
    set_experts(text)
    text["shared_expert_intermediate_size"] = text.pop("intermediate_size")
    text["ple_embed_dim"] = text["hidden_size"]
    set_tower(config, size, [])


def set_experts(text: dict[str, Any]) -> None:
    """Every token uses all experts, in shares that the router gives it, so that no rounding of the rows picks
    others."""
    text["num_experts_per_tok"] = text["num_experts"]
    text["moe_intermediate_size"] = text["intermediate_size"] // text["num_experts"]


def set_language_model(text: dict[str, Any], sizes: tuple[int, int, int, int, int, int]) -> None:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    text |= dict(zip((*names, "intermediate_size"), sizes, strict=True))


def set_linear_attention(text: dict[str, Any], size: str) -> None:
    """Sets Qwen3.5's layers: every fourth, or the last, has full attention. A quarter of a head is rotary."""
    num_layers, num_heads, head_dim = text["num_hidden_layers"], text["num_attention_heads"], text["head_dim"]
    interval = min(4, num_layers)
    text |= {
        "full_attention_interval": interval,
        "layer_types": [
            "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)
        ],
        "linear_num_key_heads": num_heads,
        "linear_num_value_heads": 2 * num_heads,
    }
    text["linear_key_head_dim"] = text["linear_value_head_dim"] = 128 if size == "full" else head_dim
    text["rope_parameters"]["mrope_section"] = list(MROPE_SECTIONS[head_dim // 8])


def set_tower(
    config: dict[str, Any], size: str, levels: list[int], towers: dict[str, dict[str, int]] = TOWERS
) -> None:
    """levels: blocks after which a deepstack level is taken."""
    tower = dict(towers[size])
    tower["num_position_embeddings"] = tower.pop("side") ** 2
    config["vision_config"] |= {
        **tower,
        "deepstack_visual_indexes": list(levels),
        "out_hidden_size": config["text_config"]["hidden_size"],
    }


QWEN_LANGUAGE = LanguageTensors("model.language_model", "lm_head")
QWEN3_VL = SyntheticFamily(
    set_sizes=set_qwen3_vl,
    settings="qwen",
    tokens=QWEN_TOKENS,
    language=QWEN_LANGUAGE,
    template_in_json=True,
)
QWEN3_5 = SyntheticFamily(
    set_sizes=set_qwen3_5,
    settings="qwen",
    tokens=QWEN_TOKENS,
    language=LanguageTensors("model.language_model", "lm_head", norm_mean=0.0),
)
QWEN4_EXP = SyntheticFamily(set_sizes=set_qwen4_exp, settings="qwen", tokens=QWEN_TOKENS, language=None)
QWEN3_OMNI = SyntheticFamily(
    set_sizes=set_qwen3_omni,
    settings="qwen3_omni_moe",
    tokens=OMNI_TOKENS,
    language=LanguageTensors("thinker.model", "thinker.lm_head"),
    template_in_json=True,
)
INTERNS1_PRO = SyntheticFamily(
    set_sizes=set_interns1_pro,
    settings="qwen",
    tokens=QWEN_TOKENS,
    language=QWEN_LANGUAGE,
)
INTERN_S2_PREVIEW = SyntheticFamily(
    set_sizes=set_intern_s2_preview,
    settings="qwen",
    tokens=QWEN_TOKENS,
    language=LanguageTensors("model.language_model", "lm_head", norm_mean=0.0),
)
