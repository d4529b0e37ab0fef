"""``config.json`` of a synthetic checkpoint: the dimensions of every family and size.

Owns the figures. Field names and their spelling are those of the published files: Qwen3-VL states its
rotary settings as ``rope_theta`` and ``rope_scaling``, Qwen3.5 as ``rope_parameters``, Kimi-K2.5 its tower
with ``vt_`` names. ``full`` towers have the published dimensions of Qwen3-VL-8B, Qwen3.5-9B and Kimi-K2.5;
language models are always small, but as wide as the tower's rows.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from encoder_service.errors import ConfigurationError
from encoder_service.towers.synthetic.tokens import KIMI_TOKENS, QWEN_TOKENS, VOCAB_SIZE

FAMILIES: tuple[str, ...] = ("qwen3_vl", "qwen3_5", "kimi_k25")
SIZES: tuple[str, ...] = ("tiny", "small", "full")


@dataclass(frozen=True)
class TowerSize:
    """position_side: the learned position table is position_side x position_side."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    position_side: int


@dataclass(frozen=True)
class LanguageSize:
    """hidden_size is also the width of the tower's rows; the rest means what the config names say."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int


QWEN_TOWERS = {
    "tiny": TowerSize(4, 64, 4, 160, 16),
    "small": TowerSize(8, 256, 4, 1024, 48),
    "full": TowerSize(27, 1152, 16, 4304, 48),
}
KIMI_TOWERS = {
    "tiny": TowerSize(3, 64, 4, 160, 16),
    "small": TowerSize(6, 256, 4, 1024, 64),
    "full": TowerSize(27, 1152, 16, 4304, 64),
}
# One language-model layer at least per level, so that every level reaches the logits.
DEEPSTACK_LEVELS = {"tiny": [1, 2], "small": [1, 3, 5], "full": [8, 16, 24]}

QWEN3_VL_LANGUAGE = {
    "tiny": LanguageSize(64, 4, 4, 2, 32, 128),
    "small": LanguageSize(256, 4, 4, 2, 64, 768),
    "full": LanguageSize(4096, 3, 32, 8, 128, 4096),
}
QWEN3_5_LANGUAGE = {
    "tiny": LanguageSize(64, 4, 2, 1, 64, 128),
    "small": LanguageSize(256, 8, 4, 2, 64, 768),
    "full": LanguageSize(4096, 2, 16, 4, 256, 4096),
}
# Kimi's attention is latent: head_dim is the part of a head without positions. The latent's width and the
# rotary part are the published ones in every size, and Qwen3.5's linear heads at least 64 wide: engines have
# kernels for no others.
KIMI_LANGUAGE = {
    "tiny": LanguageSize(64, 3, 4, 4, 16, 128),
    "small": LanguageSize(256, 4, 4, 4, 32, 768),
    "full": LanguageSize(7168, 2, 8, 8, 128, 2048),
}

# How many rotary frequencies the time, height and width axes take, by the half of the rotary dimension. The
# interleaved layout needs height and width to fit: three times either is at most the half plus two.
MROPE_SECTIONS = {8: [3, 3, 2], 16: [6, 5, 5], 32: [11, 11, 10], 64: [24, 20, 20]}


def check_choice(kind: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ConfigurationError for a value that is not allowed, naming those that are."""
    if value not in allowed:
        raise ConfigurationError(
            f"unknown {kind} {value!r}, choose one of {', '.join(allowed)}",
            found=value,
            allowed=", ".join(allowed),
        )


def config_for(family: str, size: str) -> dict[str, Any]:
    """The content of ``config.json``. Raises ConfigurationError for an unknown family or size."""
    check_choice("family", family, FAMILIES)
    check_choice("size", size, SIZES)
    build = {"qwen3_vl": _qwen3_vl, "qwen3_5": _qwen3_5, "kimi_k25": _kimi_k25}[family]
    # The tables' lists stay the tables': a caller may edit what it gets.
    return copy.deepcopy(build(size))


def _qwen_top_level() -> dict[str, Any]:
    return {
        "image_token_id": QWEN_TOKENS.id_of("<|image_pad|>"),
        "video_token_id": QWEN_TOKENS.id_of("<|video_pad|>"),
        "vision_start_token_id": QWEN_TOKENS.id_of("<|vision_start|>"),
        "vision_end_token_id": QWEN_TOKENS.id_of("<|vision_end|>"),
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0",
    }


