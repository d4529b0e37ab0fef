"""`bench.epd` at tiny size: that it runs, and that its figures are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.harness.processes import ROOT, environment


def check_epd(out: Path, num_peers: int, *arguments: str) -> dict[str, Any]:
    """One closed loop."""
    result = run_epd(out, "--mixes", "4x112, 2 callers", *arguments)
    assert len(result["summary"]) == num_peers, result["left_out"]
    for row in result["summary"]:
        assert row["num_failed"] == 0
        assert all(row[name][0] > 0 for name in ("requests_per_s", "first_token_ms p50", "gaps_ms p99"))
    return result


def check_rates(out: Path, *arguments: str) -> None:
    """Every mix at its rates, for two seconds, and conversations."""
    result = run_epd(out, "--rates", "--seconds", "2", *arguments)
    points = [row for row in result["summary"] if "goodput" not in row]
    assert {row["mix"] for row in points} == {
        *("chat", "chat as text", "conversation", "conversation as text", "clips")
    }
    for row in points:
        assert row["num_failed"] == 0
        assert row["first_token_ms p50"][0] > 0
    turns = [one for one in result["records"] if one["mix"] == "conversation"]
    assert {len(one["requests"]) for one in turns} == {2 * 3}, "two users, three turns"
    assert all(
        row["goodput"].keys() == points[0]["within"].keys() for row in result["summary"][len(points) :]
    )


def run_epd(out: Path, *arguments: str) -> dict[str, Any]:
    completed = subprocess.run(
        [
            *(sys.executable, "-m", "bench.epd", "--size", "tiny", "--rounds", "1", *arguments),
            *("--commit", "of a test", "--out", str(out)),
        ],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    (path,) = out.glob("epd-*.json")
    result: dict[str, Any] = json.loads(path.read_text())
    assert result["complete"]
    return result
