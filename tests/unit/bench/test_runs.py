"""Each bench runs at its smallest size on a CPU; recorded results can be drawn, and are never replaced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from bench import charts, serve
from bench.harness.pods import environment
from bench.harness.processes import ROOT
from bench.measurement import RESULTS, ResultFile
from bench.serve_peers import COLUMNS

OPTIONS = {
    "tower": "--size tiny --families qwen3_vl",
    "transport": "--sizes-mib 0.4 3 --budget-s 0.1 --resident-mib 16 --time-limit-s 100",
    "serve": "--size tiny --loads 0.5 --cell-s 1.5 --photos 10 --time-limit-s 120",
}


@pytest.mark.extended
@pytest.mark.parametrize("name", OPTIONS)
def test_a_quick_run_on_a_cpu_is_complete(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"bench.{name}", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    ended = subprocess.run(
        [*command, *OPTIONS[name].split()],
        cwd=ROOT, env=environment(""), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = tmp_path.glob(f"{name}-*.json")
    result = json.loads(path.read_text())
    assert result["complete"]
    assert result["records"]
    assert path.with_suffix(".png").exists()
    assert str(ROOT) not in path.read_text()
    if name == "tower":
        assert result["checks"][0]["relative_error"] < 1e-5
    if name == "serve":
        assert result["records"][0]["images_per_s"] > 0


@pytest.mark.parametrize("bench", charts.DRAWERS)
def test_the_latest_recorded_result_can_be_drawn(bench: str, tmp_path: Path) -> None:
    path = max(RESULTS.glob(f"{bench}-*.json"))
    result = json.loads(path.read_text())
    with Image.open(charts.draw(bench, result, tmp_path / "chart.png")) as picture:
        assert picture.width > 1000


def test_result_files_are_numbered_and_never_replaced(tmp_path: Path) -> None:
    result = {"device": "NVIDIA H200 (x)", "date": "2026-11-20T10:00:00", "records": []}
    names = [ResultFile(tmp_path, "tower", result).path.name for _ in range(2)]
    assert names == ["tower-nvidia-h200-x-2026-11-20.json", "tower-nvidia-h200-x-2026-11-20-2.json"]


def test_rates_count_what_ended_and_latencies_what_was_due_in_the_window() -> None:
    plain = {"status": "ok", "tier": "miss", "patches": 100}
    calls = [(0.5, 40.0), (0.9, 200.0), (1.5, 90.0), (2.0, 150.0), (2.9, 300.0)]
    requests = [
        dict.fromkeys(COLUMNS, 0.0) | plain | {"at_s": at_s, "latency_ms": latency_ms}
        for at_s, latency_ms in calls
    ]
    figures = serve.client_figures(requests, warm_s=1.0, duration_s=3.0, bound_ms=100.0)
    assert figures["num_requests"] == 3
    assert (figures["images_per_s"], figures["goodput_images_per_s"]) == (1.5, 0.5)
    assert figures["latency_ms"]["p50"] == 150.0