def _qwen_vision(size: str, model_type: str, out_hidden_size: int, deepstack: list[int]) -> dict[str, Any]:
    tower = QWEN_TOWERS[size]
    return {
        "deepstack_visual_indexes": deepstack,
        "depth": tower.depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": tower.hidden_size,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": tower.intermediate_size,
        "model_type": model_type,
        "num_heads": tower.num_heads,
        "num_position_embeddings": tower.position_side**2,
        "out_hidden_size": out_hidden_size,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _qwen_text(language: LanguageSize) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": QWEN_TOKENS.id_of("<|endoftext|>"),
        "dtype": "bfloat16",
        "eos_token_id": QWEN_TOKENS.id_of("<|im_end|>"),
        "head_dim": language.head_dim,
        "hidden_act": "silu",
        "hidden_size": language.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": language.intermediate_size,
        "max_position_embeddings": 262144,
        "num_attention_heads": language.num_heads,
        "num_hidden_layers": language.num_layers,
        "num_key_value_heads": language.num_kv_heads,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


def _qwen3_vl(size: str) -> dict[str, Any]:
    language = QWEN3_VL_LANGUAGE[size]
    text = _qwen_text(language) | {
        "model_type": "qwen3_vl_text",
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": MROPE_SECTIONS[language.head_dim // 2],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": _qwen_vision(size, "qwen3_vl", language.hidden_size, DEEPSTACK_LEVELS[size]),
    } | _qwen_top_level()


def _qwen3_5(size: str) -> dict[str, Any]:
    language = QWEN3_5_LANGUAGE[size]
    interval = min(4, language.num_layers)
    linear_head_dim = 128 if size == "full" else language.head_dim
    text = _qwen_text(language) | {
        "attn_output_gate": True,
        "full_attention_interval": interval,
        "layer_types": [
            "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
            for layer in range(language.num_layers)
        ],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": linear_head_dim,
        "linear_num_key_heads": language.num_heads,
        "linear_num_value_heads": 2 * language.num_heads,
        "linear_value_head_dim": linear_head_dim,
        "mamba_ssm_dtype": "float32",
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 0,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": MROPE_SECTIONS[language.head_dim // 8],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": _qwen_vision(size, "qwen3_5", language.hidden_size, []),
    } | _qwen_top_level()


def _kimi_text(size: str) -> dict[str, Any]:
    language = KIMI_LANGUAGE[size]
    full = size == "full"
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": KIMI_TOKENS.id_of("[BOS]"),
        "dtype": "bfloat16",
        "eos_token_id": KIMI_TOKENS.id_of("[EOS]"),
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": language.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": language.intermediate_size,
        "kv_lora_rank": 512,
        "max_position_embeddings": 262144,
        "model_type": "kimi_k2",
        "moe_intermediate_size": language.intermediate_size // 2,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": language.num_heads,
        "num_experts_per_tok": 2,
        "num_hidden_layers": language.num_layers,
        "num_key_value_heads": language.num_kv_heads,
        "num_nextn_predict_layers": 0,
        "pad_token_id": KIMI_TOKENS.id_of("[PAD]"),
        "pretraining_tp": 1,
        "q_lora_rank": 1536 if full else 2 * language.head_dim,
        "qk_nope_head_dim": language.head_dim,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 64.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": language.head_dim,
        "vocab_size": VOCAB_SIZE,
    }


def _kimi_k25(size: str) -> dict[str, Any]:
    tower = KIMI_TOWERS[size]
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "bos_token_id": KIMI_TOKENS.id_of("[BOS]"),
        "dtype": "bfloat16",
        "eos_token_id": KIMI_TOKENS.id_of("[EOS]"),
        "ignore_index": -100,
        "media_placeholder_token_id": KIMI_TOKENS.id_of("<|media_pad|>"),
        "model_type": "kimi_k25",
        "pad_token_id": KIMI_TOKENS.id_of("[PAD]"),
        "text_config": _kimi_text(size),
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": {
            "init_pos_emb_height": tower.position_side,
            "init_pos_emb_time": 4,
            "init_pos_emb_width": tower.position_side,
            "merge_kernel_size": [2, 2],
            "merge_type": "sd2_tpool",
            "mm_hidden_size": tower.hidden_size,
            "mm_projector_type": "patchmerger",
            "patch_size": 14,
            "pos_emb_type": "divided_fixed",
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-05,
            "text_hidden_size": KIMI_LANGUAGE[size].hidden_size,
            "video_attn_type": "spatial_temporal",
            "vt_hidden_size": tower.hidden_size,
            "vt_intermediate_size": tower.intermediate_size,
            "vt_num_attention_heads": tower.num_heads,
            "vt_num_hidden_layers": tower.depth,
        },
    }
