"""Loads a tower from a checkpoint directory.

Owns the list of families, the choice by config.json's model_type, and the order of loading: sizes, headers,
values, device, checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from encoder_service.errors import UnsupportedCheckpoint
from encoder_service.json_reader import JsonReader
from encoder_service.towers import glm, ling, moonvit, qwen2_5_vl, qwen3_vl
from encoder_service.towers.checkpoint import Fingerprint, check_initialised, read_config, vision_tensors
from encoder_service.towers.config import Family, VisionConfig, check_heads
from encoder_service.towers.published import joined
from encoder_service.towers.tower import Tower

_ALL_FAMILIES = (*qwen3_vl.FAMILIES, *moonvit.FAMILIES, *glm.FAMILIES, ling.FAMILY, qwen2_5_vl.FAMILY)
# By config.json's model_type.
FAMILIES: Mapping[str, Family] = {
    model_type: family for family in _ALL_FAMILIES for model_type in family.model_types
}
TOWER_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class LoadedTower:
    """A tower in evaluation mode on its device. fingerprint: 32 bytes over sizes and stored weights."""

    tower: Tower
    fingerprint: bytes


def parse_config(values: Mapping[str, object]) -> tuple[Family, VisionConfig]:
    """Family and tower sizes from the content of a config.json.

    Raises UnsupportedCheckpoint for an unknown model_type, a size that is missing or not a positive integer,
    sizes that contradict each other, and a setting that the family's tower does not implement.
    """
    model_type = values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        served = ", ".join(f"{', '.join(kind.model_types)} ({kind.models})" for kind in _ALL_FAMILIES)
        raise UnsupportedCheckpoint(
            f"config.json has model_type {model_type!r}, needs one of {served}",
            found=model_type,
            needed=", ".join(FAMILIES),
        )
    config = JsonReader(values, "config.json")
    config = config.section(family.section) if family.section else config
    sizes = family.parse(config)
    text = config.section("text_config", config.values)
    if text.has("hidden_size") and text.values["hidden_size"] != sizes.out_width:
        # Rows with another width than the language model's could never be spliced.
        hidden_size = text.values["hidden_size"]
        where = "text_config.hidden_size" if config.has("text_config") else "hidden_size"
        raise UnsupportedCheckpoint(
            f"the tower's rows are {sizes.out_width} wide, {where} is {hidden_size}: they need to be equal",
            found=sizes.out_width,
            needed=hidden_size,
        )
    check_heads(sizes)
    return family, sizes


def load_tower(path: Path, *, device: torch.device, dtype: torch.dtype) -> LoadedTower:
    """The tower of a published checkpoint, ready to use.

    Tensors are read one at a time, converted and put on the device in ``dtype``. Raises CheckpointError or
    one of its subclasses UnsupportedCheckpoint, MissingTensors, UnexpectedTensors, MismatchedTensors,
    UninitialisedTensors.
    """
    if dtype not in TOWER_DTYPES:
        raise UnsupportedCheckpoint(
            f"dtype {dtype} is not one that towers run in, needs one of {', '.join(map(str, TOWER_DTYPES))}",
            found=dtype,
        )
    family, config = parse_config(read_config(path))
    with torch.device("meta"):
        tower = family.build(config)
    fingerprint = Fingerprint(family.name, config)
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for published, tensor in vision_tensors(path, config):
        fingerprint.add(published, tensor)
        # Copied, because the tensor may be mapped from a file that changes while the service runs.
        part = published.to_parameter(tensor).to(device, dtype, copy=True)
        parts.setdefault(published.parameter, {})[published.part] = part
    # Popped, so that no more than one parameter is held twice.
    values = {name: joined(parts.pop(name)) for name in list(parts)}
    tower.load_state_dict(values, assign=True)
    # Moves the tables that are not part of a checkpoint. The parameters are on the device already.
    tower.to(device).requires_grad_(False).eval()
    check_initialised(tower)
    return LoadedTower(tower, fingerprint.digest())
