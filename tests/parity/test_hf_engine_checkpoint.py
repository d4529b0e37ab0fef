"""Loading a language model: only its tensors, all of them, and the variants that checkpoints come in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.harness.reference import import_reference
from encoder_service.checkpoints.synthetic import config_for, make_checkpoint
from lm_adapter.engines.hf import RemoteVisionLM, load_language_model
from lm_adapter.engines.shared.checkpoint import vision_interface
from lm_adapter.errors import InvalidRequest
from tests.families import REPRESENTATIVE
from tests.parity.tower_cases import assert_close


@pytest.fixture(scope="module", autouse=True)
def reference() -> Any:
    return import_reference()


@pytest.fixture(scope="module", params=REPRESENTATIVE)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / request.param
    make_checkpoint(path, request.param, "tiny", seed=3, with_lm=True)
    return path


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()
    }


def copy_with(
    source: Path, target: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
) -> Path:
    """The checkpoint as one file without an index, after ``change(tensors, config)``."""
    target.mkdir()
    tensors, config = tensors_of(source), json.loads((source / "config.json").read_text())
    change(tensors, config)
    save_file({name: value.contiguous() for name, value in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return target


def logits(model: RemoteVisionLM) -> torch.Tensor:
    return model.prefill([list(range(10, 30))], [[]]).logits_BV


def test_missing_language_tensors_are_named(published: Path, tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".layers.1." in name and name.endswith("layernorm.weight")]:
            if "visual" not in name:
                del tensors[name]

    with pytest.raises(InvalidRequest, match=r"lacks \d language .*layers\.1\..*norm") as caught:
        load_language_model(copy_with(published, tmp_path / "copy", drop))
    assert caught.value.reason == "CHECKPOINT_MISSING_TENSORS"


def test_a_missing_head_is_refused_unless_it_is_tied(published: Path, tmp_path: Path) -> None:
    def drop_head(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        del tensors[next(name for name in tensors if name.endswith("lm_head.weight"))]

    def tie(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        drop_head(tensors, config)
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True

    with pytest.raises(InvalidRequest, match="lm_head"):
        load_language_model(copy_with(published, tmp_path / "untied", drop_head))
    tied = load_language_model(copy_with(published, tmp_path / "tied", tie))
    assert tied.head_VD.data_ptr() == tied.language_model.embed_tokens.weight.data_ptr()


def test_unusable_directories_are_refused(published: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read .*config\.json"):
        load_language_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InvalidRequest, match="holds a list"):
        load_language_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(InvalidRequest, match="'gpt2' is not driven here"):
        load_language_model(tmp_path)
    shutil.copy(published / "config.json", tmp_path)
    with pytest.raises(InvalidRequest, match="cannot be loaded: OSError"):
        load_language_model(tmp_path)


def test_bfloat16(published: Path) -> None:
    """Weights in bfloat16, but what the reference keeps in float32; rotary frequencies stay float32."""
    model = load_language_model(published, dtype=torch.bfloat16)
    dtypes = {name: value.dtype for name, value in model.language_model.state_dict().items()}
    in_float32 = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    kept = model.language_model._keep_in_fp32_modules_strict or ()
    assert all(any(mark in name for mark in kept) for name in in_float32), in_float32
    assert any(name.endswith("e_score_correction_bias") for name in in_float32) == ("kimi" in published.name)
    assert model.dtype == model.head_VD.dtype == torch.bfloat16
    assert model.language_model.rotary_emb.inv_freq.dtype == torch.float32
    expected = logits(load_language_model(published))
    assert_close(f"{published.name} bfloat16 against float32", logits(model), expected, 0.1)


def test_kimi_placeholders_in_both_spellings() -> None:
    config = config_for("kimi_k25", "tiny")
    interface = vision_interface(config)
    assert (
        interface.image_placeholder_id
        == interface.video_placeholder_id
        == config["media_placeholder_token_id"]
    )
    spelled = vision_interface(
        {"model_type": "kimi_k25", "image_token_id": 5, "video_token_id": 6, "vision_config": {}}
    )
    assert (spelled.image_placeholder_id, spelled.video_placeholder_id, spelled.merge_size) == (5, 6, 2)
    with pytest.raises(InvalidRequest, match="neither image_token_id nor media_placeholder_token_id"):
        vision_interface({"model_type": "kimi_k25"})


@pytest.mark.parametrize("family", ["glm4v", "glm_ocr", "glm5_next"])
def test_frames_of_glms_clips_have_the_placeholder_of_images(family: str) -> None:
    config = config_for(family, "tiny")
    interface = vision_interface(config)
    assert interface.placeholder_ids == (config["image_token_id"],) * 2
    assert interface.uses_mrope == (family != "glm5_next")


MOE_TEXT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "shared_expert_intermediate_size": 32,
}


def transpose_experts(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    """Qwen3-VL-MoE is published with [experts, in, out]; the reference saves [experts, out, in]."""
    names = [name for name in tensors if ".mlp.experts." in name]
    assert names
    for name in names:
        tensors[name] = tensors[name].transpose(1, 2)


def split_experts(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    """One tensor per expert and projection, as Kimi and earlier mixtures are published."""
    for name in [name for name in tensors if name.endswith(".mlp.experts.gate_up_proj")]:
        stem = name.removesuffix(".gate_up_proj")
        gates_ups, downs = tensors.pop(name), tensors.pop(f"{stem}.down_proj")
        for expert, (gate_up, down) in enumerate(zip(gates_ups, downs, strict=True)):
            gate, up = gate_up.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            tensors |= {f"{stem}.{expert}.{part}.weight": value for part, value in parts.items()}


@pytest.mark.parametrize(
    ("family", "change"),
    [("qwen3_vl", None), ("qwen3_vl", transpose_experts), ("qwen3_5", None), ("qwen3_5", split_experts)],
)
def test_mixtures_of_experts_in_every_layout(
    family: str, change: Any, tmp_path: Path, reference: Any
) -> None:
    config = config_for(family, "tiny")
    config["model_type"] = f"{family}_moe"
    config["text_config"] |= MOE_TEXT | {"model_type": f"{family}_moe_text"}
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "config.json").write_text(json.dumps(config))
    class_name = {"qwen3_vl": "Qwen3VLMoe", "qwen3_5": "Qwen3_5Moe"}[family] + "ForConditionalGeneration"
    torch.manual_seed(0)
    full = getattr(reference, class_name)(reference.AutoConfig.from_pretrained(saved)).float().eval()
    full.save_pretrained(saved)
    checkpoint = copy_with(saved, tmp_path / "changed", change) if change else saved
    model = load_language_model(checkpoint)
    if change:
        full = getattr(reference, class_name).from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = list(range(10, 30))
    found = model.prefill([ids], [[]], all_logits=True).prompt_logits_NV
    assert found is not None
    with torch.no_grad():
        expected = full(input_ids=torch.tensor([ids])).logits[0]
    assert_close(family, found[0], expected, 1e-5)
