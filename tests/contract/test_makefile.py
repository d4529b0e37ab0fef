"""The targets of the Makefile, the CI entry, and the choice of torch."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TARGETS = {
    "help", "setup", "test", "test-engines", "test-gpu", "lint", "proto", "proto-check", "bench",
    "bench-transport", "bench-serve", "demo", "serve", "clean",
}  # fmt: skip


def dry_run(*arguments: str) -> str:
    """What make would do, with the environment taken as already set up."""
    completed = subprocess.run(
        ["make", "--dry-run", "--assume-old=.venv/.setup-done", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.fixture(scope="module")
def install_torch() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_torch", ROOT / "deploy" / "install_torch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_help_is_the_default_and_lists_every_target() -> None:
    completed = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    listed = {line.split()[1] for line in completed.stdout.splitlines()}
    assert listed == TARGETS


@pytest.mark.parametrize("target", sorted(TARGETS - {"help"}))
def test_target_is_phony_and_runs_what_exists(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    assert target in phony.group(1).split()
    recipe = dry_run(target)
    scripts = re.findall(r"(?<![\w/.])((?:bench|deploy|proto)/[\w/]+\.(?:py|sh))", recipe)
    for script in scripts:
        assert (ROOT / script).is_file(), f"make {target} runs {script}"


def test_lint_covers_style_types_imports_and_generated_code() -> None:
    recipe = dry_run("lint")
    for command in ("ruff check", "ruff format --check", "mypy", "lint-imports", "proto/check.sh"):
        assert command in recipe


def test_mypy_is_strict_over_both_packages() -> None:
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert mypy["strict"] is True
    assert {"encoder_service", "lm_adapter"} <= set(mypy["files"])


def test_gpu_tests_install_nothing_and_take_any_interpreter() -> None:
    recipe = dry_run("test-gpu", "PY=/opt/gpu/bin/python")
    assert "/opt/gpu/bin/python -m pytest -m whole_device --device cuda:0 -n $gpus --dist worksteal" in recipe
    rest = '"not whole_device and not without_device"'
    assert f"/opt/gpu/bin/python -m pytest -m {rest} --device cuda:0" in recipe
    for folder in ("tests/gpu", "tests/parity", "tests/integration", "tests/unit/kernels"):
        assert folder in recipe
    left_out = re.findall(r"--ignore=(\S+)", recipe)
    assert len(left_out) > 10
    for path in left_out:
        assert (ROOT / path).is_file(), f"make test-gpu leaves out {path}"
    assert "pip" not in recipe
    assert ".venv" not in recipe


@pytest.mark.parametrize("script", [".ci/run", "proto/generate.sh", "proto/check.sh"])
def test_script_is_executable_and_parses(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & stat.S_IXUSR
    shell = path.read_text().splitlines()[0].removeprefix("#!").split()
    subprocess.run([*shell, "-n", str(path)], check=True, timeout=30)


def test_ci_calls_the_targets_and_passes_their_failure_on(tmp_path: Path) -> None:
    """With a make that fails in lint, and in what is installed beside it: the others still run, and the exit
    status is lint's."""
    log = tmp_path / "log"
    fake_make = tmp_path / "make"
    fake_make.write_text(f'#!/bin/sh\necho "$1" >> {log}\ncase $1 in lint) exit 7;; .venv*) exit 8;; esac\n')
    fake_make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    completed = subprocess.run([str(ROOT / ".ci" / "run")], env=environment, timeout=60, check=False)
    *beside, engines, last = log.read_text().split()
    assert (engines, last) == ("test-engines", "test")
    assert sorted(beside) == [".venv-engines/.setup-done", "lint", "setup"]
    assert beside.index("setup") < beside.index("lint")
    assert completed.returncode == 7


def test_torch_range_is_the_projects(install_torch: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (text for text in project["dependencies"] if Requirement(text).name == "torch")
    assert torch == install_torch.TORCH_RANGE
    specifier = Requirement(torch).specifier
    for minor in range(install_torch.MIN_TORCH_MINOR - 1, install_torch.MAX_TORCH_MINOR + 2):
        supported = install_torch.MIN_TORCH_MINOR <= minor <= install_torch.MAX_TORCH_MINOR
        assert specifier.contains(f"2.{minor}.0") is supported
    assert Requirement(install_torch.LOCAL_CPU_BUILD).specifier.contains("2.13.0+cpu")


@pytest.mark.parametrize(
    ("torch", "torchvision"),
    [
        ("2.9.1", "torchvision~=0.24.0"),
        ("2.10.0", "torchvision~=0.25.0"),
        ("2.11.0+cu130", "torchvision~=0.26.0"),
        ("2.13.0+cpu", "torchvision~=0.28.0"),
    ],
)
def test_torchvision_matches_torch(install_torch: ModuleType, torch: str, torchvision: str) -> None:
    assert install_torch.torchvision_requirement(torch) == torchvision


@pytest.mark.parametrize("version", ["2.8.0", "2.14.0+cpu", "3.9.0", "1.13.1"])
def test_an_unsupported_torch_is_refused_with_both_versions(install_torch: ModuleType, version: str) -> None:
    with pytest.raises(SystemExit, match=rf"torch {re.escape(version)} is installed, needs >=2\.9,<2\.14"):
        install_torch.torchvision_requirement(version)


def test_cuda_libraries_come_only_where_there_is_a_gpu(install_torch: ModuleType) -> None:
    """The default index, which has CUDA builds for Linux, is first with a GPU and last without."""
    default = [install_torch.TORCH_RANGE]
    assert install_torch.candidates("Linux", gpu_visible=True) == [default]
    assert install_torch.candidates("Darwin", gpu_visible=False) == [default]
    without_gpu = install_torch.candidates("Linux", gpu_visible=False)
    assert without_gpu[0] == ["torch==2.13.0+cpu"]
    assert "https://download.pytorch.org/whl/cpu" in without_gpu[1]
    assert without_gpu[-1] == default
    assert len(without_gpu) == 3


def test_an_installed_torch_stays(install_torch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(arguments: list[str], *, show_errors: bool) -> bool:
        raise AssertionError(f"pip install {arguments}")

    monkeypatch.setattr(install_torch, "installed_torch", lambda: "2.11.0+cu130")
    monkeypatch.setattr(install_torch, "pip_install", refuse)
    assert install_torch.ensure_torch() == "2.11.0+cu130"


def test_the_next_source_is_tried_when_one_fails(
    install_torch: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[tuple[str, bool]] = []

    def fail(arguments: list[str], *, show_errors: bool) -> bool:
        tried.append((" ".join(arguments), show_errors))
        return False

    monkeypatch.setattr(install_torch, "installed_torch", lambda: None)
    monkeypatch.setattr(install_torch, "nvidia_gpu_visible", lambda: False)
    monkeypatch.setattr(install_torch.platform, "system", lambda: "Linux")
    monkeypatch.setattr(install_torch, "pip_install", fail)
    with pytest.raises(SystemExit, match="none of 3 sources"):
        install_torch.ensure_torch()
    assert [show_errors for _, show_errors in tried] == [False, False, True]
    assert capsys.readouterr().out.count("installing") == 3
