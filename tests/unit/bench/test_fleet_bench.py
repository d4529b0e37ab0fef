"""The fleet bench runs each event once, and says what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
EVENTS = ["scale 4 to 8", "scale 8 to 3", "kill", "rolling restart", "partition", "slow replica"]


def test_a_quick_run_has_every_event_and_no_failed_request(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "bench/fleet.py", "--quick", "--out", tmp_path, "--commit", "abc"],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = tmp_path.glob("fleet-*.json")
    assert path.with_suffix(".png").stat().st_size > 10_000
    result = json.loads(path.read_text())
    assert result["commit"] == "abc"
    assert result["settings"]["quick"]
    assert result["versions"]["grpcio"]
    assert [one["event"] for one in result["records"]] == EVENTS
    for one in result["records"]:
        assert one["failed"] == 0, one["event"]
        assert one["items"] > 50
        assert len(one["moved"]) == len(one["recovery_ms"]) == one["repeats"] == 1
        assert 0 <= one["moved"][0] < 0.9, "never all keys"
    budget, free = result["sick_fleet"]
    assert budget["attempts_per_item"] < free["attempts_per_item"]
    assert result["overhead"]["one_server_ms"] > 0
