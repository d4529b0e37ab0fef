"""Keeps the kernel choices of a start, and its compiled kernels, on disk for later starts.

Owns the file of the choices: what they were measured for, its checks and its replacement. ``fast_path``
measures and uses the choices. A file that is damaged, or was measured for another device, driver, version or
tower, is ignored: then the start measures and replaces it. Compiled kernels are kept by the libraries that
compile them.

What is kept lies in one folder for each device, driver and versions (``kept_folder``), so that nothing in it
serves another. Such folders may come with an image or a volume that is read-only: ``copy_kept`` takes the
fitting one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import structlog
import torch

from encoder_service.towers.attention.cases import ATTENTION

log = structlog.get_logger(__name__)

FORMAT = 1
# Packages that have kernels, or compile them.
PACKAGES = (
    "vision-encoder",
    "torch",
    "triton",
    "flash-attn-4",
    "fa3-fwd",
    "quack-kernels",
    "nvidia-cutlass-dsl",
)
DRIVER = Path("/proc/driver/nvidia/version")
# Of triton.runtime.cache.FileCacheManager.
TRITON_GROUP = "__grp__"
# Folders of compiled kernels, by the environment variable of their library. Each library checks by itself
# whether a kernel matches the device and version.
COMPILED = {
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attn-4",
    "QUACK_CACHE_DIR": "quack",
    "TRITON_CACHE_DIR": "triton",
}


def keep_compiled(folder: Path) -> None:
    """Makes the kernel libraries keep compiled kernels below ``folder``, unless the environment names another
    folder. Call before they are imported. A folder that cannot be written costs only a log line."""
    for name, below in COMPILED.items():
        path = folder / below
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            log.warning("compiled kernels not kept", path=str(path), reason=str(error))
            return
        os.environ.setdefault(name, str(path))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def kept_folder(choices_dir: Path, device: torch.device) -> Path:
    """The folder below ``choices_dir`` of what is kept for this device, its driver and the installed
    versions."""
    environment = environment_of(device)
    name = re.sub("[^a-z0-9]+", "-", str(environment["device"]).lower()).strip("-")
    return choices_dir / f"{name}-{digest_of(environment)}"


def copy_kept(seed: Path, folder: Path) -> None:
    """Copies what an earlier start kept, and ``folder`` lacks, from the folder of the same name in ``seed``,
    unless the driver's version is unknown. Failures cost only a log line."""
    if driver_version() is None:
        return
    source = seed / folder.name
    num_copied = 0
    try:
        if not source.is_dir():
            found = sorted(path.name for path in seed.iterdir()) if seed.is_dir() else "no folder"
            log.warning("no kept choices for this GPU, driver and versions", path=str(source), found=found)
            return
        for path in sorted(source.rglob("*")):
            target = folder / path.relative_to(source)
            if path.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=folder) as new:
                    copied = Path(shutil.copyfile(path, Path(new, path.name)))
                    if path.name.startswith(TRITON_GROUP):
                        move_group(copied, target.parent)
                    copied.replace(target)
                num_copied += 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("kept choices not copied", path=str(source), reason=f"{type(error).__name__}: {error}")
    else:
        log.info("kept choices copied", path=str(source), files=num_copied)


def move_group(file: Path, folder: Path) -> None:
    """Makes a file of Triton's cache, which lists the files of a kernel with their full paths, list those of
    ``folder``."""
    group = json.loads(file.read_text())
    group["child_paths"] = {
        name: str(folder / Path(path).name) for name, path in group["child_paths"].items()
    }
    file.write_text(json.dumps(group))


def digest_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


# The kernels' names by operation (attention, or a step after a product), then by case.
KernelNames: TypeAlias = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class ChoicesFile:
    """One file of ``folder``, named by what was measured. measured_for: values that JSON keeps."""

    folder: Path
    measured_for: Mapping[str, Any]

    @classmethod
    def of_device(cls, folder: Path, device: torch.device, measured: Mapping[str, Any]) -> ChoicesFile | None:
        """The file for this device with its present driver and packages. folder: its ``kept_folder``.
        measured: what else the choices depend on. None, with a log line, if the driver's version is
        unknown."""
        environment = environment_of(device)
        if environment["driver"] is None:
            log.warning("kernel choices not kept", reason="the driver's version is unknown")
            return None
        return cls(folder, {**environment, **measured})

    @property
    def path(self) -> Path:
        return self.folder / f"choices-{digest_of(self.measured_for)}.json"

    def read(self) -> KernelNames | None:
        """The choices of an earlier start. None, with a log line, for a file that cannot be used."""
        try:
            content = json.loads(self.path.read_text())
            if content["format"] != FORMAT or content["measured_for"] != self.measured_for:
                raise ValueError("it was measured for something else")
            by_operation = {**content["gemms"], ATTENTION: content[ATTENTION]}
            return {operation: dict_of_texts(by_case) for operation, by_case in by_operation.items()}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning(
                "kernel choices ignored", path=str(self.path), reason=f"{type(error).__name__}: {error}"
            )
            return None

    def write(self, names: KernelNames) -> None:
        """Replaces the file in one step. A folder that cannot be written costs only a log line."""
        content = {
            "format": FORMAT,
            "measured_for": self.measured_for,
            ATTENTION: names[ATTENTION],
            "gemms": {step: by_rows for step, by_rows in names.items() if step != ATTENTION},
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                new = Path(folder, self.path.name)
                new.write_text(json.dumps(content, indent=1))
                new.replace(self.path)
        except OSError as error:
            log.warning(
                "kernel choices not kept", path=str(self.path), reason=f"{type(error).__name__}: {error}"
            )


def dict_of_texts(value: Any) -> dict[str, str]:
    """Raises TypeError for anything else."""
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise TypeError(f"needs an object of texts, got {value!r:.80}")
    return value


def environment_of(device: torch.device) -> dict[str, Any]:
    """What times on a GPU depend on besides the tower: device, driver and installed versions."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "num_multiprocessors": properties.multi_processor_count,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "versions": {name: version_of(name) for name in PACKAGES},
    }


def driver_version() -> str | None:
    """The first line of the kernel module's version text; None if a sandbox hides it."""
    try:
        return DRIVER.read_text().partition("\n")[0]
    except OSError:
        return None


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
