"""How the tests of a GPU are dealt to workers and to GPUs, and what a run says before its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gpu.order import LONG_S, SECONDS_FILE, dealt, known_seconds, stretches, unit_name
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


def deal(tests: Sequence[tuple[str, str, float]], num_workers: int) -> list[list[tuple[str, str, float]]]:
    """Into each worker's stretch. tests: unit, name and seconds."""
    order = dealt(tests, num_workers, lambda test: test[0], lambda test: test[2])
    assert sorted(order) == sorted(tests), "each once"
    cut = iter(order)
    return [[next(cut) for _ in range(length)] for length in stretches(len(tests), num_workers)]


@pytest.mark.parametrize(("num_tests", "num_workers"), [(1250, 8), (17, 2), (3, 8), (0, 4), (7, 1)])
def test_stretches_are_those_of_worksteal(num_tests: int, num_workers: int) -> None:
    lengths = stretches(num_tests, num_workers)
    assert len(lengths) == num_workers
    assert sum(lengths) == num_tests
    assert max(lengths) - min(lengths) <= 1


def test_long_units_begin_each_stretch_and_stay_whole() -> None:
    storm = [("storm", "storm", 147.0)]
    site = [("site", f"site {number}", 5.0) for number in range(20)]
    bench = [(f"bench {number}", f"bench {number}", 30.0) for number in range(4)]
    short = [("file", f"short {number}", 0.1) for number in range(60)]
    found = deal([*short, *bench, *site, *storm], 4)
    assert found[0][0] == storm[0]
    assert found[1][:20] == site
    assert [stretch[0][0] for stretch in found[2:]] == ["bench 0", "bench 1"]
    busy_s = [sum(seconds for _, _, seconds in stretch) for stretch in found]
    assert max(busy_s) < 147 + 3


def test_a_unit_without_room_in_any_stretch_is_dealt_all_the_same() -> None:
    assert len(deal([("site", str(number), 5.0) for number in range(10)], 4)) == 4


def test_units() -> None:
    assert unit_name("a.py", "a.py::one", None, 0.1) == unit_name("a.py", "a.py::two", None, 0.1)
    assert unit_name("a.py", "a.py::one", None, LONG_S) != unit_name("a.py", "a.py::two", None, LONG_S)
    assert unit_name("a.py", "a.py::one", {}, 0.1) == unit_name("a.py", "a.py::two", {}, LONG_S)
    assert unit_name("a.py", "a.py::one", {"rig": "kimi"}, 0.1) != unit_name("a.py", "a.py::two", {}, 0.1)


def test_the_times_that_are_known_are_of_tests_that_exist() -> None:
    known = known_seconds(SECONDS_FILE.read_text().splitlines())
    assert len(known) > 20
    for nodeid in known:
        path, _, name = nodeid.partition("::")
        test = name.partition("[")[0].rpartition("::")[2]
        sources = [ROOT / path, *(ROOT / "tests/chaos").glob("two_pods.py")]
        assert any(f"def {test}(" in source.read_text() for source in sources), nodeid


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
    known = known_seconds((tmp_path / "out" / "seconds.txt").read_text().splitlines())
    assert sorted(known) == [f"test_it.py::test_{name}" for name in ("bad", "broken", "good")]
