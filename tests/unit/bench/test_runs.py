"""Each bench runs at its smallest size on a CPU; recorded results can be drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench import charts
from bench.harness.pods import can_isolate
from bench.tower import gains_of
from bench.transport_peers import bytes_of
from bench.variants import OURS, REFERENCES

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "bench" / "results"
ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")]),
}


def run_bench(name: str, out: Path, *options: str) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    ended = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", "--quick", "--device", "cpu", "--out", str(out), *options],
        cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    (path,) = out.glob(f"{name}-*.json")
    return json.loads(path.read_text()), ended


@pytest.mark.extended
def test_tower(tmp_path: Path) -> None:
    result, ended = run_bench("tower", tmp_path, "--size", "tiny", "--families", "qwen3_vl")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert result["complete"] is True
    places = {(one["family"], one["case"], one["variant"]) for one in result["records"]}
    assert places == {("qwen3_vl", "1x256", variant) for variant in ("plain", "ref_sdpa")}
    for record in result["records"]:
        assert record["min_ms"] <= record["median_ms"] <= record["max_ms"]
        assert record["useful_tflops"] > 0
    left_out = {one["variant"]: one["reason"] for one in result["left_out"]}
    assert set(left_out) == {*REFERENCES, *OURS} - {"plain", "ref_sdpa", "ref_compiled"}
    assert all("CUDA" in reason for reason in left_out.values())
    assert result["checks"][0]["relative_error"] < 1e-5
    assert result["accuracy"][0]["cosine_min"] == pytest.approx(1)
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".json", ".png"]


def test_gains_compare_cases_that_have_both_graphs() -> None:
    times = {
        ("1x448", "graph"): 2.0,
        ("1x448", "graph_torch"): 2.5,
        ("clip", "graph"): 3.0,
        ("clip", "plain"): 9.0,
    }
    records = [
        {"family": "qwen3_vl", "case": case, "variant": variant, "median_ms": ms}
        for (case, variant), ms in times.items()
    ]
    assert gains_of(records) == [
        {"family": "qwen3_vl", "case": "1x448", "graph_ms": 2.0, "torch_ms": 2.5, "ratio": 1.25}
    ]


@pytest.mark.extended
def test_transport(tmp_path: Path) -> None:
    result, ended = run_bench(
        "transport", tmp_path, "--sizes-mib", "0.4", "3", "--budget-s", "0.1", "--resident-mib", "16",
        "--time-limit-s", "100",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert result["left_out"] == []
    assert result["complete"] is True
    assert {(one["path"], one["bytes"]) for one in result["records"]} == {
        (path, bytes_of(size)) for path in ("host_shm", "inline_uds", "inline_tcp") for size in (0.4, 3)
    }
    for record in result["records"]:
        assert 0 < record["p50_ms"] <= record["p99_ms"]
        assert record["floor_ms"] > 0
        assert ("announced_ms" in record) == (record["path"] == "host_shm")
    assert result["isolated"] == can_isolate()
    text = json.dumps(result)
    assert str(tmp_path) not in text
    assert str(ROOT) not in text


@pytest.mark.extended
def test_serve(tmp_path: Path) -> None:
    result, ended = run_bench(
        "serve", tmp_path, "--size", "tiny", "--loads", "0.5", "--cell-s", "1.5", "--photos", "10",
        "--time-limit-s", "120",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert result["complete"]
    (record,) = result["records"]
    assert record["images_per_s"] > 0
    assert not record["failures"]
    assert record["device_busy_share"] > 0
    assert record["stages"]["tower_ms"]["p50"] > 0
    (summary,) = result["summary"]
    assert summary["service_over_tower"] > 0
    assert summary["service_overhead_p50_ms"] <= summary["overhead_p50_ms"]
    assert result["service"]["exit_status"] == 0
    assert len(list(tmp_path.glob("serve-*.png"))) == 1


@pytest.mark.parametrize("bench", charts.DRAWERS)
def test_the_latest_recorded_result_can_be_drawn(bench: str, tmp_path: Path) -> None:
    paths = sorted(RESULTS.glob(f"{bench}-*.json"))
    assert paths
    for path in paths[-1:]:
        result = json.loads(path.read_text())
        with Image.open(charts.draw(bench, result, tmp_path / "chart.png")) as picture:
            assert picture.width > 1000
    with pytest.raises(charts.NoChart):
        charts.draw(bench, result | {"records": []}, tmp_path / "chart.png")
