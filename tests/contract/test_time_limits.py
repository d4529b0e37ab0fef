"""A test that hangs fails by itself, also when its clean-up hangs too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HANGS_TWICE = """
import threading
from tests import time_limits
time_limits.AGAIN_S = 0.5

def test_a():
    try:
        threading.Event().wait()
    finally:
        threading.Event().wait()
"""


@pytest.mark.extended
def test_a_clean_up_that_hangs_ends(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HANGS_TWICE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    plugins = ["-p", "tests.time_limits", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-q", "--timeout", "1", str(tmp_path)],
        cwd=tmp_path, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=90, check=False,
    )  # fmt: skip
    assert "1 failed" in ended.stdout
    assert "Failed: Timeout (>1.0s)" in ended.stdout
