"""Where the kernels' tests run: on the GPU where there is one, else in Triton's interpreter.

The mode belongs to the process: Triton reads TRITON_INTERPRET when it is imported. So it is set while this
file is taken up, before any test module below it, and never on a machine with CUDA, where other tests of the
same run need compiled kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available() or not HAS_TRITON:
        return
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("triton was imported before TRITON_INTERPRET=1 was set")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU that ``--device`` names, or the first; the CPU where kernels are interpreted."""
    named = torch.device(request.config.getoption("--device"))
    if torch.cuda.is_available() and named.type != "cuda":
        return torch.device("cuda:0")
    return named


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh random numbers in every run; a failure shows the seed."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session", autouse=True)
def rounds_as_hardware_does() -> Iterator[None]:
    """The interpreter truncates float32 to bfloat16; a GPU rounds to nearest even, and so does torch."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl

    interpreter = importlib.import_module("triton.runtime.interpreter")
    plain: Callable[..., np.ndarray] = vars(interpreter)["_convert_float"]

    def convert(value: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
        if source != tl.float32 or target != tl.bfloat16:
            return plain(value, source, target, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(value)).bfloat16().view(torch.uint16).numpy()
        return rounded.reshape(value.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield
