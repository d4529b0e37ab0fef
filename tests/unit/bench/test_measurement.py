"""Timing and result files of the benches."""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from pathlib import Path

import measurement
import pytest
import torch
from measurement import ResultFile, host_time_us, interleaved_medians, interleaved_samples, write_result

CPU = torch.device("cpu")


def result(**more: object) -> dict[str, object]:
    return {"device": "NVIDIA H200 (x)", "date": "2026-11-20T10:00:00", **more}


def test_a_result_names_the_version_of_every_gpu_library_that_may_be_chosen() -> None:
    project = tomllib.loads((measurement.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {
        re.split(r"[\[<>=~! ]", needs)[0] for extra in ("fa3", "fa4", "flash-attn") for needs in extras[extra]
    }
    assert needed <= measurement.describe_environment(CPU, "0123abc")["versions"].keys()


def test_result_files_are_numbered_and_never_replaced(tmp_path: Path) -> None:
    first = ResultFile(tmp_path, "tower", result(value=1))
    second = write_result(tmp_path, "tower", result(value=2))
    assert first.path.name == "tower-nvidia-h200-x-2026-11-20.json"
    assert second.name == "tower-nvidia-h200-x-2026-11-20-2.json"
    assert json.loads(first.path.read_text())["value"] == 1
    assert json.loads(second.read_text())["value"] == 2


def test_a_result_file_is_whole_from_the_start_and_follows_the_result(tmp_path: Path) -> None:
    held = result(complete=False, records=[])
    file = ResultFile(tmp_path, "tower", held)
    assert json.loads(file.path.read_text()) == held
    held["records"] = [1]
    assert json.loads(file.path.read_text())["records"] == []
    file.write()
    assert json.loads(file.path.read_text())["records"] == [1]
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_result_that_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    held = result(records=[1])
    file = ResultFile(tmp_path, "tower", held)
    held["records"] = [object()]
    with pytest.raises(TypeError):
        file.write()
    assert json.loads(file.path.read_text())["records"] == [1]


def test_variants_take_turns_and_every_round_has_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "MAX_IN_A_ROW", 1)
    calls: list[str] = []
    variants = {name: lambda name=name: calls.append(name) for name in "abc"}
    samples = interleaved_samples(variants, CPU, warm_up=2, repeats=8, budget_s=10)
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abc", 8)
    rounds = ["".join(calls[start : start + 3]) for start in range(6, len(calls), 3)]
    assert len(rounds) == 8
    assert all(sorted(one) == list("abc") for one in rounds)
    assert len(set(rounds)) > 1


def test_a_spent_budget_ends_warm_up_and_rounds_but_not_before_three(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: now[0])
    counts = {"slow": 0}

    def slow() -> None:
        counts["slow"] += 1
        now[0] += 2.0

    medians = interleaved_medians({"slow": slow}, CPU, warm_up=5, repeats=50, budget_s=1.0)
    assert medians == {"slow": (2000.0, 3)}
    assert counts["slow"] == 1 + 3


def test_short_runs_go_several_in_a_row_and_count_as_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: now[0])
    calls = {"short": 0, "long": 0}

    def run(name: str, seconds: float) -> None:
        calls[name] += 1
        now[0] += seconds

    variants = {"short": lambda: run("short", 5e-3), "long": lambda: run("long", 50e-3)}
    medians = interleaved_medians(variants, CPU, warm_up=1, repeats=3, budget_s=100.0)
    assert medians["short"] == (pytest.approx(5.0), 3)
    assert medians["long"] == (pytest.approx(50.0), 3)
    assert calls == {"short": 1 + 3 * 4, "long": 1 + 3}


def test_the_command_is_told_without_its_output_folder() -> None:
    line = ["bench/tower.py", "--out", "/a/folder", "--quick", "--out=/b", "--seed", "3"]
    assert measurement.command_line(line) == ["bench/tower.py", "--quick", "--seed", "3"]


def test_host_time_is_the_median_of_single_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: now[0])
    spans = iter((5e-6, 1e-6, 90e-6))

    def run() -> None:
        now[0] += next(spans)

    assert host_time_us(run, CPU, repeats=3) == pytest.approx(statistics.median((5, 1, 90)))
