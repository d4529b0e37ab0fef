"""The loop bench: its figures, and a quick run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import loop
import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_figures_are_of_each_item_and_of_each_call() -> None:
    spent = {
        "items": 10.0, "encoded": 10, "batches": 4, "wall_s": 3.0,
        "cpu_s.loop": 0.02, "cpu_s.device-engine": 0.005, "cpu_s.process": 0.05,
    }  # fmt: skip
    columns = ["latency_ms", "decode_ms", "resize_ms", "tower_ms", "queue_ms"]
    answers: list[dict[str, Any]] = [
        {"columns": columns, "rows": [[10.0, 1.0, 1.0, 5.0, 2.0]], "seconds": 2.0, "cpu_s": 0.01},
        {"columns": columns, "rows": [[20.0, 1.0, 1.0, 5.0, 0.0]], "seconds": 1.0, "cpu_s": 0.01},
    ]
    found = loop.figures_of(spent, answers)
    assert found["loop_ms"] == pytest.approx(2.0)
    assert found["device_engine_ms"] == pytest.approx(0.5)
    assert found["items_per_s"] == pytest.approx(5.0)
    assert found["loop_share"] == pytest.approx(0.01)
    assert found["items_per_batch"] == 2.5
    assert found["client_ms"] == pytest.approx(2.0)
    assert (found["beyond_p50_ms"], found["beyond_p90_ms"]) == (13.0, 13.0)
    medians = loop.medians_of([found, found | {"loop_ms": 1.0}, found | {"loop_ms": 9.0}])
    assert (medians["loop_ms"], medians["loop_ms_least"]) == (pytest.approx(2.0), 1.0)


@pytest.mark.extended
def test_quick_run(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "loop.py"), "--quick", "--profile", "--decode"]
    command += ["--calls", "40", "--arena-items", "32", "--out", str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (path,) = tmp_path.glob("loop-cpu-*.json")
    result = json.loads(path.read_text())
    assert [(record["traffic"], record["door"]) for record in result["records"]] == [
        (traffic, door) for traffic in loop.TRAFFIC for door in loop.DOORS
    ]
    for door in loop.DOORS:
        records = {record["traffic"]: record for record in result["records"] if record["door"] == door}
        assert records["miss"]["items"] == 40
        assert records["miss"]["items_per_batch"] >= 1
        assert records["hit"]["items_per_batch"] == 0, "nothing is encoded that is known"
        assert 0 < records["miss"]["loop_ms"] < records["miss"]["process_ms"]
        assert records["alone"]["beyond_p50_ms"] > 0
    assert any("pipeline.py" in one["function"] for one in result["profile"])
    assert result["settings"]["size"] == "448"
    assert result["commit"]
