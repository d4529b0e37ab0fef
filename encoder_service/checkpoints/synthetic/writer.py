"""Writes a synthetic checkpoint completely or not at all: shards, index, small files.

Owns how tensors are spread over safetensors files. The vision tensors always span at least two files. With a
language model, they share one of these with it, so that a loader has to find them through the index.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from encoder_service.checkpoints.synthetic.files import (
    SYNTHETIC,
    WITH_LANGUAGE_MODEL,
    config_for,
    small_files,
)
from encoder_service.checkpoints.synthetic.tensors import TensorSpec, draw, language_layout, vision_layout
from encoder_service.errors import ConfigurationError

MAX_SHARD_BYTES = 512 * 2**20


def make_checkpoint(out: Path, family: str, size: str, seed: int, with_lm: bool = False) -> None:
    """Writes a random-weight checkpoint directory in the published layout.

    family: one of FAMILIES. size: one of SIZES. The same seed gives the same weights, and the vision weights
    do not depend on ``with_lm``. Without a language model, the directory is enough to serve a tower; with
    one, the reference package can load all of it. The directory appears complete or not at all.

    Raises ConfigurationError for an unknown family or size, if ``out`` exists and is not an empty directory,
    and for a language model that is not made here.
    """
    config, tensors = config_for(family, size), SYNTHETIC[family].language
    if with_lm and tensors is None:
        known = ", ".join(WITH_LANGUAGE_MODEL)
        raise ConfigurationError(
            f"the language model of {family} is not made here, those of {known} are: leave --with-lm out"
        )
    _check_vacant(out)
    vision = list(vision_layout(config))
    language = list(language_layout(config, tensors)) if with_lm and tensors else []
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        for name, text in small_files(family, size).items():
            (partial / name).write_text(text, encoding="utf-8")
        _write_shards(partial, _shards(vision, language), seed)
        # mkdtemp and safetensors create files for their owner only, but others must read the checkpoint.
        for path in partial.iterdir():
            path.chmod(0o644)
        partial.chmod(0o755)
        try:
            partial.replace(out)
        except OSError as error:
            raise ConfigurationError(f"cannot move the checkpoint to {out}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_vacant(out: Path) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise ConfigurationError(f"{out} exists and is not a directory")
    num_entries = sum(1 for _ in out.iterdir())
    if num_entries:
        raise ConfigurationError(f"{out} exists with {num_entries} entries, needs to be absent or empty")


def _shards(vision: list[TensorSpec], language: list[TensorSpec]) -> list[list[TensorSpec]]:
    """The shards, the language model's first, as published. Its last also holds the tower's first tensors."""
    vision_shards = _split(vision, at_least=2)
    if not language:
        return vision_shards
    language_shards = _split(language, at_least=1)
    return [*language_shards[:-1], language_shards[-1] + vision_shards[0], *vision_shards[1:]]


def _split(specs: list[TensorSpec], at_least: int) -> list[list[TensorSpec]]:
    """Consecutive runs of about equal bytes, as few as MAX_SHARD_BYTES allows, at least ``at_least``."""
    total_bytes = sum(spec.num_bytes for spec in specs)
    num_shards = max(at_least, -(-total_bytes // MAX_SHARD_BYTES))
    shards: list[list[TensorSpec]] = [[] for _ in range(num_shards)]
    written_bytes = 0
    for spec in specs:
        shards[written_bytes * num_shards // total_bytes].append(spec)
        written_bytes += spec.num_bytes
    return [shard for shard in shards if shard]


def _write_shards(folder: Path, shards: list[list[TensorSpec]], seed: int) -> None:
    """Writes ``model-0000X-of-0000Y.safetensors`` and their index. Only one shard is in memory at a time."""
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {spec.name: draw(spec, seed) for spec in shard}, folder / file_name, metadata={"format": "pt"}
        )
        weight_map |= {spec.name: file_name for spec in shard}
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for shard in shards for spec in shard)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
