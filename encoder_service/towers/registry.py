"""Loads a tower from a checkpoint directory.

Owns the class of each family and the order of loading: sizes, headers, values, device, checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from encoder_service.errors import UnsupportedCheckpoint
from encoder_service.towers.checkpoint import Fingerprint, check_initialised, read_config, vision_tensors
from encoder_service.towers.config import MoonViTConfig, VisionConfig, parse_config
from encoder_service.towers.moonvit import MoonViTTower
from encoder_service.towers.qwen3_vl import Qwen3VLTower
from encoder_service.towers.tower import Tower

TOWER_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class LoadedTower:
    """A tower in evaluation mode on its device. fingerprint: 32 bytes over sizes and stored weights."""

    tower: Tower
    fingerprint: bytes


def build_tower(family: str, config: VisionConfig) -> Tower:
    """A tower of these sizes whose parameters have no meaningful values yet."""
    if isinstance(config, MoonViTConfig):
        return MoonViTTower(config)
    return Qwen3VLTower(config, family)


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
        tower = build_tower(family, config)
    fingerprint = Fingerprint(family, config)
    values: dict[str, torch.Tensor] = {}
    for published, tensor in vision_tensors(path, config):
        fingerprint.add(published, tensor)
        # Copied, because the tensor may be mapped from a file that changes while the service runs.
        values[published.parameter] = published.to_parameter(tensor).to(device, dtype, copy=True)
    tower.load_state_dict(values, assign=True)
    # Moves the tables that are not part of a checkpoint. The parameters are on the device already.
    tower.to(device).requires_grad_(False).eval()
    check_initialised(tower)
    return LoadedTower(tower, fingerprint.digest())
