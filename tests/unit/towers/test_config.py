"""Tower sizes from config.json: both published spellings; other values are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bench.harness.reference import KIMI_VISION_NAMES
from encoder_service.checkpoints.synthetic import config_for
from encoder_service.errors import UnsupportedCheckpoint
from encoder_service.towers.config import stated_dtype
from encoder_service.towers.moonvit import MoonViTConfig
from encoder_service.towers.qwen3_vl import QwenVisionConfig
from encoder_service.towers.registry import FAMILIES, parse_config


def kimi_in_reference_spelling(size: str) -> dict[str, Any]:
    """As the reference package saves it; the projector's settings stand beside vision_config."""
    published = config_for("kimi_k25", size)
    vision = published["vision_config"]
    return {
        "model_type": "kimi_k25",
        "image_token_id": published["media_placeholder_token_id"],
        "projection_hidden_size": vision["mm_hidden_size"],
        "projection_layer_norm_eps": vision["projector_ln_eps"],
        "text_config": {"model_type": "deepseek_v3", "hidden_size": vision["text_hidden_size"]},
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
            **{own: vision[name] for name, own in KIMI_VISION_NAMES.items()},
        },
    }


def changed(family: str, path: str, value: object) -> dict[str, Any]:
    """A tiny config with one value replaced; one of vision_config begins with a dot."""
    config = copy.deepcopy(config_for(family, "tiny"))
    (config["vision_config"] if path.startswith(".") else config)[path.lstrip(".")] = value
    return config


@pytest.mark.parametrize("size", ["tiny", "full"])
def test_both_spellings_of_kimis_sizes_mean_the_same(size: str) -> None:
    assert parse_config(kimi_in_reference_spelling(size)) == parse_config(config_for("kimi_k25", size))


# Qwen2-VL, Qwen2.5-Omni, Qwen3.8-2.4T-A95B (text), Intern-S1, Kimi-Linear, InternVL.
@pytest.mark.parametrize(
    "model_type",
    [
        *("qwen2_vl", "qwen2_5_omni", "qwen3_5_moe_text"),
        *("interns1", "kimi_linear", "internvl_chat"),
    ],
)
def test_a_near_model_is_refused_with_those_that_are_served(model_type: str) -> None:
    with pytest.raises(UnsupportedCheckpoint) as refusal:
        parse_config(config_for("qwen3_vl", "tiny") | {"model_type": model_type})
    message = refusal.value.message
    assert message.startswith(f"config.json has model_type '{model_type}', needs one of qwen3_vl, ")
    for family in FAMILIES.values():
        assert f"{', '.join(family.model_types)} ({family.models})" in message


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_model_type_has_a_family(model_type: str) -> None:
    family = FAMILIES[model_type]
    parsed_family, _ = parse_config(config_for(family.name, "tiny") | {"model_type": model_type})
    assert parsed_family is family


@pytest.mark.parametrize(
    ("family", "levels"),
    [("qwen3_5", ()), ("intern_s2_preview", ()), ("qwen4_exp", (1, 2)), ("interns1_pro", (1, 2))],
)
def test_deepstack_levels_that_are_stated(family: str, levels: tuple[int, ...]) -> None:
    """As engines read them: Qwen3.5's have no part in its model. None need to be stated."""
    _, config = parse_config(changed(family, ".deepstack_visual_indexes", [1, 2]))
    assert isinstance(config, QwenVisionConfig)
    assert config.deepstack_visual_indexes == levels
    _, without = parse_config(changed(family, ".deepstack_visual_indexes", None))
    assert isinstance(without, QwenVisionConfig)
    assert without.deepstack_visual_indexes == ()


def test_qwen3_omnis_sizes_are_those_of_its_thinker() -> None:
    config = config_for("qwen3_omni_moe", "tiny")
    with pytest.raises(UnsupportedCheckpoint, match="lacks thinker_config"):
        parse_config(config | {"thinker_config": None})
    config["thinker_config"]["text_config"]["hidden_size"] = 96
    with pytest.raises(UnsupportedCheckpoint, match=r"are 64 wide, text_config\.hidden_size is 96"):
        parse_config(config)
    assert stated_dtype(config) == "bfloat16"


def test_qwen2_5_vl_32b_leaves_out_what_is_the_same_in_all() -> None:
    published = config_for("qwen2_5_vl", "full")
    names = ("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size", "window_size")
    short = copy.deepcopy(published)
    for name in (*names, "fullatt_block_indexes"):
        del short["vision_config"][name]
    assert parse_config(short) == parse_config(published)


def test_kimi_vl_leaves_its_position_table_to_a_default() -> None:
    """The published config.json states no side of it."""
    values = changed("kimi_vl", ".init_pos_emb_height", None)
    del values["vision_config"]["init_pos_emb_width"]
    _, config = parse_config(values)
    assert isinstance(config, MoonViTConfig)
    assert (config.position_height, config.position_width) == (64, 64)


def test_rope_theta_and_projector_eps_come_from_the_file() -> None:
    _, config = parse_config(
        changed("qwen3_vl", ".rope_parameters", {"rope_theta": 500.0, "rope_type": "axial"})
    )
    assert config.rope_theta == 500.0
    _, config = parse_config(changed("kimi_k25", ".projector_ln_eps", 1e-3))
    assert isinstance(config, MoonViTConfig)
    assert config.projector_eps == 1e-3


