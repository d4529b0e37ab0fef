"""Sizes of the random checkpoints of GLM, and the layers of its language models.

Towers of size ``full`` have the published dimensions of GLM-4.1V-9B, GLM-OCR and GLM-5.3-Flash. Language
models are always small, but as wide as the tower's rows. GLM-5.3-Flash has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from encoder_service.checkpoints.synthetic.family import LanguageTensors, SyntheticFamily
from encoder_service.checkpoints.synthetic.tensors import TensorSpec, bias, rms_norm, weight
from encoder_service.checkpoints.synthetic.tokens import GLM_TOKENS

# mlp: width of GLM-OCR's and GLM-5.3-Flash's; GLM-4.1V's is as wide as the rows. merger: width of GLM-4.1V's
# and GLM-5.3-Flash's. image_size: the learned table has one position for each patch of such an image.
TOWERS = {
    "tiny": {"depth": 3, "hidden_size": 64, "num_heads": 4, "mlp": 160, "merger": 96, "image_size": 224},
    "small": {"depth": 6, "hidden_size": 256, "num_heads": 4, "mlp": 1024, "merger": 768, "image_size": 336},
}
FULL_TOWERS = {
    "glm4v": {"depth": 24, "hidden_size": 1536, "num_heads": 12, "intermediate_size": 13696},
    "glm_ocr": {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096},
    "glm5_next": {
        "depth": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "projection_intermediate_size": 10240,
    },
}
# Hidden size, layers, heads, key-value heads, head dim, intermediate size. GLM-4.1V's heads are together as
# wide as the model.
LANGUAGE_MODELS = {"tiny": (64, 3, 2, 1, 32, 128), "small": (256, 4, 4, 2, 64, 768)}
FULL_LANGUAGE_MODELS = {
    "glm4v": (4096, 2, 32, 2, 128, 4096),
    "glm_ocr": (1536, 2, 16, 8, 128, 4608),
    "glm5_next": (4096, 2, 32, 2, 128, 4096),
}


def set_sizes(config: dict[str, Any], size: str) -> None:
    family, text, vision = config["model_type"], config["text_config"], config["vision_config"]
    sizes = FULL_LANGUAGE_MODELS[family] if size == "full" else LANGUAGE_MODELS[size]
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    text |= dict(zip((*names, "intermediate_size"), sizes, strict=True))
    vision["out_hidden_size"] = text["hidden_size"]
    if family == "glm_ocr":
        # As published: vLLM takes it for the width of the merger's MLP, which is three times the rows'.
        text["intermediate_size"] = 3 * text["hidden_size"]
    if family == "glm5_next":
        del text["head_dim"]  # latent attention without rotary positions
        text["num_key_value_heads"] = text["num_attention_heads"]
    else:
        _set_rotary(text)
    if size == "full":
        vision |= FULL_TOWERS[family]
        return
    tower = dict(TOWERS[size])
    mlp, merger = tower.pop("mlp"), tower.pop("merger")
    vision |= tower | {"intermediate_size": merger if family == "glm4v" else mlp}
    if family == "glm5_next":
        vision["projection_intermediate_size"] = merger


def _set_rotary(text: dict[str, Any]) -> None:
    """Number of rotary frequencies of the time, height and width axes: a quarter, three and three eighths."""
    rope = text["rope_parameters"]
    half = int(text["head_dim"] * rope["partial_rotary_factor"]) // 2
    rope["mrope_section"] = [half // 4, half * 3 // 8, half * 3 // 8]


def layer(text: dict[str, Any], prefix: str, _number: int) -> Iterator[TensorSpec]:
    """A layer of GLM-4's architecture: its two blocks are normed before and after, gate and up are one
    matrix."""
    width, head_dim, mlp_width = text["hidden_size"], text["head_dim"], text["intermediate_size"]
    query_width, kv_width = (
        text[heads] * head_dim for heads in ("num_attention_heads", "num_key_value_heads")
    )
    yield rms_norm(f"{prefix}.input_layernorm", width)
    for name, outputs in (("q_proj", query_width), ("k_proj", kv_width), ("v_proj", kv_width)):
        yield weight(f"{prefix}.self_attn.{name}.weight", outputs, width)
        if text["attention_bias"]:
            yield bias(f"{prefix}.self_attn.{name}.bias", outputs)
    yield weight(f"{prefix}.self_attn.o_proj.weight", width, query_width)
    yield rms_norm(f"{prefix}.post_self_attn_layernorm", width)
    yield rms_norm(f"{prefix}.post_attention_layernorm", width)
    yield weight(f"{prefix}.mlp.gate_up_proj.weight", 2 * mlp_width, width)
    yield weight(f"{prefix}.mlp.down_proj.weight", width, mlp_width)
    yield rms_norm(f"{prefix}.post_mlp_layernorm", width)


LANGUAGE = LanguageTensors("model.language_model", "lm_head", layer=layer)
GLM4V, GLM_OCR, GLM5_NEXT = (
    SyntheticFamily(
        set_sizes=set_sizes,
        settings=settings,
        tokens=GLM_TOKENS,
        language=language,
        has_vocabulary_files=False,
    )
    for settings, language in (("glm", LANGUAGE), ("glm_ocr", LANGUAGE), ("glm5_next", None))
)
