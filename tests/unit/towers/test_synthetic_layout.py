"""Names and shapes of synthetic checkpoints against the published ones, written out."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from encoder_service.towers.synthetic import FAMILIES, SIZES, config_for, make_checkpoint, vision_layout

Shape = tuple[int, ...]

# Every vision tensor: its shape in the tiny and in the full tower. The full shapes are those of the
# published Qwen3-VL-8B, Qwen3.5-9B and Kimi-K2.5.
QWEN_BLOCK: dict[str, tuple[Shape, Shape]] = {
    "norm1.weight": ((64,), (1152,)),
    "norm1.bias": ((64,), (1152,)),
    "norm2.weight": ((64,), (1152,)),
    "norm2.bias": ((64,), (1152,)),
    "attn.qkv.weight": ((192, 64), (3456, 1152)),
    "attn.qkv.bias": ((192,), (3456,)),
    "attn.proj.weight": ((64, 64), (1152, 1152)),
    "attn.proj.bias": ((64,), (1152,)),
    "mlp.linear_fc1.weight": ((160, 64), (4304, 1152)),
    "mlp.linear_fc1.bias": ((160,), (4304,)),
    "mlp.linear_fc2.weight": ((64, 160), (1152, 4304)),
    "mlp.linear_fc2.bias": ((64,), (1152,)),
}
QWEN_MERGER: dict[str, tuple[Shape, Shape]] = {
    "linear_fc1.weight": ((256, 256), (4608, 4608)),
    "linear_fc1.bias": ((256,), (4608,)),
    "linear_fc2.weight": ((64, 256), (4096, 4608)),
    "linear_fc2.bias": ((64,), (4096,)),
}
QWEN: dict[str, tuple[Shape, Shape]] = {
    "model.visual.patch_embed.proj.weight": ((64, 3, 2, 16, 16), (1152, 3, 2, 16, 16)),
    "model.visual.patch_embed.proj.bias": ((64,), (1152,)),
    "model.visual.pos_embed.weight": ((256, 64), (2304, 1152)),
    "model.visual.merger.norm.weight": ((64,), (1152,)),
    "model.visual.merger.norm.bias": ((64,), (1152,)),
}
KIMI_BLOCK: dict[str, tuple[Shape, Shape]] = {
    "norm0.weight": ((64,), (1152,)),
    "norm0.bias": ((64,), (1152,)),
    "norm1.weight": ((64,), (1152,)),
    "norm1.bias": ((64,), (1152,)),
    "wqkv.weight": ((192, 64), (3456, 1152)),
    "wqkv.bias": ((192,), (3456,)),
    "wo.weight": ((64, 64), (1152, 1152)),
    "wo.bias": ((64,), (1152,)),
    "mlp.fc0.weight": ((160, 64), (4304, 1152)),
    "mlp.fc0.bias": ((160,), (4304,)),
    "mlp.fc1.weight": ((64, 160), (1152, 4304)),
    "mlp.fc1.bias": ((64,), (1152,)),
}
KIMI: dict[str, tuple[Shape, Shape]] = {
    "vision_tower.patch_embed.proj.weight": ((64, 3, 14, 14), (1152, 3, 14, 14)),
    "vision_tower.patch_embed.proj.bias": ((64,), (1152,)),
    "vision_tower.patch_embed.pos_emb.weight": ((16, 16, 64), (64, 64, 1152)),
    "vision_tower.encoder.final_layernorm.weight": ((64,), (1152,)),
    "vision_tower.encoder.final_layernorm.bias": ((64,), (1152,)),
    "mm_projector.pre_norm.weight": ((64,), (1152,)),
    "mm_projector.pre_norm.bias": ((64,), (1152,)),
    "mm_projector.proj.0.weight": ((256, 256), (4608, 4608)),
    "mm_projector.proj.0.bias": ((256,), (4608,)),
    "mm_projector.proj.2.weight": ((64, 256), (7168, 4608)),
    "mm_projector.proj.2.bias": ((64,), (7168,)),
}


def expected_vision(family: str, size: str) -> dict[str, Shape]:
    column = ["tiny", "full"].index(size)
    if family == "kimi_k25":
        table = dict(KIMI)
        for block in range([3, 27][column]):
            table |= {
                f"vision_tower.encoder.blocks.{block}.{name}": pair for name, pair in KIMI_BLOCK.items()
            }
        return {name: pair[column] for name, pair in table.items()}
    table = dict(QWEN)
    for block in range([4, 27][column]):
        table |= {f"model.visual.blocks.{block}.{name}": pair for name, pair in QWEN_BLOCK.items()}
    table |= {f"model.visual.merger.{name}": pair for name, pair in QWEN_MERGER.items()}
    for level in range([2, 3][column] if family == "qwen3_vl" else 0):
        prefix = f"model.visual.deepstack_merger_list.{level}"
        table |= {f"{prefix}.{name}": pair for name, pair in QWEN_MERGER.items()}
        table |= {f"{prefix}.norm.{name}": ((256,), (4608,)) for name in ("weight", "bias")}
    return {name: pair[column] for name, pair in table.items()}


LANGUAGE_MLP: dict[str, Shape] = {
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
    "mlp.gate_proj.weight": (128, 64),
    "mlp.up_proj.weight": (128, 64),
    "mlp.down_proj.weight": (64, 128),
}
QWEN3_VL_LAYER = LANGUAGE_MLP | {
    "self_attn.q_proj.weight": (128, 64),
    "self_attn.k_proj.weight": (64, 64),
    "self_attn.v_proj.weight": (64, 64),
    "self_attn.o_proj.weight": (64, 128),
    "self_attn.q_norm.weight": (32,),
    "self_attn.k_norm.weight": (32,),
}
# The query projection of Qwen3.5 holds an output gate too: 2 heads of 64, twice.
QWEN3_5_FULL_LAYER = LANGUAGE_MLP | {
    "self_attn.q_proj.weight": (256, 64),
    "self_attn.k_proj.weight": (64, 64),
    "self_attn.v_proj.weight": (64, 64),
    "self_attn.o_proj.weight": (64, 128),
    "self_attn.q_norm.weight": (64,),
    "self_attn.k_norm.weight": (64,),
}
# 2 key heads and 4 value heads of 64.
QWEN3_5_LINEAR_LAYER = LANGUAGE_MLP | {
    "linear_attn.A_log": (4,),
    "linear_attn.dt_bias": (4,),
    "linear_attn.conv1d.weight": (512, 1, 4),
    "linear_attn.norm.weight": (64,),
    "linear_attn.out_proj.weight": (64, 256),
    "linear_attn.in_proj_qkv.weight": (512, 64),
    "linear_attn.in_proj_z.weight": (256, 64),
    "linear_attn.in_proj_b.weight": (4, 64),
    "linear_attn.in_proj_a.weight": (4, 64),
}
# Latents and rotary dimension as published, 512 and 64: kernels are made for no other.
KIMI_ATTENTION: dict[str, Shape] = {
    "self_attn.q_a_proj.weight": (32, 64),
    "self_attn.q_a_layernorm.weight": (32,),
    "self_attn.q_b_proj.weight": (320, 32),
    "self_attn.kv_a_proj_with_mqa.weight": (576, 64),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_b_proj.weight": (128, 512),
    "self_attn.o_proj.weight": (64, 64),
}
KIMI_EXPERTS: dict[str, Shape] = {
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
    "mlp.gate.weight": (4, 64),
    "mlp.gate.e_score_correction_bias": (4,),
} | {
    f"mlp.{expert}.{name}": shape
    for expert in ("experts.0", "experts.1", "experts.2", "experts.3", "shared_experts")
    for name, shape in {
        "gate_proj.weight": (64, 64),
        "up_proj.weight": (64, 64),
        "down_proj.weight": (64, 64),
    }.items()
}


def expected_language(family: str) -> dict[str, Shape]:
    """The tiny language model's tensors."""
    layers: list[dict[str, Shape]] = {
        "qwen3_vl": [QWEN3_VL_LAYER] * 4,
        "qwen3_5": [QWEN3_5_LINEAR_LAYER] * 3 + [QWEN3_5_FULL_LAYER],
        "kimi_k25": [LANGUAGE_MLP | KIMI_ATTENTION] + [KIMI_EXPERTS | KIMI_ATTENTION] * 2,
    }[family]
    root, head = (
        ("language_model.model", "language_model.lm_head")
        if family == "kimi_k25"
        else (
            "model.language_model",
            "lm_head",
        )
    )
    return {
        f"{root}.embed_tokens.weight": (640, 64),
        f"{root}.norm.weight": (64,),
        f"{head}.weight": (640, 64),
    } | {
        f"{root}.layers.{index}.{name}": shape
        for index, layer in enumerate(layers)
        for name, shape in layer.items()
    }


