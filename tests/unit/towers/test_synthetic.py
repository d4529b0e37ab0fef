"""Synthetic checkpoints: determinism, shards, small files, refusals."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from encoder_service.errors import ConfigurationError
from encoder_service.towers.synthetic import (
    FAMILIES,
    config_for,
    make_checkpoint,
    vision_tensors,
    writer,
)


def read_all(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_bfloat16_but_for_the_few_published_in_float32(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "out", family, "tiny", seed=0, with_lm=True)
    for name, tensor in read_all(tmp_path / "out").items():
        is_float32 = re.search(r"A_log$|linear_attn\.norm\.weight$|e_score_correction_bias$", name)
        assert tensor.dtype == (torch.float32 if is_float32 else torch.bfloat16), name
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_writes_the_same_bytes(family: str, tmp_path: Path) -> None:
    for name in ("first", "second"):
        make_checkpoint(tmp_path / name, family, "tiny", seed=7, with_lm=True)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("first", "second")
    )
    assert first == second


@pytest.mark.parametrize("family", FAMILIES)
def test_another_seed_changes_every_tensor(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "first", family, "tiny", seed=7, with_lm=True)
    make_checkpoint(tmp_path / "second", family, "tiny", seed=8, with_lm=True)
    first, second = read_all(tmp_path / "first"), read_all(tmp_path / "second")
    assert [name for name in first if torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_vision_weights_do_not_depend_on_the_language_model(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "tower", family, "tiny", seed=3)
    make_checkpoint(tmp_path / "whole", family, "tiny", seed=3, with_lm=True)
    tower, whole = read_all(tmp_path / "tower"), read_all(tmp_path / "whole")
    in_memory = dict(vision_tensors(family, "tiny", seed=3))
    assert set(tower) == set(in_memory)
    for name, tensor in tower.items():
        assert torch.equal(tensor, whole[name]), name
        assert torch.equal(tensor, in_memory[name]), name


@pytest.mark.parametrize("with_lm", [False, True])
@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_index_names_every_tensor_and_its_file(
    family: str, size: str, with_lm: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make_checkpoint(out, family, size, seed=0, with_lm=with_lm)
    index = read_json(out / "model.safetensors.index.json")
    held: dict[str, str] = {}
    total_bytes = 0
    for file in sorted(out.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            assert tensors.metadata() == {"format": "pt"}
            held |= dict.fromkeys(tensors.keys(), file.name)
        total_bytes += sum(tensor.nbytes for tensor in load_file(file).values())
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == total_bytes

    files = sorted(set(held.values()))
    assert files == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    is_vision = re.compile(r"model\.visual\.|vision_tower\.|mm_projector\.")
    vision_files = {file for name, file in held.items() if is_vision.match(name)}
    language_files = {file for name, file in held.items() if not is_vision.match(name)}
    assert len(vision_files) >= 2
    # One file holds tensors of both, so that a loader must go by names, not by files.
    assert len(vision_files & language_files) == (1 if with_lm else 0)


def test_a_large_model_is_cut_at_the_shard_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_SHARD_BYTES", 200_000)
    make_checkpoint(tmp_path / "out", "qwen3_vl", "tiny", seed=0, with_lm=True)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) >= 8
    largest_tensor_bytes = 64 * 3 * 2 * 16 * 16 * 2
    assert max(sizes) < 2 * 200_000 + largest_tensor_bytes
    whole = dict(vision_tensors("qwen3_vl", "tiny", seed=0))
    cut = read_all(tmp_path / "out")
    assert all(torch.equal(cut[name], tensor) for name, tensor in whole.items())


def test_a_config_is_the_callers_own() -> None:
    config_for("qwen3_vl", "tiny")["vision_config"]["deepstack_visual_indexes"].append(9)
    assert config_for("qwen3_vl", "tiny")["vision_config"]["deepstack_visual_indexes"] == [1, 2]
    config_for("qwen3_vl", "tiny")["text_config"]["rope_scaling"]["mrope_section"].append(9)
    assert config_for("qwen3_vl", "tiny")["text_config"]["rope_scaling"]["mrope_section"] == [6, 5, 5]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_qwen_processor_settings_are_the_published_ones(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "out", family, "tiny", seed=0)
    common = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    assert read_json(tmp_path / "out" / "preprocessor_config.json") == common | {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    assert read_json(tmp_path / "out" / "video_preprocessor_config.json") == common | {
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
        "video_processor_type": "Qwen3VLVideoProcessor",
    }


def test_kimi_processor_settings_are_nested_as_published(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "out", "kimi_k25", "tiny", seed=0)
    settings = read_json(tmp_path / "out" / "preprocessor_config.json")["media_proc_cfg"]
    expected = {
        "in_patch_limit": 16384,
        "patch_limit_on_one_side": 512,
        "patch_size": 14,
        "merge_kernel_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit_each_frame": 4096,
        "temporal_merge_kernel_size": 4,
        "sample_fps": 2.0,
    }
    assert settings | expected == settings


def test_weights_are_readable_by_others(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "out", "qwen3_5", "tiny", seed=0)
    assert (tmp_path / "out").stat().st_mode & 0o055 == 0o055
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (tmp_path / "out").iterdir())


def test_unknown_family_and_size_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="qwen3_vl, qwen3_5, kimi_k25"):
        make_checkpoint(tmp_path / "out", "qwen2_vl", "tiny", seed=0)
    with pytest.raises(ConfigurationError, match="tiny, small, full"):
        make_checkpoint(tmp_path / "out", "qwen3_vl", "huge", seed=0)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_content_is_refused_and_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    with pytest.raises(ConfigurationError, match="1 entries"):
        make_checkpoint(out, "qwen3_vl", "tiny", seed=0)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("kept")
    with pytest.raises(ConfigurationError, match="not a directory"):
        make_checkpoint(tmp_path / "out", "qwen3_vl", "tiny", seed=0)


def test_an_empty_directory_and_missing_parents_are_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_checkpoint(tmp_path / "empty", "kimi_k25", "tiny", seed=0)
    make_checkpoint(tmp_path / "not" / "yet" / "there", "kimi_k25", "tiny", seed=0)
    assert (tmp_path / "empty" / "config.json").is_file()
    assert (tmp_path / "not" / "yet" / "there" / "config.json").is_file()


def test_a_failure_half_way_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def fail_on_the_second(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "save_file", fail_on_the_second)
    with pytest.raises(OSError, match="No space left"):
        make_checkpoint(tmp_path / "out", "qwen3_vl", "tiny", seed=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_weights_keep_unit_variance(family: str) -> None:
    """Deep towers stay healthy only when no layer multiplies the scale of its input."""
    residual_gain = math.sqrt(2 / config_for(family, "small")["vision_config"].get("depth", 6))
    for name, tensor in vision_tensors(family, "small", seed=0):
        if tensor.dim() == 2 and "pos_emb" not in name:
            gain = tensor.float().std().item() * math.sqrt(tensor.shape[1])
            into_residual = re.search(r"blocks\.\d+\.(attn\.proj|mlp\.linear_fc2|wo|mlp\.fc1)\.", name)
            queries = re.search(r"qkv\.weight$", name)
            expected = residual_gain if into_residual else 1.4 if queries else 1.0
            assert gain == pytest.approx(expected, rel=0.05), name
