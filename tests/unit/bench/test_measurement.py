"""Timing, power and result files of the benches; the table of kernels from a trace."""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path

import measurement
import pytest
import torch
from kernel_profile import DeviceSpan, group_of, summary
from measurement import (
    ResultFile,
    describe_environment,
    host_time_us,
    interleaved_samples,
    percentile,
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


def test_a_result_says_where_it_was_measured() -> None:
    found = describe_environment(CPU, "0123abcd", packages=("grpcio",))
    assert (found["kernel"], found["commit"]) == (platform.release(), "0123abcd")
    assert {"date", "device", "driver", "command", "num_threads"} <= found.keys()
    assert {"python", "torch", "grpcio"} <= found["versions"].keys()


def test_variants_run_in_a_new_order_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "MAX_IN_A_ROW", 1)
    calls: list[str] = []
    variants = {name: lambda name=name: calls.append(name) for name in "abc"}
    samples = interleaved_samples(variants, CPU, warm_up=2, repeats=8, budget_s=10)
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abc", 8)
    rounds = ["".join(calls[start : start + 3]) for start in range(6, len(calls), 3)]
    assert len(rounds) == 8
    assert all(sorted(one) == list("abc") for one in rounds)
    assert len(set(rounds)) > 1


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


@pytest.mark.parametrize(("count", "p99"), [(1, 1.0), (99, 99.0), (100, 99.0), (101, 100.0), (200, 198.0)])
def test_percentiles_are_values_that_were_measured(count: int, p99: float) -> None:
    assert percentile([float(value) for value in range(count, 0, -1)], 0.99) == p99
    assert math.isnan(percentile([], 0.5))


def test_a_profile_splits_runs_at_pauses_and_groups_kernels() -> None:
    """Each run: a product of 40 us, 10 us idle, a norm of 30 that overlaps a copy of 20."""
    spans = []
    for run in range(3):
        for name, start_us, duration_us in (("nvjet_a", 0, 40), ("_norm_kernel", 50, 30), ("Memcpy", 60, 20)):
            spans.append(DeviceSpan(name, run * 6000.0 + start_us, duration_us))
    found = summary(spans, 3)
    assert (found["span_us"], found["busy_us"]) == (80, 70)
    assert found["idle_share"] == pytest.approx(1 / 8)
    assert [(one["name"], one["calls"], one["total_us"]) for one in found["groups"]] == [
        ("products", 1, 40), ("norms", 1, 30), ("copies", 1, 20),
    ]  # fmt: skip
    assert group_of("void cutlass::device_kernel<flash::FlashAttnFwdSm90<int>>(Params)") == "attention"
    with pytest.raises(ValueError, match="3 kernels of 4 runs"):
        summary(spans[:3], 4)
