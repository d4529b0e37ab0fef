"""Published checkpoints: files, vision tensors, fingerprint.

Owns reading a hub directory (config.json, and model.safetensors or the shards that
model.safetensors.index.json lists), the refusal of anything that does not fit, and the fingerprint. Only
vision tensors are read; shards without any are not opened. Each family's file has the sizes and the names,
``registry.py`` builds the tower.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import nn

from encoder_service.errors import (
    CheckpointError,
    MismatchedTensors,
    MissingTensors,
    UnexpectedTensors,
    UninitialisedTensors,
)
from encoder_service.json_reader import JsonReader
from encoder_service.ops.progress import Progress
from encoder_service.towers.config import VisionConfig
from encoder_service.towers.published import PublishedTensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FINGERPRINT_TAG = b"vision_encoder.model.v1"
# The dtypes in which tower weights are published, as safetensors names them.
STORED_DTYPES = ("F32", "BF16", "F16")
# Error texts name this many tensors and count the rest.
MAX_NAMED = 8

# A vision tensor, its name as stored, and its file.
Selected: TypeAlias = tuple[PublishedTensor, str, Path]


def read_config(path: Path) -> Mapping[str, object]:
    """The checkpoint's config.json. Raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} is not a directory", path=path)
    return JsonReader.of_file(path / CONFIG_FILE).values


def tensor_files(path: Path) -> dict[str, Path]:
    """The file that holds each tensor of the checkpoint, by the tensor's name. Raises CheckpointError."""
    if (path / WEIGHTS_FILE).is_file():
        file = path / WEIGHTS_FILE
        with ExitStack() as stack:
            return dict.fromkeys(open_file(file, stack).keys(), file)
    if not (path / INDEX_FILE).is_file():
        raise CheckpointError(f"checkpoint {path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}", path=path)
    files = {}
    for name, file_name in JsonReader.of_file(path / INDEX_FILE).section("weight_map").values.items():
        # Only file names are accepted, so that an index cannot lead outside of the checkpoint's folder.
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f"{path / INDEX_FILE} names {file_name!r} for {name}, needs a file name")
        files[name] = path / file_name
    return files


