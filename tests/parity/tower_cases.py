"""What the tower parity tests share: miniature checkpoints of real shapes, batches, error figures.

Owns the writing of small published checkpoints from any config. Leaves the reference to reference.py.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from encoder_service.checkpoints.synthetic import config_for, draw, vision_layout
from encoder_service.towers import Tower
from encoder_service.types import Grid

# Limit of float32 parity: norm of the difference over the norm of the reference. Found: up to 2e-6 on a CPU.
FLOAT32_RELATIVE = 3e-6
# bfloat16 keeps 8 bits: one rounding is 2^-9 = 0.2 %, a tower of a few blocks adds up a handful.
BFLOAT16_RELATIVE = 3e-2


class Errors(NamedTuple):
    max_abs: float
    relative: float


def errors(found: torch.Tensor, expected: torch.Tensor) -> Errors:
    """Largest absolute difference, and norm of the difference over norm of ``expected``, in float64."""
    assert found.shape == expected.shape, f"{list(found.shape)} against {list(expected.shape)}"
    found, expected = found.double(), expected.double()
    difference = found - expected
    return Errors(float(difference.abs().max()), float(difference.norm() / expected.norm()))


def report(what: str, figures: Errors) -> None:
    print(f"parity {what}: max abs {figures.max_abs:.2e}, relative {figures.relative:.2e}")


def assert_close(what: str, found: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    """Also refuses what is not finite."""
    figures = errors(found, expected)
    report(what, figures)
    assert figures.relative < relative, what


def fresh_seed() -> int:
    """A new seed each run; printed, so that a failure shows it and it can be put in its place."""
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    return seed


def config_with(family: str, size: str, vision: dict[str, Any], **top: Any) -> dict[str, Any]:
    """A synthetic config with other vision settings; the language model's width follows the rows'."""
    config = copy.deepcopy(config_for(family, size)) | top
    section = config.get("thinker_config", config)
    section["vision_config"] |= vision
    out_width = vision.get("out_hidden_size", vision.get("text_hidden_size"))
    if out_width is not None:
        section.get("text_config", section)["hidden_size"] = out_width
    return config


def vision_weights(
    config: dict[str, Any], seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random vision tensors under their published names."""
    return {spec.name: draw(dataclasses.replace(spec, dtype=dtype), seed) for spec in vision_layout(config)}


def write_published(
    path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], num_shards: int = 2
) -> Path:
    """A published checkpoint of these tensors: one file, or shards behind an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    names = list(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, path / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def random_pixels(tower: Tower, grids: Sequence[Grid], seed: int) -> torch.Tensor:
    """float32 [P, patch_dim] on the host, about as varied as normalised pixels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(grid.num_patches for grid in grids), tower.patch_dim, generator=generator) * 0.5


def run_tower(tower: Tower, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    """Rows [R, D * (1 + L)] on the host, in the tower's dtype."""
    inputs = tower.prepare(grids).with_pixels(pixels).to(tower.device)
    with torch.inference_mode():
        return tower(inputs).cpu()
