"""A test that hangs fails by itself, also when it is run again and when its clean-up hangs too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HANGS = "import threading\n\ndef test_a():\n    threading.Event().wait()\n"
HANGS_TWICE = """
import threading

def test_a():
    try:
        threading.Event().wait()
    finally:
        threading.Event().wait()
"""
IN_TIME_LATER = """
import threading, time, pytest
attempts = []

def test_a():
    attempts.append(1)
    threading.Event().wait(None if len(attempts) == 1 else 0)

@pytest.mark.timeout(60)
def test_b():
    time.sleep(1.5)
"""
QUICK = "from tests import time_limits\ntime_limits.AGAIN_S = 0.5\n"


def run(folder: Path, source: str, *options: str, expected: int = 1) -> str:
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.time_limits", "-p", "no:cacheprovider",
         "-p", "no:xdist", "-q", "--timeout", "1", *options, str(folder)],
        cwd=folder, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=90,
        check=False,
    )  # fmt: skip
    assert ended.returncode == expected, ended.stdout + ended.stderr
    return ended.stdout


def test_a_test_that_hangs_again_when_it_is_run_again(tmp_path: Path) -> None:
    """pytest-timeout alone sets its alarm for the first attempt."""
    said = run(tmp_path, HANGS, "--reruns", "1")
    assert "1 failed, 1 rerun" in said
    assert "Failed: Timeout (>1.0s)" in said


def test_a_clean_up_that_hangs(tmp_path: Path) -> None:
    assert "1 failed" in run(tmp_path, QUICK + HANGS_TWICE)


def test_what_is_in_time_the_second_time_has_passed_and_its_alarm_is_off(tmp_path: Path) -> None:
    said = run(tmp_path, IN_TIME_LATER, "--reruns", "1", expected=0)
    assert "2 passed, 1 rerun" in said
