"""Options and fixtures that every test folder shares."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch

from tests import time_limits
from tests.as_it_happens import AsItHappens
from tests.turns import own_gpu_first

# Before anything asks for a device.
own_gpu_first(os.environ)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        help="torch device for the tests that take one: cpu, or cuda:0 to run the same tests on a GPU",
    )
    parser.addoption(
        "--seconds-file", help="file that gets what each test took, and the summary gets a table by test file"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(time_limits)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(AsItHappens(config, config.getoption("--seconds-file")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that ``--device`` names."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