@pytest.mark.parametrize(
    ("family", "path", "value", "text"),
    [
        ("qwen3_vl", "model_type", None, "None, needs one of qwen3_vl"),
        ("qwen3_vl", "model_type", ["qwen3_vl"], "needs one of qwen3_vl"),
        ("qwen3_vl", "vision_config", None, "config.json lacks vision_config"),
        ("qwen3_vl", "vision_config", [1], "vision_config = [1], needs an object"),
        ("qwen3_vl", ".depth", None, "vision_config, lacks depth or num_hidden_layers"),
        ("qwen3_vl", ".depth", 0, "depth or num_hidden_layers = 0, needs an integer of at least 1"),
        ("qwen3_vl", ".depth", True, "num_hidden_layers = True"),
        ("qwen3_vl", ".hidden_size", "1152", "hidden_size = '1152'"),
        ("qwen3_vl", ".hidden_act", "silu", "hidden_act = 'silu', needs 'gelu_pytorch_tanh'"),
        ("qwen3_vl", ".num_position_embeddings", 255, "embeddings = 255, needs a square number"),
        ("qwen3_vl", ".out_hidden_size", 96, "are 96 wide, text_config.hidden_size is 64"),
        ("qwen3_vl", ".num_heads", 5, "5 heads over 64 elements"),
        ("qwen3_vl", ".num_heads", 32, "32 heads over 64 elements"),
        ("qwen3_vl", ".deepstack_visual_indexes", [2, 1], "needs ascending block numbers"),
        ("qwen3_vl", ".deepstack_visual_indexes", [1, 4], "below depth 4"),
        ("qwen3_vl", ".deepstack_visual_indexes", None, "deepstack_visual_indexes = None"),
        ("qwen3_vl", ".rope_parameters", {"rope_type": "yarn"}, "rope_type = 'yarn'"),
        ("ling_vl", ".disable_merger_proj", False, "disable_merger_proj = False, needs True"),
        ("ling_vl", "norm_query_embeds", True, "norm_query_embeds = True, needs False"),
        ("ling_vl", "rms_norm_eps", 1e-5, "rms_norm_eps = 1e-05, needs 1e-06"),
        ("kimi_k25", ".vt_hidden_size", None, "lacks vt_hidden_size or hidden_size"),
        ("kimi_k25", ".merge_type", "sd2", "merge_type = 'sd2', needs 'sd2_tpool'"),
        ("kimi_k25", ".video_attn_type", "spatial", "video_attn_type = 'spatial'"),
        ("kimi_k25", ".merge_kernel_size", [2, 1], "merge_kernel_size = [2, 1]"),
        ("kimi_k25", ".mm_hidden_size", 32, "input width is 32, needs the tower's 64"),
        ("kimi_k25", ".text_hidden_size", 32, "are 32 wide, text_config.hidden_size is 64"),
        ("kimi_k25", ".projector_ln_eps", 0, "projector_ln_eps or projection_layer_norm_eps = 0"),
        ("kimi_k25", ".mm_projector_type", "patchmergerv2", "mm_projector_type = 'patchmergerv2'"),
        ("kimi_vl", ".model_type", "siglip", "model_type = 'siglip', needs 'moonvit'"),
        ("kimi_vl", ".num_attention_heads", 5, "5 heads over 64 elements"),
        ("kimi_vl", "text_config", None, "config.json lacks text_config"),
        ("kimi_k3", ".norm_type", "layernorm", "norm_type = 'layernorm', needs 'rmsnorm'"),
        ("kimi_k3", ".attn_bias", True, "attn_bias = True, needs False"),
        ("kimi_k3", ".linear_bias", True, "linear_bias = True, needs False"),
        (
            "kimi_k3",
            ".pos_emb_interpolation_mode",
            "bicubic",
            "'bicubic', needs 'bilinear'",
        ),
        ("kimi_k3", ".mm_projector_type", "patchmerger", "needs 'patchmergerv2'"),
        ("kimi_k3", ".qkv_hidden_size", None, "lacks qkv_hidden_size"),
        ("kimi_k3", ".qkv_hidden_size", 90, "4 heads over 90 elements"),
        ("kimi_k3", ".text_hidden_size", 32, "are 32 wide, text_config.hidden_size is 64"),
        ("glm4v", ".hidden_act", "gelu", "hidden_act = 'gelu', needs 'silu'"),
        ("glm4v", ".attention_bias", True, "attention_bias = True, needs False"),
        ("glm4v", ".image_size", 225, "image_size = 225, needs a whole multiple of patch_size"),
        ("glm4v", ".out_hidden_size", 96, "are 96 wide, text_config.hidden_size is 64"),
        ("qwen2_5_vl", ".hidden_act", "gelu", "hidden_act = 'gelu', needs 'silu'"),
        ("qwen2_5_vl", ".window_size", 27, "window_size = 27, needs at least 28: one merge"),
        ("qwen2_5_vl", ".fullatt_block_indexes", [1, 4], "ascending block numbers below depth 4"),
        ("qwen2_5_vl", ".out_hidden_size", 96, "are 96 wide, hidden_size is 64"),
        ("glm_ocr", ".attention_bias", False, "attention_bias = False, needs True"),
        ("glm_ocr", ".rms_norm_eps", None, "lacks rms_norm_eps"),
        ("glm5_next", ".projection_intermediate_size", None, "lacks projection_intermediate_size"),
        ("glm5_next", ".swiglu_limit", 0, "swiglu_limit = 0, needs a finite number above 0"),
    ],
)
def test_what_no_tower_implements_is_refused_by_name(
    family: str, path: str, value: object, text: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint) as refusal:
        parse_config(changed(family, path, value))
    assert text in refusal.value.message
