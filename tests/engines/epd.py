"""`bench.epd` at tiny size: that it runs, and that its figures are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.harness.processes import ROOT, environment


def check_epd(out: Path, num_servers: int, *arguments: str) -> None:
    """One case with a load of text beside it."""
    completed = subprocess.run(
        [
            *(sys.executable, "-m", "bench.epd", "--size", "tiny", "--rounds", "1", *arguments),
            *("--cases", "2", "--commit", "of a test", "--out", str(out)),
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
    result = json.loads(path.read_text())
    assert result["complete"]
    assert len(result["summary"]) == num_servers
    for row in result["summary"]:
        assert row["num_failed"] == 0
        assert all(
            row[name][0] > 0 for name in ("requests_per_s", "first_token_ms p50", "between_tokens_ms p99")
        )
