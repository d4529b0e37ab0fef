"""Installs SGLang for a CPU and the requirements of its tests into the interpreter that runs this script.

Owns the recipe of `.venv-sglang`, the environment of `make test-sglang`. install_engines.py chooses the torch
build. With `--newest`, SGLang's newest release on the same torch. Standard library and pip only.

Workarounds:

- SGLang 0.5.23 requires a newer torch, CUDA libraries, and services that are not used here. It is therefore
  installed without requirements; then its own list of requirements is installed without LEFT_OUT.
- Its kernel package needs a GPU, or a CPU with AMX. A `.pth` file loads the replacement in
  tests/sglang/kernels in every process, before SGLang is imported.
"""

from __future__ import annotations

import importlib.metadata
import sys
import sysconfig
from pathlib import Path

from install import ROOT, install, torchvision_requirement
from install_engines import install_torch_release, requirements

SGLANG = "0.5.23"
LEFT_OUT = (
    *("torch", "torchaudio", "torchcodec", "torchvision", "torch_memory_saver"),
    *("cuda-python", "flash-attn-4", "flashinfer_python", "humming-kernels", "kernels", "quack-kernels"),
    *("nvidia-cutlass-dsl", "nvidia-mathdx", "nvidia-ml-py", "nvshmem4py-cu13", "tilelang"),
    *("sgl-deep-ep", "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel"),
    *("build", "deepseek-recipe", "mistral_common", "modelscope", "outlines", "py-spy"),
    *("smg-grpc-servicer", "soundfile", "tml-renderers"),
)
# Packages that SGLang imports but does not list as requirements; decord takes the place of torchcodec.
BESIDE = ("accelerate", "decord", "jsonschema", "outlines_core", "soundfile", "pandas")


def main() -> None:
    torch = install_torch_release()
    release = "sglang" if "--newest" in sys.argv[1:] else f"sglang=={SGLANG}"
    install("--no-deps", release, torchvision_requirement(torch))
    wanted = [*requirements("sglang", LEFT_OUT), *BESIDE]
    install(f"torch=={torch}", *wanted, "-e", f"{ROOT}[serve,sglang,test]")
    site = Path(sysconfig.get_path("purelib"))
    (site / "_sglang_cpu.pth").write_text(f"{ROOT / 'tests' / 'sglang' / 'kernels'}\nimport sglang_on_cpu\n")
    print(f"SGLang {importlib.metadata.version('sglang')}, torch {torch}")


if __name__ == "__main__":
    main()