def read_shapes(checkpoint: Path) -> dict[str, Shape]:
    found: dict[str, Shape] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_vision_tensors_have_the_published_names_and_shapes(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "out", family, "tiny", seed=0)
    assert read_shapes(tmp_path / "out") == expected_vision(family, "tiny")


@pytest.mark.parametrize("family", FAMILIES)
def test_full_towers_have_the_published_dimensions(family: str) -> None:
    found = {spec.name: spec.shape for spec in vision_layout(config_for(family, "full"))}
    assert found == expected_vision(family, "full")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_language_model_adds_its_published_tensors(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "out", family, "tiny", seed=0, with_lm=True)
    assert read_shapes(tmp_path / "out") == expected_vision(family, "tiny") | expected_language(family)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_fit_the_language_model(family: str, size: str) -> None:
    config = config_for(family, size)
    vision, text = config["vision_config"], config["text_config"]
    out_width = vision["text_hidden_size" if family == "kimi_k25" else "out_hidden_size"]
    assert out_width == text["hidden_size"]
    if family == "kimi_k25":
        assert vision["mm_hidden_size"] == vision["vt_hidden_size"]
        return
    levels = vision["deepstack_visual_indexes"]
    assert all(level < vision["depth"] for level in levels)
    assert len(levels) <= text["num_hidden_layers"]
    assert (len(levels) >= 2) == (family == "qwen3_vl")
    rope = text["rope_scaling" if family == "qwen3_vl" else "rope_parameters"]
    rotary_dim = int(text["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    assert sum(rope["mrope_section"]) == rotary_dim // 2
    # Interleaved sections: axis 1 sits at 1, 4, 7, ..., axis 2 at 2, 5, 8, ..., all inside the half.
    assert 3 * rope["mrope_section"][1] - 2 < rotary_dim // 2
    assert 3 * rope["mrope_section"][2] - 1 < rotary_dim // 2
