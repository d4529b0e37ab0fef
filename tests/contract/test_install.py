"""The choice of torch, and where packages come from."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "deploy" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_torch_range_is_the_projects(installer: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (
        text for text in project["optional-dependencies"]["serve"] if Requirement(text).name == "torch"
    )
    assert torch == installer.TORCH_RANGE
    for minor in (installer.MIN_TORCH_MINOR - 1, installer.MIN_TORCH_MINOR, 14, 20):
        is_supported = minor >= installer.MIN_TORCH_MINOR
        assert Requirement(torch).specifier.contains(f"2.{minor}.0") is is_supported
    assert installer.torchvision_requirement("2.11.0+cu130") == "torchvision~=0.26.0"
    with pytest.raises(SystemExit, match=r"torch 2\.8\.0 is installed, needs >=2\.11"):
        installer.torchvision_requirement("2.8.0")


def test_cuda_libraries_come_only_where_there_is_a_gpu(installer: ModuleType) -> None:
    """The default index has CUDA builds for Linux: the only source with a GPU, the last without."""
    default = [installer.TORCH_RANGE]
    assert installer.candidates("Linux", gpu_visible=True) == [default]
    assert installer.candidates("Darwin", gpu_visible=False) == [default]
    first, index, last = installer.candidates("Linux", gpu_visible=False)
    assert (first, last) == (["torch==2.13.0+cpu"], default)
    assert "https://download.pytorch.org/whl/cpu" in index


def test_packages_come_from_the_sources_that_pip_is_configured_for(installer: ModuleType) -> None:
    config = """:env:.find-links='/first /second'
global.find-links='/other'
global.index-url='https://mirror.example/simple'
global.timeout='20'
"""
    assert installer.sources(config) == {
        "UV_FIND_LINKS": "/first,/second",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
    }
