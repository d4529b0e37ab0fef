"""A checkpoint, an encoder and the reference model for a real LMDeploy on the CPU.

Collected only where LMDeploy is installed: `make test-lmdeploy` runs this folder in its own environment.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.sglang.reference import Reference

if importlib.util.find_spec("lmdeploy") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    # torch notes its factories when it first has a default device. lmdeploy_on_cpu.py replaces them once some
    # test imports LMDeploy, and then the reference model would be built without its default device.
    with torch.device("cpu"):
        torch.empty(0)

    from bench.harness.engine_checkpoints import write_checkpoint
    from bench.harness.vllm import Encoder
    from tests.engines.pictures import picture


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("lmdeploy") / "qwen3_vl", "qwen3_vl")


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    from tests.sglang.reference import Reference

    return Reference(checkpoint)


@pytest.fixture(autouse=True)
def _same_draws(request: pytest.FixtureRequest) -> None:
    """The same pictures in every run, others in each test."""
    random.seed(request.node.nodeid)


@pytest.fixture(scope="session")
def encoder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encoder]:
    """The service in float32, with gRPC and a broker."""
    with Encoder(checkpoint, "float32", tmp_path_factory.mktemp("encoder")) as running:
        yield running


@pytest.fixture(scope="session")
def images() -> list[bytes]:
    """Three of different sizes."""
    return [picture(seed, *size) for seed, size in enumerate(((200, 260), (330, 180), (224, 160)))]
