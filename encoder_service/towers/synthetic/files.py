"""The small files beside the weights: processor settings, generation settings, tokenizer, chat template.

Owns their content, as mappings from file name to text. Processor settings are those of the published
checkpoints; tokenizer and chat templates are our own, with the published special tokens and turn markers.
"""

from __future__ import annotations

import json
from typing import Any

from encoder_service.towers.synthetic.configs import config_for
from encoder_service.towers.synthetic.tokens import (
    KIMI_TOKENS,
    QWEN_TOKENS,
    SpecialTokens,
    merges,
    ordinary_vocabulary,
)

QWEN_CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""

KIMI_CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type == 'image' %}<|media_begin|>image<|media_content|><|media_pad|><|media_end|>
{%- elif part.type == 'video' %}<|kimi_k25_video_placeholder|>
{%- elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif %}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif -%}
"""


def small_files(family: str, size: str) -> dict[str, str]:
    """Every file of the checkpoint but the weights and their index, by name."""
    files: dict[str, Any] = {"config.json": config_for(family, size)}
    files |= _kimi_files() if family == "kimi_k25" else _qwen_files(family)
    return {
        name: content
        if isinstance(content, str)
        else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        for name, content in files.items()
    }


def _qwen_files(family: str) -> dict[str, Any]:
    processor = {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    end, pad = QWEN_TOKENS.id_of("<|im_end|>"), QWEN_TOKENS.id_of("<|endoftext|>")
    tokenizer_config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": _added_tokens_decoder(QWEN_TOKENS),
        "bos_token": None,
        "chat_template": QWEN_CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    template_file: dict[str, Any] = (
        {"chat_template.json": {"chat_template": QWEN_CHAT_TEMPLATE}}
        if family == "qwen3_vl"
        else {"chat_template.jinja": QWEN_CHAT_TEMPLATE}
    )
    return template_file | {
        "preprocessor_config.json": processor | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": processor
        | {
            "size": {"longest_edge": 25165824, "shortest_edge": 4096},
            "video_processor_type": "Qwen3VLVideoProcessor",
        },
        "generation_config.json": {
            "bos_token_id": pad,
            "do_sample": False,
            "eos_token_id": [end, pad],
            "pad_token_id": pad,
        },
        "tokenizer.json": _tokenizer(QWEN_TOKENS),
        "tokenizer_config.json": tokenizer_config,
        "vocab.json": ordinary_vocabulary(),
        "merges.txt": "\n".join(["#version: 0.2", *(f"{first} {second}" for first, second in merges())])
        + "\n",
    }


def _kimi_files() -> dict[str, Any]:
    return {
        "preprocessor_config.json": {
            "media_proc_cfg": {
                "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
                "fixed_output_tokens": None,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "in_patch_limit": 16384,
                "in_patch_limit_each_frame": 4096,
                "in_patch_limit_video": None,
                "max_num_frames_each_video": None,
                "merge_kernel_size": 2,
                "patch_limit_on_one_side": 512,
                "patch_size": 14,
                "sample_fps": 2.0,
                "temporal_merge_kernel_size": 4,
                "timestamp_mode": "hh:mm:ss.fff",
            },
        },
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": KIMI_TOKENS.id_of("<|im_end|>"),
            "pad_token_id": KIMI_TOKENS.id_of("[PAD]"),
        },
        "tokenizer.json": _tokenizer(KIMI_TOKENS),
        "tokenizer_config.json": {
            "added_tokens_decoder": _added_tokens_decoder(KIMI_TOKENS),
            "bos_token": "[BOS]",
            "clean_up_tokenization_spaces": False,
            "eos_token": "[EOS]",
            "model_max_length": 262144,
            "pad_token": "[PAD]",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "[UNK]",
        },
        "chat_template.jinja": KIMI_CHAT_TEMPLATE,
    }


def _added_tokens_decoder(tokens: SpecialTokens) -> dict[str, dict[str, Any]]:
    return {str(index): _added_token(name) for name, index in tokens.ids().items()}


def _added_token(name: str) -> dict[str, Any]:
    return {
        "content": name,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }


def _tokenizer(tokens: SpecialTokens) -> dict[str, Any]:
    """``tokenizer.json`` of a byte-level BPE: words split off with their leading space, then merged."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index} | _added_token(name) for name, index in tokens.ids().items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ordinary_vocabulary(),
            "merges": [f"{first} {second}" for first, second in merges()],
        },
    }
