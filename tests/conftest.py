"""Options and fixtures that every test folder shares."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch

from tests import time_limits
from tests.turns import own_gpu_first

# How long one example takes says nothing on a loaded machine.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("without_deadline", deadline=None)
    settings.load_profile("without_deadline")

# Before anything asks for a device.
own_gpu_first(os.environ)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        help="torch device for the tests that take one: cpu, or cuda:0 to run the same tests on a GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(time_limits)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With a GPU as --device: only tests that use a device. Without one: tests that need it are skipped."""
    if config.getoption("--device") != "cpu":
        others = [item for item in items if not uses_device(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if uses_device(item)]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def uses_device(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None or "device" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that ``--device`` names."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL checkpoint."""
    from encoder_service.checkpoints.synthetic import make_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, "qwen3_vl", "tiny", 5)
    return folder


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
