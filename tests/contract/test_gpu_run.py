"""How workers take turns on GPUs, and what a run of the GPU tests reports before its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.turns import NUM_GPUS, own_gpu_first

ROOT = Path(__file__).resolve().parents[2]
FAILS = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("no fixture")

def test_good(): pass
def test_bad(): assert 1 + 1 == 3, "arithmetic"
def test_broken(broken): pass
"""


@pytest.mark.parametrize(
    ("worker", "visible", "expected"),
    [
        ("gw0", None, "0,1"), ("gw1", None, "1,0"), ("gw4", None, "0,1"), ("gw1", "5,3", "3,5"),
        ("gw3", "GPU-a,GPU-b", "GPU-b,GPU-a"),
    ],
)  # fmt: skip
def test_workers_take_turns_on_which_gpu_is_first(worker: str, visible: str | None, expected: str) -> None:
    environment = {"PYTEST_XDIST_WORKER": worker, NUM_GPUS: "2"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    own_gpu_first(environment)
    own_gpu_first(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == expected, "turned once"


@pytest.mark.parametrize(
    "environment",
    [{}, {NUM_GPUS: "2"}, {"PYTEST_XDIST_WORKER": "gw1"}, {"PYTEST_XDIST_WORKER": "gw1", NUM_GPUS: "1"}],
)  # fmt: skip
def test_with_one_gpu_or_without_workers_nothing_is_turned(environment: dict[str, str]) -> None:
    before = dict(environment)
    own_gpu_first(environment)
    assert environment == before


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "workers"])
def test_failures_are_told_as_they_happen_and_times_are_kept(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    """On standard error, so that a run that is cut off has said them."""
    (tmp_path / "test_it.py").write_text(FAILS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(
        "from tests.as_it_happens import AsItHappens\n"
        "def pytest_configure(config):\n"
        "    if not hasattr(config, 'workerinput'):\n"
        "        config.pluginmanager.register(AsItHappens(config, 'out/seconds.txt'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=no", "-q", *workers, str(tmp_path)],
        cwd=tmp_path, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    told = [line for line in ended.stderr.splitlines() if line]
    assert sorted(told) == [
        "FAILED test_it.py::test_bad in call: AssertionError: arithmetic",
        "FAILED test_it.py::test_broken in setup: RuntimeError: no fixture",
    ]
    assert "3 tests in all" in ended.stdout
    lines = (tmp_path / "out" / "seconds.txt").read_text().splitlines()
    names = sorted(line.partition(" ")[2] for line in lines)
    assert names == [f"test_it.py::test_{name}" for name in ("bad", "broken", "good")]
