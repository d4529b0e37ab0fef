"""The bench that compares SGLang's ways to rows runs at tiny size, and its figures are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.processes import ROOT, environment

pytestmark = [pytest.mark.timeout(600), pytest.mark.extended]


def test_epd_compares_all_servers(tmp_path: Path) -> None:
    """One case with a load of text beside it."""
    command = [sys.executable, str(ROOT / "bench" / "epd.py"), "--engine", "sglang", "--size", "tiny"]
    completed = subprocess.run(
        [*command, "--rounds", "1", "--cases", "2", "--commit", "of a test", "--out", str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    (path,) = tmp_path.glob("epd-*.json")
    result = json.loads(path.read_text())
    assert result["complete"]
    assert len(result["summary"]) == 4
    for row in result["summary"]:
        assert row["num_failed"] == 0
        assert all(
            row[name][0] > 0 for name in ("requests_per_s", "first_token_ms p50", "between_tokens_ms p99")
        )
