"""Installs LMDeploy and the requirements of its tests into the interpreter that runs this script.

Owns the recipe of `.venv-lmdeploy`, the environment of `make test-lmdeploy`. install_engines.py chooses the
torch build. Standard library and pip only.

Workarounds:

- LMDeploy 0.18.0 requires an older torch, CUDA libraries, and packages that are not used here. It is
  therefore installed without requirements; then its own list of requirements is installed without LEFT_OUT.
- PyPI's torchvision is built for CUDA. install_engines.py has the replacement for two of its operators.
- LMDeploy's engine has no CPU device. A `.pth` file loads tests/lmdeploy/cpu in every process, which gives it
  one, before LMDeploy is imported.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path

from install import ROOT, install, torchvision_requirement
from install_engines import install_torch_release, mend, requirements

LMDEPLOY = "0.18.0"
LEFT_OUT = (
    *("torch", "torchvision", "nvidia-nccl-cu12", "nvidia-cuda-runtime-cu12", "nvidia-cublas-cu12"),
    *("nvidia-curand-cu12", "flash-linear-attention", "tilelang", "rdkit", "peft", "accelerate"),
    *("einops", "opencv-python-headless", "tiktoken", "openai_harmony"),
)
# Packages that LMDeploy imports but does not list as requirements.
BESIDE = ("psutil", "requests")


def main() -> None:
    torch = install_torch_release()
    install("--no-deps", f"lmdeploy=={LMDEPLOY}", torchvision_requirement(torch))
    wanted = [*requirements("lmdeploy", LEFT_OUT), *BESIDE]
    install(f"torch=={torch}", *wanted, "-e", f"{ROOT}[serve,lmdeploy,test]")
    site = Path(sysconfig.get_path("purelib"))
    mend(site)
    folder = ROOT / "tests" / "lmdeploy" / "cpu"
    (site / "_lmdeploy_cpu.pth").write_text(f"{folder}\nimport lmdeploy_on_cpu\n")
    print(f"LMDeploy {importlib.metadata.version('lmdeploy')}, torch {torch}")


if __name__ == "__main__":
    main()
