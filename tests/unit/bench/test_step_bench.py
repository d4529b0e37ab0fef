"""The step bench runs on a CPU, with stand-ins, and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_it_runs_without_a_gpu_and_writes_what_each_part_took(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "bench/step.py", "--device", "cpu", "--size", "tiny", "--quick", "--out", tmp_path,
         "--commit", "abc", "--cases", "1x448", "32x448"],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = tmp_path.glob("step-*.json")
    result = json.loads(path.read_text())
    assert result["commit"] == "abc"
    assert result["settings"]["stand_in"]
    records = result["records"]
    assert [(one["case"], one["rows_go_to"], one["device_is"], one["num_items"]) for one in records] == [
        (case, end, state, count)
        for case, count in (("1x448", 1), ("32x448", 32))
        for end in ("host", "places")
        for state in ("idle", "busy")
    ]
    for one in records:
        assert one["launches"] == 12
        assert 0 < one["graph_launch_us"] < one["driver_us"] <= one["driver_us_p99"]
        assert 0 < one["python_us"] < one["launch_us"] <= one["launch_us_p99"]
        # Stand-ins: next to nothing, and Python all the rest.
        assert abs(one["python_us"] + one["driver_us"] - one["launch_us"]) < 1e-6
