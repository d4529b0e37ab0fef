"""The files besides the weights: configs, processor settings, tokenizer, chat template.

Owns the sizes of every family. The folder ``published`` holds the files as on the hub, at size ``tiny``;
another size only replaces dimensions in ``config.json``. Towers of size ``full`` have the published
dimensions of Qwen3-VL-8B, Qwen3.5-9B and Kimi-K2.5. Language models are always small, but as wide as the
tower's rows. Chat templates were written for this project, with the published special tokens and turn
markers.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from encoder_service.checkpoints.synthetic.tokens import (
    KIMI_TOKENS,
    QWEN_TOKENS,
    added_tokens_decoder,
    merges_text,
    ordinary_vocabulary,
    tokenizer,
)
from encoder_service.errors import ConfigurationError

FAMILIES: tuple[str, ...] = ("qwen3_vl", "qwen3_5", "kimi_k25")
SIZES: tuple[str, ...] = ("tiny", "small", "full")

QWEN_TOWERS = {
    "tiny": {"depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 160, "side": 16},
    "small": {"depth": 8, "hidden_size": 256, "num_heads": 4, "intermediate_size": 1024, "side": 48},
    "full": {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "side": 48},
}
KIMI_TOWERS = {
    "tiny": {"depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 160, "side": 16},
    "small": {"depth": 6, "hidden_size": 256, "num_heads": 4, "intermediate_size": 1024, "side": 64},
    "full": {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "side": 64},
}
# The language model has at least one layer per deepstack level, so that every level influences the logits.
DEEPSTACK_LEVELS = {"tiny": [1, 2], "small": [1, 3, 5], "full": [8, 16, 24]}

# Hidden size, layers, heads, key-value heads, head dim, intermediate size.
LANGUAGE_MODELS = {
    "qwen3_vl": {
        "tiny": (64, 4, 4, 2, 32, 128),
        "small": (256, 4, 4, 2, 64, 768),
        "full": (4096, 3, 32, 8, 128, 4096),
    },
    "qwen3_5": {
        "tiny": (64, 4, 2, 1, 64, 128),
        "small": (256, 8, 4, 2, 64, 768),
        "full": (4096, 2, 16, 4, 256, 4096),
    },
    # Latent attention: the head dim is that of the part of a head without rotary positions. The latent's
    # width and the rotary part have the published values in every size, because engines have kernels for no
    # others. For the same reason Qwen3.5's linear heads are at least 64 wide.
    "kimi_k25": {
        "tiny": (64, 3, 4, 4, 16, 128),
        "small": (256, 4, 4, 4, 32, 768),
        "full": (7168, 2, 8, 8, 128, 2048),
    },
}
# Number of rotary frequencies of the time, height and width axes, by half of the rotary dimension. The
# interleaved layout requires that three times the number of the height or the width is at most that half plus
# two.
MROPE_SECTIONS = {8: [3, 3, 2], 16: [6, 5, 5], 32: [11, 11, 10], 64: [24, 20, 20]}


def config_for(family: str, size: str) -> dict[str, Any]:
    """The content of ``config.json``. Raises ConfigurationError for an unknown family or size."""
    for kind, value, allowed in (("family", family, FAMILIES), ("size", size, SIZES)):
        if value not in allowed:
            raise ConfigurationError(f"unknown {kind} {value!r}, choose one of {', '.join(allowed)}")
    config: dict[str, Any] = json.loads(_published(family, "config.json"))
    hidden_size, num_layers, num_heads, num_kv_heads, head_dim, mlp_width = LANGUAGE_MODELS[family][size]
    text = config["text_config"]
    text |= {
        "hidden_size": hidden_size,
        "intermediate_size": mlp_width,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_kv_heads,
    }
    if family == "kimi_k25":
        text["moe_intermediate_size"] = mlp_width // 2
        text["q_lora_rank"] = 1536 if size == "full" else 2 * head_dim
        text["qk_nope_head_dim"] = text["v_head_dim"] = head_dim
        _set_kimi_tower(config["vision_config"], size, hidden_size)
        return config
    text["head_dim"] = head_dim
    if family == "qwen3_vl":
        text["rope_scaling"]["mrope_section"] = list(MROPE_SECTIONS[head_dim // 2])
    else:
        _set_linear_attention(text, size)
    tower = dict(QWEN_TOWERS[size])
    tower["num_position_embeddings"] = tower.pop("side") ** 2
    levels = DEEPSTACK_LEVELS[size] if family == "qwen3_vl" else []
    config["vision_config"] |= {
        **tower,
        "deepstack_visual_indexes": list(levels),
        "out_hidden_size": hidden_size,
    }
    return config


def _set_kimi_tower(vision: dict[str, Any], size: str, hidden_size: int) -> None:
    tower = KIMI_TOWERS[size]
    vision |= {
        "init_pos_emb_height": tower["side"],
        "init_pos_emb_width": tower["side"],
        "mm_hidden_size": tower["hidden_size"],
        "text_hidden_size": hidden_size,
        "vt_hidden_size": tower["hidden_size"],
        "vt_intermediate_size": tower["intermediate_size"],
        "vt_num_attention_heads": tower["num_heads"],
        "vt_num_hidden_layers": tower["depth"],
    }


def _set_linear_attention(text: dict[str, Any], size: str) -> None:
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


def small_files(family: str, size: str) -> dict[str, str]:
    """Every file of the checkpoint except the weights and their index: name to text."""
    config = config_for(family, size)
    is_kimi = family == "kimi_k25"
    tokens, folder = (KIMI_TOKENS, "kimi_k25") if is_kimi else (QWEN_TOKENS, "qwen")
    template = _published(folder, "chat_template.jinja")
    tokenizer_config = json.loads(_published(folder, "tokenizer_config.json"))
    tokenizer_config["added_tokens_decoder"] = added_tokens_decoder(tokens)
    contents = {
        "config.json": _text(config),
        "tokenizer.json": _text(tokenizer(tokens)),
        "preprocessor_config.json": _published(folder, "preprocessor_config.json"),
        "generation_config.json": _published(folder, "generation_config.json"),
    }
    if not is_kimi:
        tokenizer_config["chat_template"] = template
        contents["video_preprocessor_config.json"] = _published(folder, "video_preprocessor_config.json")
        contents["vocab.json"] = _text(ordinary_vocabulary())
        contents["merges.txt"] = merges_text()
    contents["tokenizer_config.json"] = _text(tokenizer_config)
    if family == "qwen3_vl":
        contents["chat_template.json"] = _text({"chat_template": template})
    else:
        contents["chat_template.jinja"] = template
    return contents


def _published(folder: str, name: str) -> str:
    path = files("encoder_service.checkpoints.synthetic") / "published" / folder / name
    return path.read_text(encoding="utf-8")


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
