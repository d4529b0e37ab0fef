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
    assert [(one["case"], one["device_is"], one["num_items"]) for one in records] == [
        ("1x448", "idle", 1), ("1x448", "busy", 1), ("32x448", "idle", 32), ("32x448", "busy", 32)
    ]  # fmt: skip
    for one in records:
        assert one["launches"] == 30
        assert one["graph_launch_us"] == 0  # no graph on a CPU
        assert 0 < one["python_us"] == one["launch_us"] <= one["launch_us_p99"]
