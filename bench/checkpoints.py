"""Random checkpoints for the benches, drawn on the device and stored in memory if there is room.

Names, shapes and distributions are those of ``make-checkpoint``. The values differ, because
``make-checkpoint`` draws each tensor on the host with a generator of its own, which takes ten times as long.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from encoder_service.checkpoints.synthetic import TensorSpec, config_for, small_files, vision_layout
from encoder_service.checkpoints.synthetic.qwen import QWEN_LANGUAGE
from encoder_service.checkpoints.synthetic.tensors import language_layout

MEMORY_FOLDER = Path("/dev/shm")
MEMORY_NEEDED_BYTES = 8 << 30


@contextmanager
def random_checkpoint(family: str, size: str, seed: int, device: torch.device) -> Iterator[Path]:
    """A checkpoint folder in the published layout, removed at the end of the block. The same seed gives the
    same weights on the same kind of device."""
    has_room = MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free >= MEMORY_NEEDED_BYTES
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER if has_room else None) as folder:
        path = Path(folder) / family
        path.mkdir()
        for name, text in small_files(family, size).items():
            (path / name).write_text(text, encoding="utf-8")
        generator = torch.Generator(device).manual_seed(seed)
        tensors = {spec.name: drawn(spec, generator) for spec in vision_layout(config_for(family, size))}
        file = "model-00001-of-00001.safetensors"
        save_file(tensors, path / file, metadata={"format": "pt"})
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": dict.fromkeys(sorted(tensors), file),
        }
        (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        yield path


def write_language_model(folder: Path, device: torch.device) -> None:
    """Adds Qwen3-VL's language model of the sizes in ``config.json`` to a checkpoint without one."""
    config = json.loads((folder / "config.json").read_text())
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    generator = torch.Generator(device).manual_seed(0)
    for spec in language_layout(config, QWEN_LANGUAGE):
        file = f"{spec.name}.safetensors"
        save_file({spec.name: drawn(spec, generator)}, folder / file, metadata={"format": "pt"})
        index["weight_map"][spec.name] = file
    if device.type == "cuda":
        torch.cuda.empty_cache()  # servers get the memory
    path.write_text(json.dumps(index), encoding="utf-8")


def drawn(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """A random tensor with the distribution of ``spec``, on the host."""
    values = torch.randn(spec.shape, generator=generator, device=generator.device)
    values = values.mul_(spec.std).add_(spec.mean)
    if spec.centred:
        values -= values.mean(dim=1, keepdim=True)
    if spec.num_rows is not None:
        values[spec.num_rows :] = 0
    return values.to(spec.dtype).cpu()
