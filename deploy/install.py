"""Installs this project with what its tests need into the interpreter that runs this script.

Owns the choice of the torch build: `make setup` installs no CUDA libraries on a machine without a GPU. Also
how packages are installed here: by uv, which is several times as fast as pip, from the sources that pip is
configured for. pip only installs uv. Standard library only.

The first source of torch that works is used:

1. an installed torch, if its version is supported;
2. without an NVIDIA GPU on Linux, a CPU build from the user's own `find-links`;
3. without an NVIDIA GPU on Linux, PyTorch's public index of CPU builds;
4. the default index: CUDA builds on Linux, CPU builds elsewhere.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH_RANGE = "torch>=2.11"
LOCAL_CPU_BUILD = "torch==2.13.0+cpu"
CPU_INDEX = ["--default-index", "https://download.pytorch.org/whl/cpu"]

# torch 2.11 matches torchvision 0.26. Since then both minor numbers have increased by one per release.
MIN_TORCH_MINOR = 11
TORCHVISION_MINOR_OFFSET = 15

# Options of pip, and uv's variables for them. pip separates several values by white space.
SOURCES = {"index-url": "UV_DEFAULT_INDEX", "find-links": "UV_FIND_LINKS", "cert": "SSL_CERT_FILE"}


def installed_torch() -> str | None:
    """The version of the installed torch, including its local part; None if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_minor(version: str) -> int:
    """The minor number of a supported torch version. Raises SystemExit for any other version."""
    major, minor = (int(part) for part in version.split("+")[0].split(".")[:2])
    if major != 2 or minor < MIN_TORCH_MINOR:
        raise SystemExit(f"torch {version} is installed, needs {TORCH_RANGE.removeprefix('torch')}")
    return minor


def torchvision_requirement(version: str) -> str:
    """The torchvision release line that was built against this torch."""
    return f"torchvision~=0.{torch_minor(version) + TORCHVISION_MINOR_OFFSET}.0"


def nvidia_gpu_visible() -> bool:
    """Whether this machine has an NVIDIA driver with a device."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def candidates(system: str, gpu_visible: bool) -> list[list[str]]:
    """Argument lists of ``uv pip install`` to try, best first."""
    default = [TORCH_RANGE]
    if system != "Linux" or gpu_visible:
        return [default]
    return [[LOCAL_CPU_BUILD], [TORCH_RANGE, *CPU_INDEX], default]


def sources(config: str) -> dict[str, str]:
    """uv's variables for the sources that ``pip config list`` names. The environment is the last of its
    levels, and wins."""
    values = {}
    for line in sorted(config.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2]
        if option in SOURCES:
            values[SOURCES[option]] = ",".join(str(ast.literal_eval(value)).split())
    return values


@functools.cache
def uv_environment() -> dict[str, str]:
    """Installs uv if it is missing. What the user has set for uv itself wins."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if importlib.util.find_spec("uv") is None:
        subprocess.run([*pip, "install", "-qq", "uv"], check=True)
    config = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True).stdout
    return {**sources(config), **os.environ}


def try_install(arguments: Sequence[str], *, show_errors: bool) -> bool:
    """Runs ``uv pip install`` with these arguments. Returns whether it succeeded."""
    command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", sys.executable, *arguments]
    completed = subprocess.run(
        command, check=False, env=uv_environment(), stderr=None if show_errors else subprocess.DEVNULL
    )
    return completed.returncode == 0


def install(*arguments: str) -> None:
    """Runs ``uv pip install``. Raises SystemExit if it fails."""
    if not try_install(arguments, show_errors=True):
        raise SystemExit(f"could not install {' '.join(arguments[:6])}")


def ensure_torch() -> str:
    """Installs torch if necessary. Returns the installed version. Raises SystemExit if no source works, or if
    the version is not supported."""
    version = installed_torch()
    if version is None:
        choices = candidates(platform.system(), nvidia_gpu_visible())
        for choice in choices:
            print(f"installing {' '.join(choice)}", flush=True)
            if try_install(choice, show_errors=choice is choices[-1]):
                break
        else:
            raise SystemExit(f"none of {len(choices)} sources had {TORCH_RANGE}")
        version = importlib.metadata.version("torch")
    torch_minor(version)
    return version


def main() -> None:
    version = ensure_torch()
    print(f"torch {version}")
    # torchvision's requirements could replace torch.
    install("--no-deps", torchvision_requirement(version))
    install("-e", f"{ROOT}[dev]")


if __name__ == "__main__":
    main()
