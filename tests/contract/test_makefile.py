"""The targets of the Makefile, the CI entry, and the choice of torch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TARGETS = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def dry_run(*arguments: str) -> str:
    """Commands of make, with the environment taken as set up."""
    command = ["make", "--dry-run", "--assume-old=.venv/.setup-done", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "deploy" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_is_phony_and_runs_what_exists(target: str) -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert target in phony[1].split()
    for script in re.findall(r"(?<![\w/.])((?:bench|deploy|proto|tests)/[\w/]+\.(?:py|sh))", dry_run(target)):
        assert (ROOT / script).is_file(), f"make {target} runs {script}"


def test_ci_calls_the_targets_and_returns_their_failure(tmp_path: Path) -> None:
    """With a make that fails in lint: the other targets still run, and the exit status is lint's."""
    log = tmp_path / "log"
    programs = {
        "make": f'#!/bin/sh\necho "$*" >> {log}\ncase $1 in lint) exit 7;; -j2) exit 8;; esac\n',
        **dict.fromkeys(("promtool", "chromium", "ip", "apt-get"), "#!/bin/sh\n"),
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run([str(ROOT / ".ci" / "run")], env=environment, timeout=60, check=False)
    called = log.read_text().splitlines()
    long = "test-long TESTS=tests/deploy tests/contract"
    assert called[-6:] == ["test-engines", "test-sglang", "test-tokenspeed", "test-fleet", long, "test"]
    environments = " ".join(f".venv-{name}/.setup-done" for name in ("engines", "sglang", "tokenspeed"))
    assert sorted(called[:-6]) == [f"-j2 {environments}", "lint", "setup"]
    assert ended.returncode == 7


def test_torch_range_is_the_projects(installer: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (text for text in project["dependencies"] if Requirement(text).name == "torch")
    assert torch == installer.TORCH_RANGE
    for minor in range(installer.MIN_TORCH_MINOR - 1, installer.MAX_TORCH_MINOR + 2):
        is_supported = installer.MIN_TORCH_MINOR <= minor <= installer.MAX_TORCH_MINOR
        assert Requirement(torch).specifier.contains(f"2.{minor}.0") is is_supported
    assert installer.torchvision_requirement("2.11.0+cu130") == "torchvision~=0.26.0"
    with pytest.raises(SystemExit, match=r"torch 2\.8\.0 is installed, needs >=2\.11,<2\.14"):
        installer.torchvision_requirement("2.8.0")


def test_cuda_libraries_come_only_where_there_is_a_gpu(installer: ModuleType) -> None:
    """The default index has CUDA builds for Linux: the only source with a GPU, the last without."""
    default = [installer.TORCH_RANGE]
    assert installer.candidates("Linux", gpu_visible=True) == [default]
    assert installer.candidates("Darwin", gpu_visible=False) == [default]
    first, index, last = installer.candidates("Linux", gpu_visible=False)
    assert (first, last) == (["torch==2.13.0+cpu"], default)
    assert "https://download.pytorch.org/whl/cpu" in index


def test_an_installed_torch_stays_and_sources_are_tried_in_turn(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []

    def fail(arguments: Sequence[str], *, show_errors: bool) -> bool:
        tried.append(show_errors)
        return False

    monkeypatch.setattr(installer, "try_install", fail)
    monkeypatch.setattr(installer, "installed_torch", lambda: "2.11.0+cu130")
    assert installer.ensure_torch() == "2.11.0+cu130"
    assert tried == []
    monkeypatch.setattr(installer, "installed_torch", lambda: None)
    monkeypatch.setattr(installer, "nvidia_gpu_visible", lambda: False)
    monkeypatch.setattr(installer.platform, "system", lambda: "Linux")
    with pytest.raises(SystemExit, match="none of 3 sources"):
        installer.ensure_torch()
    assert tried == [False, False, True]


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
