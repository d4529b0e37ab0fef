"""Installs a supported torch, and on request the matching torchvision, into the interpreter that runs this
script.

Owns the choice of the torch build: `make setup` installs no CUDA libraries on a machine without a GPU. pip
installs everything else. Standard library only.

Uses the first source that works:

1. an installed torch, if its version is supported;
2. without an NVIDIA GPU on Linux, a CPU build from the user's own pip configuration;
3. without an NVIDIA GPU on Linux, PyTorch's public index of CPU builds;
4. the default index: CUDA builds on Linux, CPU builds elsewhere.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from pathlib import Path

TORCH_RANGE = "torch>=2.11,<2.14"
LOCAL_CPU_BUILD = "torch==2.13.0+cpu"
# With these options an unreachable index fails within a minute.
CPU_INDEX = ["--index-url", "https://download.pytorch.org/whl/cpu", "--retries", "1", "--timeout", "20"]

# torch 2.11 matches torchvision 0.26. Since then both minor numbers have increased by one per release.
MIN_TORCH_MINOR = 11
MAX_TORCH_MINOR = 13
TORCHVISION_MINOR_OFFSET = 15


def installed_torch() -> str | None:
    """The version of the installed torch, including its local part; None if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_minor(version: str) -> int:
    """The minor number of a supported torch version. Raises SystemExit for any other version."""
    major, minor = (int(part) for part in version.split("+")[0].split(".")[:2])
    if major != 2 or not MIN_TORCH_MINOR <= minor <= MAX_TORCH_MINOR:
        raise SystemExit(f"torch {version} is installed, needs {TORCH_RANGE.removeprefix('torch')}")
    return minor


def torchvision_requirement(version: str) -> str:
    """The torchvision release line that was built against this torch."""
    return f"torchvision~=0.{torch_minor(version) + TORCHVISION_MINOR_OFFSET}.0"


def nvidia_gpu_visible() -> bool:
    """Whether this machine has an NVIDIA driver with a device."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def candidates(system: str, gpu_visible: bool) -> list[list[str]]:
    """Argument lists of ``pip install`` to try, best first."""
    default = [TORCH_RANGE]
    if system != "Linux" or gpu_visible:
        return [default]
    return [[LOCAL_CPU_BUILD], [TORCH_RANGE, *CPU_INDEX], default]


def pip_install(arguments: list[str], *, show_errors: bool) -> bool:
    """Runs ``pip install`` with these arguments. Returns whether it succeeded."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments]
    completed = subprocess.run(command, check=False, stderr=None if show_errors else subprocess.DEVNULL)
    return completed.returncode == 0


def ensure_torch() -> str:
    """Installs torch if necessary. Returns the installed version. Raises SystemExit if no source works, or if
    the version is not supported."""
    version = installed_torch()
    if version is None:
        choices = candidates(platform.system(), nvidia_gpu_visible())
        for choice in choices:
            print(f"installing {' '.join(choice)}", flush=True)
            if pip_install(choice, show_errors=choice is choices[-1]):
                break
        else:
            raise SystemExit(f"none of {len(choices)} sources had {TORCH_RANGE}")
        version = importlib.metadata.version("torch")
    torch_minor(version)
    return version


def ensure_torchvision(version: str) -> None:
    """Installs the torchvision that matches this torch, without dependencies, because these could replace
    torch.

    Raises SystemExit when it cannot be installed.
    """
    requirement = torchvision_requirement(version)
    if not pip_install(["--no-deps", requirement], show_errors=True):
        raise SystemExit(f"{requirement}, which matches torch {version}, could not be installed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Install the torch build that fits this machine.")
    parser.add_argument(
        "--with-torchvision", action="store_true", help="also the matching torchvision (parity tests)"
    )
    arguments = parser.parse_args()
    version = ensure_torch()
    print(f"torch {version}")
    if arguments.with_torchvision:
        ensure_torchvision(version)


if __name__ == "__main__":
    main()
