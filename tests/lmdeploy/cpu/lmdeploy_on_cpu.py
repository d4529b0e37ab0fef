"""What LMDeploy's PyTorch engine needs to run on a CPU. A `.pth` file imports it in every process of the
tests' environment (deploy/install_lmdeploy.py).

LMDeploy's engine has no CPU device. Its own API server, processes, scheduler, caches, model agent, model
classes and loader run here; what is replaced is the device below them:

- CUDA's streams and events, which do nothing, as each operation has ended when it returns; its tensors;
- the attention, by plain torch on LMDeploy's own paged cache;
- torch's compiler, whose import takes each process seven seconds;
- the check of the environment, the warm-up, and the amount of free memory;
- NCCL, by gloo;
- with LMDEPLOY_ON_CPU_FLOAT32=1 in the environment the dtype: LMDeploy takes no float32, in which tokens are
  equal to those of transformers.
"""

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import time
import types
from typing import Any

FREE_BYTES = 256 << 20
MANAGER_ENDS_S = 1.0


class Stream:
    """Of torch.cuda, as are the functions below."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_event(self, _event):
        pass

    def query(self):
        return True

    wait_stream = synchronize = record_event = wait_event


class Event:
    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        pass

    def query(self):
        return True

    wait = synchronize = record


def replace_cuda(_lmdeploy):
    import torch

    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor

    cuda.Stream, cuda.Event = Stream, Event
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.current_stream = lambda *_: Stream()
    cuda.get_device_name = lambda *_: "cpu"
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=8, minor=0)
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    tensor.cuda = lambda one, **_: one.clone()
    module: Any = torch
    module._C._cuda_clearCublasWorkspaces = lambda: None
    module.compile = lambda one=None, **_: one or (lambda decorated: decorated)

    for name in ("empty", "zeros", "ones", "full", "tensor", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def on_cpu(factory):
    @functools.wraps(factory)
    def make(*arguments, **options):
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "cpu"
        return factory(*arguments, **options)

    return make


def take_float32(config):
    stock = config._update_torch_dtype

    @functools.wraps(stock)
    def update(model_config, dtype, device_type="auto"):
        import torch

        stock(model_config, dtype, device_type)
        if os.environ.get("LMDEPLOY_ON_CPU_FLOAT32") == "1":
            model_config.dtype = torch.float32
        return model_config

    config._update_torch_dtype = update


def take_bfloat16(utils):
    utils.is_bf16_supported = lambda *_: True


def choose_backend(selector):
    backend: Any = importlib.import_module("lmdeploy_cpu_backend")

    selector._get_backend = lambda: backend.CpuBackend


def skip_check(engine):
    class Checker:
        def __init__(self, **_):
            pass

        def handle(self):
            pass

    engine.EngineChecker = Checker


def use_cpu(agent):
    stock: Any = agent.BaseModelAgent

    class CpuAgent(stock):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.device = "cpu"

        def get_free_mem(self):
            return FREE_BYTES

        def warmup(self):
            pass

    agent.BaseModelAgent = CpuAgent

    def to_cpu(value, non_blocking=False):
        if hasattr(value, "to_device"):
            return value.to_device("cpu")
        return value.clone() if value is not None else None

    agent._try_to_cuda = to_cpu


def end_manager_later(zmq_engine):
    """LMDeploy ends the process that hands over the engine's port as soon as it has it. On a busy machine the
    engine still waits for an answer of that process, and dies of its end."""
    manager: Any = importlib.import_module("multiprocessing.managers").SyncManager
    stock = manager.__exit__

    def leave(self, *exception):
        time.sleep(MANAGER_ENDS_S)
        stock(self, *exception)

    manager.__exit__ = leave


AFTER_IMPORT = {
    "lmdeploy": replace_cuda,
    "lmdeploy.pytorch.backends.selector": choose_backend,
    "lmdeploy.pytorch.config": take_float32,
    "lmdeploy.pytorch.engine.engine": skip_check,
    "lmdeploy.pytorch.engine.model_agent.agent": use_cpu,
    "lmdeploy.pytorch.engine.mp_engine.zmq_engine": end_manager_later,
    "lmdeploy.utils": take_bfloat16,
}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
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