def open_file(file: Path, stack: ExitStack) -> Any:
    """An open safetensors file that closes with ``stack``. Raises CheckpointError if missing or corrupt."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing", path=file)
    try:
        return stack.enter_context(safe_open(file, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}", path=file) from error


def vision_tensors(path: Path, config: VisionConfig) -> Iterator[tuple[PublishedTensor, torch.Tensor]]:
    """Each vision tensor of a checkpoint with its values as stored, on the host, ordered by name.

    Logs its progress. Raises CheckpointError (files), MissingTensors, UnexpectedTensors, MismatchedTensors.
    All of them are raised from the headers, before the first tensor is read.
    """
    selected = select_tensors(tensor_files(path), config, path)
    with ExitStack() as stack:
        handles = {file: open_file(file, stack) for file in sorted({file for *_, file in selected})}
        check_held(selected, {file: set(handle.keys()) for file, handle in handles.items()}, path)
        check_shapes([(tensor, name, handles[file].get_slice(name)) for tensor, name, file in selected], path)
        progress = Progress("loading vision tensors", len(selected))
        for tensor, name, file in selected:
            yield tensor, handles[file].get_tensor(name)
            progress.step()


def select_tensors(files: Mapping[str, Path], config: VisionConfig, path: object) -> list[Selected]:
    """The vision tensors of a checkpoint, ordered by name. files: by the name of each tensor, as in an index.
    path: names the checkpoint in errors. Raises MissingTensors, UnexpectedTensors."""
    published = sorted(config.published_tensors(), key=lambda tensor: tensor.name)
    located = locate(files, config.prefixes)
    check_names({tensor.name for tensor in published}, located, path)
    return [(tensor, *located[tensor.name]) for tensor in published]


def check_held(selected: Sequence[Selected], held: Mapping[Path, Set[str]], path: object) -> None:
    """held: the tensors that each file has. Raises MissingTensors for an index that names others."""
    absent = [f"{name} (in {file.name})" for _, name, file in selected if name not in held[file]]
    if absent:
        raise MissingTensors(
            f"checkpoint {path}: the index names {len(absent)} vision tensors that their files lack:"
            f" {listing(absent)}",
            count=len(absent),
        )


def check_shapes(stored: Sequence[tuple[PublishedTensor, str, Any]], path: object) -> None:
    """stored: each tensor with its name in the file and its header in the file. Raises MismatchedTensors for
    a shape or dtype that does not fit."""
    wrong = []
    for published, name, header in stored:
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        if shape != published.shape:
            wrong.append(f"{name} has shape {list(shape)}, needs {list(published.shape)}")
        elif dtype not in STORED_DTYPES:
            wrong.append(f"{name} has dtype {dtype}, needs one of {', '.join(STORED_DTYPES)}")
    if wrong:
        raise MismatchedTensors(
            f"checkpoint {path}: {len(wrong)} vision tensors do not fit config.json: {listing(wrong)}",
            count=len(wrong),
        )


def locate(files: Mapping[str, Path], prefixes: Sequence[tuple[str, ...]]) -> dict[str, tuple[str, Path]]:
    """The vision tensors among ``files``, by name without a varying prefix: (name as stored, file).

    Raises UnexpectedTensors if tensors exist under two alternatives of the prefix.
    """
    located: dict[str, tuple[str, Path]] = {}
    spellings = []
    for alternative in prefixes:
        names = [name for name in files if name.startswith(alternative)]
        if names:
            spellings.append(names)
        strip = len(alternative[0]) if len(alternative) == 1 else 0
        located |= {name[strip:]: (name, files[name]) for name in names}
    if len(spellings) > 1:
        raise UnexpectedTensors(
            f"vision tensors stand under {len(spellings)} prefixes, needs 1:"
            f" {listing([names[0] for names in spellings])}",
            found=len(spellings),
            needed=1,
        )
    return located


def check_names(needed: Set[str], located: Mapping[str, tuple[str, Path]], path: object) -> None:
    """Raises MissingTensors or UnexpectedTensors, with the names as stored and their count. located: as of
    ``locate``."""
    prefix = next((stored.removesuffix(name) for name, (stored, _) in located.items()), "")
    if missing := sorted(prefix + name for name in needed - located.keys()):
        raise MissingTensors(
            f"checkpoint {path} lacks {len(missing)} of {len(needed)} vision tensors: {listing(missing)}",
            count=len(missing),
            needed=len(needed),
        )
    if extra := sorted(located[name][0] for name in located.keys() - needed):
        raise UnexpectedTensors(
            f"checkpoint {path} has {len(extra)} vision tensors beyond the {len(needed)} that config.json"
            f" calls for: {listing(extra)}",
            count=len(extra),
            needed=len(needed),
        )


def listing(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"


class Fingerprint:
    """BLAKE3 over a tower's sizes and its tensors as stored, ordered by name. It depends on every value, but
    not on sharding or the prefix."""

    def __init__(self, family: str, config: VisionConfig) -> None:
        self._hasher = blake3(max_threads=blake3.AUTO)
        sizes = json.dumps(dataclasses.asdict(config), sort_keys=True)
        self._add_fields(FINGERPRINT_TAG, family.encode(), sizes.encode())

    def add(self, published: PublishedTensor, tensor: torch.Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = struct.pack(f"<{tensor.dim()}Q", *tensor.shape)
        self._add_fields(published.name.encode(), dtype.encode(), shape)
        self._hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def digest(self) -> bytes:
        """32 bytes."""
        digest: bytes = self._hasher.digest()
        return digest

    def _add_fields(self, *fields: bytes) -> None:
        for field in fields:
            self._hasher.update(struct.pack("<I", len(field)) + field)


def check_initialised(tower: nn.Module) -> None:
    """Raises UninitialisedTensors, which names parameters and buffers without values (on the meta device) or
    with values that are not finite."""
    tensors = dict(tower.named_parameters()) | dict(tower.named_buffers())
    bad = [f"{name} has no values" for name, tensor in tensors.items() if tensor.is_meta]
    bad += [
        f"{name} has {int((~tensor.isfinite()).sum())} of {tensor.numel()} values that are not finite"
        for name, tensor in tensors.items()
        if not tensor.is_meta and not bool(tensor.isfinite().all())
    ]
    if bad:
        raise UninitialisedTensors(
            f"{len(bad)} of {len(tensors)} tensors of the tower cannot serve: {listing(bad)}",
            count=len(bad),
            needed=len(tensors),
        )
