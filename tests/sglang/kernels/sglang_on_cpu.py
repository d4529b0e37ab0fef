"""What SGLang needs to be imported on a CPU without AMX. A `.pth` file imports it in every process of the
tests' environment (deploy/install_sglang.py).

- `import sglang` brings the stand-in for its kernel package first: SGLang looks operators up before it
  imports the package.
- The gated norm of Qwen3.5 calls that package's operator, as on a CPU with AMX, in place of Triton.
- Kimi-K2.5's attention takes the form that reads SGLang's compressed cache, also for a prompt: `torch_native`
  can compute no other.
- PyPI's torchvision is built for CUDA and its operators do not load beside a CPU torch: the two that its
  import registers shapes for are declared.
- With SGLANG_ON_CPU_FORK=1 in the environment a server's processes are forked. SGLang starts new ones, and
  each imports everything again, which takes as long as the rest of the start together.
"""

import importlib
import importlib.abc
import importlib.machinery
import multiprocessing
import os
import sys
from typing import Any


def use_operator(gated_norm):
    gated_norm._use_cpu = True


def choose_absorbed(handlers):
    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)


def fork(engine):
    if os.environ.get("SGLANG_ON_CPU_FORK") == "1":
        engine.mp = multiprocessing.get_context("fork")
        engine.mp.set_start_method = lambda *_, **__: None


AFTER_IMPORT = {
    "sglang.kernels.ops.attention.fla.layernorm_gated": use_operator,
    "sglang.srt.entrypoints.engine": fork,
    "sglang.srt.models.deepseek_common.attention_backend_handler": choose_absorbed,
}


FRAGMENTS = []  # operators go with the object that declares them


def declare_operators():
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    FRAGMENTS.append(library)


class Finder(importlib.abc.MetaPathFinder):
    """Acts once before torchvision and sglang are looked for, and after the modules of AFTER_IMPORT ran."""

    def __init__(self):
        self._before = {
            "torchvision": declare_operators,
            "sglang": lambda: importlib.import_module("sgl_kernel"),
        }

    def find_spec(self, fullname, path=None, target=None):
        self._before.pop(fullname, lambda: None)()
        act = AFTER_IMPORT.get(fullname)
        if act is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        loader: Any = spec.loader
        run = loader.exec_module
        loader.exec_module = lambda module: (run(module), act(module))
        return spec


sys.meta_path.insert(0, Finder())
