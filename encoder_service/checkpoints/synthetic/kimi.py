"""Sizes of the random checkpoints of Kimi-K2.5, Kimi-VL and Kimi-K3. Towers of size ``full`` have the
published dimensions. Language models are always small, but as wide as the tower's rows.

Kimi-VL's config.json spells the tower's sizes as the reference package does. Kimi-K3's routed experts are
published in four bits; here they have the 16 bits of the rest.
"""

from __future__ import annotations

from typing import Any

from encoder_service.checkpoints.synthetic.family import LanguageTensors, SyntheticFamily
from encoder_service.checkpoints.synthetic.tokens import KIMI_TOKENS, KIMI_VL_TOKENS

TOWERS = {
    "tiny": {"depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 160, "side": 16},
    "small": {"depth": 6, "hidden_size": 256, "num_heads": 4, "intermediate_size": 1024, "side": 64},
    "full": {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "side": 64},
}
# Hidden size, layers, heads, head dim, intermediate size. Latent attention: the head dim is that of the part
# of a head without rotary positions. The latent's width and the rotary part have the published values in
# every size, because engines have kernels for no others.
LANGUAGE_MODELS = {
    "tiny": (64, 3, 4, 16, 128),
    "small": (256, 4, 4, 32, 768),
    "full": (7168, 2, 8, 128, 2048),
}

# Of Kimi-K3's tower: the width of all heads together, which in the others is the tower's width; the sizes
# that differ from the others'.
K3_QKV_WIDTHS = {"tiny": 96, "small": 384, "full": 1536}
K3_FULL = {"hidden_size": 1024, "num_heads": 12, "intermediate_size": 4096}
# Of the linear attention: layers from 1 on, then those with full attention, heads.
K3_LAYERS = {"tiny": ([1, 2, 3], [4], 2), "small": ([1, 2, 3], [4], 4), "full": ([1], [2], 8)}


def set_sizes(config: dict[str, Any], size: str) -> None:
    hidden_size, num_layers, num_heads, head_dim, mlp_width = LANGUAGE_MODELS[size]
    config["text_config"] |= {
        "hidden_size": hidden_size,
        "intermediate_size": mlp_width,
        "moe_intermediate_size": mlp_width // 2,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_heads,
        "q_lora_rank": 1536 if size == "full" else 2 * head_dim,
        "qk_nope_head_dim": head_dim,
        "v_head_dim": head_dim,
    }
    tower = TOWERS[size]
    config["vision_config"] |= {
        "init_pos_emb_height": tower["side"],
        "init_pos_emb_width": tower["side"],
        "mm_hidden_size": tower["hidden_size"],
        "text_hidden_size": hidden_size,
        "vt_hidden_size": tower["hidden_size"],
        "vt_intermediate_size": tower["intermediate_size"],
        "vt_num_attention_heads": tower["num_heads"],
        "vt_num_hidden_layers": tower["depth"],
    }


def set_vl_sizes(config: dict[str, Any], size: str) -> None:
    hidden_size, num_layers, num_heads, head_dim, mlp_width = LANGUAGE_MODELS[size]
    config["text_config"] |= {
        "hidden_size": 2048 if size == "full" else hidden_size,
        "intermediate_size": mlp_width,
        "moe_intermediate_size": mlp_width // 2,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_heads,
        "qk_nope_head_dim": head_dim,
        "v_head_dim": head_dim,
    }
    tower = TOWERS[size]
    config["vision_config"] |= {
        "hidden_size": tower["hidden_size"],
        "init_pos_emb_height": tower["side"],
        "init_pos_emb_width": tower["side"],
        "intermediate_size": tower["intermediate_size"],
        "num_attention_heads": tower["num_heads"],
        "num_hidden_layers": tower["depth"],
    }


def set_k3_sizes(config: dict[str, Any], size: str) -> None:
    set_sizes(config, size)
    linear_layers, full_layers, num_heads = K3_LAYERS[size]
    text, vision = config["text_config"], config["vision_config"]
    text["num_hidden_layers"] = len(linear_layers) + len(full_layers)
    text["routed_expert_hidden_size"] = text["hidden_size"] // 2
    text["linear_attn_config"] |= {
        "full_attn_layers": full_layers,
        "kda_layers": linear_layers,
        "num_heads": num_heads,
    }
    vision["qkv_hidden_size"] = K3_QKV_WIDTHS[size]
    if size == "full":
        vision["mm_hidden_size"] = K3_FULL["hidden_size"]
        vision |= {
            "vt_hidden_size": K3_FULL["hidden_size"],
            "vt_num_attention_heads": K3_FULL["num_heads"],
            "vt_intermediate_size": K3_FULL["intermediate_size"],
        }


KIMI_K25 = SyntheticFamily(
    set_sizes=set_sizes,
    settings="kimi_k25",
    tokens=KIMI_TOKENS,
    language=LanguageTensors("language_model.model", "language_model.lm_head"),
    has_vocabulary_files=False,
)
KIMI_VL = SyntheticFamily(
    set_sizes=set_vl_sizes,
    settings="kimi_vl",
    tokens=KIMI_VL_TOKENS,
    language=LanguageTensors("language_model.model", "language_model.lm_head"),
    has_vocabulary_files=False,
)
KIMI_K3 = SyntheticFamily(
    set_sizes=set_k3_sizes,
    settings="kimi_k3",
    tokens=KIMI_TOKENS,
    language=LanguageTensors("language_model.model", "language_model.lm_head"),
    has_vocabulary_files=False,
)
