"""Loading of published checkpoints: tensors read, refusals by name, the fingerprint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from bench.harness.engine_checkpoints import TOWER_PREFIXES
from encoder_service.checkpoints.synthetic import (
    FAMILIES,
    WITH_LANGUAGE_MODEL,
    config_for,
    make_checkpoint,
    vision_layout,
)
from encoder_service.errors import (
    CheckpointError,
    MismatchedTensors,
    MissingTensors,
    UnexpectedTensors,
    UninitialisedTensors,
    UnsupportedCheckpoint,
)
from encoder_service.towers import LoadedTower, checkpoint, load_tower
from encoder_service.towers.checkpoint import check_initialised
from encoder_service.towers.registry import parse_config
from tests.parity.tower_cases import vision_weights, write_published

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
BLOCK_1 = re.compile(r"blocks\.1\..*qkv\.weight")
QKV = {
    family: next(spec.name for spec in vision_layout(config_for(family, "tiny")) if BLOCK_1.search(spec.name))
    for family in FAMILIES
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedTower:
    return load_tower(path, device=CPU, dtype=dtype)


def write(
    path: Path, family: str, change: Callable[[Tensors], object] = lambda tensors: None, num_shards: int = 2
) -> Path:
    """A tiny published checkpoint whose tensors ``change`` has changed."""
    config = config_for(family, "tiny")
    tensors = vision_weights(config, seed=7, dtype=torch.bfloat16)
    change(tensors)
    return write_published(path, config, tensors, num_shards)


@every_family
def test_values_survive_a_change_of_the_file(tmp_path: Path, family: str) -> None:
    """A file that is overwritten in place under a running service must not change its weights."""
    config = config_for(family, "tiny")
    # Stored in the dtype that it serves in: no conversion makes a copy on the way.
    path = write_published(tmp_path, config, vision_weights(config, 7, torch.float32), num_shards=1)
    tower = load(path, torch.float32).tower
    before = [parameter.clone() for parameter in tower.parameters()]
    file = path / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\xff" * (file.stat().st_size // 2))
    assert all(torch.equal(old, new) for old, new in zip(before, tower.parameters(), strict=True))


@every_family
def test_only_vision_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    make_checkpoint(tmp_path / "full", family, "tiny", 3, with_lm=family in WITH_LANGUAGE_MODEL)
    make_checkpoint(tmp_path / "tower", family, "tiny", 3)
    read: list[str] = []
    original = safetensors.safe_open

    class Recorder:
        def __init__(self, file: Path, **options: Any) -> None:
            self._handle = original(file, **options)

        def __enter__(self) -> Recorder:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(self._handle, name)

        def get_tensor(self, name: str) -> Any:
            read.append(name)
            return self._handle.get_tensor(name)

    monkeypatch.setattr(checkpoint, "safe_open", Recorder)
    fingerprint = load(tmp_path / "full").fingerprint
    assert read
    assert all(name.startswith(TOWER_PREFIXES) for name in read)
    assert fingerprint == load(tmp_path / "tower").fingerprint


WRONG_TENSORS: dict[str, tuple[Callable[[Tensors, str], object], type[CheckpointError], str]] = {
    "missing": (
        lambda tensors, name: tensors.pop(name),
        MissingTensors,
        r"lacks 1 of \d+ vision tensors: .*qkv.weight",
    ),
    "extra": (
        lambda tensors, name: tensors.update({name.replace(".1.", ".9."): torch.zeros(2)}),
        UnexpectedTensors,
        r"has 1 vision tensors beyond .*\.9\.",
    ),
    "misshaped": (
        lambda tensors, name: tensors.update({name: tensors[name][:-1].clone()}),
        MismatchedTensors,
        r"qkv\.weight has shape \[(191|287), 64\], needs \[(192|288), 64\]",
    ),
    "quantised": (
        lambda tensors, name: tensors.update({name: tensors[name].to(torch.int8)}),
        MismatchedTensors,
        r"has dtype I8, needs one of F32, BF16, F16",
    ),
}


@every_family
@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_wrong_tensors_are_named(tmp_path: Path, family: str, wrong: str) -> None:
    change, error, text = WRONG_TENSORS[wrong]
    with pytest.raises(error, match=text) as refusal:
        load(write(tmp_path, family, lambda tensors: change(tensors, QKV[family])))
    # As the files have it.
    named = QKV[family].replace(".1.", ".9.") if wrong == "extra" else QKV[family]
    assert f" {named}" in refusal.value.message


def test_two_prefixes_at_once_are_refused(tmp_path: Path) -> None:
    def both(tensors: Tensors) -> None:
        tensors["visual.pos_embed.weight"] = tensors["model.visual.pos_embed.weight"].clone()

    with pytest.raises(UnexpectedTensors, match=r"under 2 prefixes, needs 1: model\.visual\..*, visual\."):
        load(write(tmp_path, "qwen3_vl", both))


@every_family
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_p38_values_that_are_not_finite_never_serve(tmp_path: Path, family: str, value: float) -> None:
    def poison(tensors: Tensors) -> None:
        tensors[QKV[family]][3, 5] = value

    with pytest.raises(UninitialisedTensors, match=r"blocks\.1\.qkv\.weight has 1 of (12288|18432) values"):
        load(write(tmp_path, family, poison))


@every_family
def test_p38_a_tower_without_values_never_serves(family: str) -> None:
    parsed_family, config = parse_config(config_for(family, "tiny"))
    with torch.device("meta"):
        tower = parsed_family.build(config)
    with pytest.raises(UninitialisedTensors, match=r"tensors of the tower cannot serve: .* has no values"):
        check_initialised(tower)


def test_p38_values_beyond_the_serving_dtype_never_serve(tmp_path: Path) -> None:
    def large(tensors: Tensors) -> None:
        tensors[QKV["qwen3_vl"]] = tensors[QKV["qwen3_vl"]].float().fill_(3.4e38)

    path = write(tmp_path, "qwen3_vl", large)
    load(path, torch.float32)
    with pytest.raises(UninitialisedTensors, match="are not finite"):
        load(path, torch.bfloat16)


def test_dtypes_that_towers_do_not_run_in_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedCheckpoint, match=r"float16 .* needs one of torch\.float32, torch\.bfloat16"
    ):
        load(write(tmp_path, "qwen3_vl"), torch.float16)


def break_index(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


SHARD = "model-00001-of-00002.safetensors"
DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no_config": (lambda path: (path / "config.json").unlink(), r"config\.json cannot be read: No such file"),
    "config_no_json": (lambda path: (path / "config.json").write_text("{"), r"config\.json is not JSON"),
    "no_weights": (
        lambda path: (path / "model.safetensors.index.json").unlink(),
        r"neither model\.safetensors nor model\.safetensors\.index\.json",
    ),
    "no_shard": (lambda path: (path / SHARD).unlink(), r"00001-of-00002\.safetensors is missing"),
    "truncated": (
        lambda path: (path / SHARD).write_bytes((path / SHARD).read_bytes()[:-100]),
        r"00001-of-00002\.safetensors is not a whole safetensors file",
    ),
    "empty_shard": (lambda path: (path / SHARD).write_bytes(b""), r"is not a whole safetensors file"),
    "index_no_map": (lambda path: break_index(path, lambda index: index.clear()), r"lacks weight_map"),
    "index_elsewhere": (
        lambda path: break_index(path, lambda index: index["weight_map"].update({"a": "../secret"})),
        r"'\.\./secret' for a, needs a file name",
    ),
    "index_promises": (
        lambda path: save_file(dict(list(load_file(path / SHARD).items())[1:]), path / SHARD),
        r"the index names 1 vision tensors that their files lack: .* \(in model-00001",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_broken_files_are_refused_by_name(tmp_path: Path, defect: str) -> None:
    path = write(tmp_path, "qwen3_vl")
    spoil, text = DEFECTS[defect]
    spoil(path)
    with pytest.raises(CheckpointError, match=text):
        load(path)


@every_family
def test_the_fingerprint_does_not_depend_on_sharding_or_prefix(tmp_path: Path, family: str) -> None:
    _, config = parse_config(config_for(family, "tiny"))

    def rename(tensors: Tensors) -> None:
        """To the other prefix, if the family has two."""
        for name in list(tensors) if len(config.prefixes) > 1 else ():
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    fingerprints = {
        load(write(tmp_path / f"{number}", family, num_shards=number)).fingerprint for number in (1, 2, 5)
    }
    fingerprints.add(load(write(tmp_path / "renamed", family, rename)).fingerprint)
    assert len(fingerprints) == 1
    assert load(tmp_path / "1", torch.bfloat16).fingerprint in fingerprints


@every_family
def test_the_fingerprint_depends_on_every_tensor_and_on_its_dtype(tmp_path: Path, family: str) -> None:
    def nudge(name: str) -> Callable[[Tensors], None]:
        def change(tensors: Tensors) -> None:
            tensors[name].view(-1)[-1] += 1

        return change

    def widen(tensors: Tensors) -> None:
        tensors[QKV[family]] = tensors[QKV[family]].float()

    names = list(vision_weights(config_for(family, "tiny"), 7))[::9]
    changes = [lambda tensors: None, widen, *(nudge(name) for name in names)]
    fingerprints = {
        load(write(tmp_path / str(number), family, change)).fingerprint
        for number, change in enumerate(changes)
    }
    assert len(fingerprints) == len(changes)


def test_the_fingerprint_depends_on_settings_that_no_shape_shows(tmp_path: Path) -> None:
    tensors = vision_weights(config_for("qwen3_vl", "tiny"), 7)
    fingerprints = set()
    for heads in (2, 4):
        config = config_for("qwen3_vl", "tiny")
        config["vision_config"]["num_heads"] = heads
        fingerprints.add(load(write_published(tmp_path / str(heads), config, tensors)).fingerprint)
    assert len(fingerprints) == 2
