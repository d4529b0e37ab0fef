"""Timing and result files of the benches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import measurement
from bench.measurement import (
    ResultFile,
    host_time_us,
    interleaved_samples,
    write_result,
)

CPU = torch.device("cpu")


def test_result_files_are_numbered_never_replaced_and_always_whole(tmp_path: Path) -> None:
    result: dict[str, object] = {"device": "NVIDIA H200 (x)", "date": "2026-11-20T10:00:00", "records": []}
    first = ResultFile(tmp_path, "tower", result)
    assert write_result(tmp_path, "tower", result).name == "tower-nvidia-h200-x-2026-11-20-2.json"
    assert first.path.name == "tower-nvidia-h200-x-2026-11-20.json"
    result["records"] = [1]
    first.write()
    result["records"] = [object()]
    with pytest.raises(TypeError):
        first.write()
    assert json.loads(first.path.read_text())["records"] == [1]


def test_samples_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spent budget ends the rounds, but not before three; short runs share a sample."""
    now = [0.0]
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: now[0])
    calls = {"short": 0, "slow": 0}

    def run(name: str, seconds: float) -> None:
        calls[name] += 1
        now[0] += seconds

    variants = {"short": lambda: run("short", 5e-3), "slow": lambda: run("slow", 2.0)}
    samples = interleaved_samples(variants, CPU, warm_up=1, repeats=50, budget_s=1.0)
    assert samples == {"short": [pytest.approx(5.0)] * 3, "slow": [pytest.approx(2000.0)] * 3}
    assert calls == {"short": 1 + 3 * 4, "slow": 1 + 3}
    spans = iter((5e-6, 1e-6, 90e-6))
    monkeypatch.setitem(calls, "host", 0)
    assert host_time_us(lambda: run("host", next(spans)), CPU, repeats=3) == pytest.approx(5)
