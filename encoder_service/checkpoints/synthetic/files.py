"""The files besides the weights: configs, processor settings, tokenizer, chat template.

Owns the list of families and the files that all have. The folder ``published`` holds the files as on the hub,
at size ``tiny``; another size only replaces dimensions in ``config.json``. Chat templates were written for
this project, with the published special tokens and turn markers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from encoder_service.checkpoints.families import FAMILIES
from encoder_service.checkpoints.synthetic import glm, kimi, ling, qwen, qwen2_5
from encoder_service.checkpoints.synthetic.family import SyntheticFamily
from encoder_service.checkpoints.synthetic.tokens import (
    added_tokens_decoder,
    merges_text,
    ordinary_vocabulary,
    tokenizer,
)
from encoder_service.errors import ConfigurationError

SIZES: tuple[str, ...] = ("tiny", "small", "full")
# By the names of ``FAMILIES``.
SYNTHETIC: Mapping[str, SyntheticFamily] = {
    "qwen3_vl": qwen.QWEN3_VL,
    "qwen3_5": qwen.QWEN3_5,
    "kimi_k25": kimi.KIMI_K25,
    "qwen4_exp": qwen.QWEN4_EXP,
    "qwen3_omni_moe": qwen.QWEN3_OMNI,
    "interns1_pro": qwen.INTERNS1_PRO,
    "intern_s2_preview": qwen.INTERN_S2_PREVIEW,
    "kimi_vl": kimi.KIMI_VL,
    "kimi_k3": kimi.KIMI_K3,
    "glm4v": glm.GLM4V,
    "glm_ocr": glm.GLM_OCR,
    "glm5_next": glm.GLM5_NEXT,
    "ling_vl": ling.LING_VL,
    "qwen2_5_vl": qwen2_5.QWEN2_5_VL,
}
# With ``--with-lm``.
WITH_LANGUAGE_MODEL: tuple[str, ...] = tuple(name for name in FAMILIES if SYNTHETIC[name].language)


def config_for(family: str, size: str) -> dict[str, Any]:
    """The content of ``config.json``. Raises ConfigurationError for an unknown family or size."""
    for kind, value, allowed in (("family", family, FAMILIES), ("size", size, SIZES)):
        if value not in allowed:
            raise ConfigurationError(f"unknown {kind} {value!r}, choose one of {', '.join(allowed)}")
    config: dict[str, Any] = json.loads(_published(family, "config.json"))
    SYNTHETIC[family].set_sizes(config, size)
    return config


def small_files(family: str, size: str) -> dict[str, str]:
    """Every file of the checkpoint except the weights and their index: name to text."""
    config, kind = config_for(family, size), SYNTHETIC[family]
    template = _published(kind.settings, "chat_template.jinja")
    tokenizer_config = json.loads(_published(kind.settings, "tokenizer_config.json"))
    tokenizer_config["added_tokens_decoder"] = added_tokens_decoder(kind.tokens)
    contents = {"config.json": _text(config), "tokenizer.json": _text(tokenizer(kind.tokens))}
    for path in _folder(kind.settings).iterdir():
        if path.name.endswith("_config.json") and path.name != "tokenizer_config.json":
            contents[path.name] = path.read_text(encoding="utf-8")
    if kind.has_vocabulary_files:
        tokenizer_config["chat_template"] = template
        contents["vocab.json"] = _text(ordinary_vocabulary())
        contents["merges.txt"] = merges_text()
    contents["tokenizer_config.json"] = _text(tokenizer_config)
    if kind.template_in_json:
        contents["chat_template.json"] = _text({"chat_template": template})
    else:
        contents["chat_template.jinja"] = template
    return contents


def _folder(name: str) -> Any:
    return files("encoder_service.checkpoints.synthetic") / "published" / name


def _published(folder: str, name: str) -> str:
    text: str = (_folder(folder) / name).read_text(encoding="utf-8")
    return text


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
