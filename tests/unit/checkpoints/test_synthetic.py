"""Synthetic checkpoints: determinism, shards, refusals. Parity tests check names and shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from encoder_service.checkpoints.synthetic import FAMILIES, WITH_LANGUAGE_MODEL, make_checkpoint, writer
from encoder_service.errors import ConfigurationError


def read_all(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_writes_the_same_bytes_and_another_one_other_values(
    family: str, tmp_path: Path
) -> None:
    for name, seed in (("first", 7), ("second", 7), ("third", 8)):
        make_checkpoint(tmp_path / name, family, "tiny", seed=seed, with_lm=family in WITH_LANGUAGE_MODEL)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("first", "second")
    )
    assert first == second
    tensors, others = read_all(tmp_path / "first"), read_all(tmp_path / "third")
    assert [name for name in tensors if torch.equal(tensors[name], others[name])] == []


def test_unknown_family_and_size_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="qwen3_vl, qwen3_5, kimi_k25"):
        make_checkpoint(tmp_path / "out", "qwen2_vl", "tiny", seed=0)
    with pytest.raises(ConfigurationError, match="tiny, small, full"):
        make_checkpoint(tmp_path / "out", "qwen3_vl", "huge", seed=0)
    assert list(tmp_path.iterdir()) == []


def test_a_language_model_that_is_not_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"of qwen4_exp is not made here.*leave --with-lm out"):
        make_checkpoint(tmp_path / "out", "qwen4_exp", "tiny", seed=0, with_lm=True)
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_the_way_is_refused_and_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    with pytest.raises(ConfigurationError, match="1 entries"):
        make_checkpoint(out, "qwen3_vl", "tiny", seed=0)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ConfigurationError, match="not a directory"):
        make_checkpoint(out / "mine.txt", "qwen3_vl", "tiny", seed=0)


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
