"""A small lease storm on host memory, and that it finds the defects it is there for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.lease_storm_processes import can_isolate

ROOT = Path(__file__).resolve().parents[2]


def storm(*arguments: object, timeout_s: float = 100) -> tuple[int, dict[str, Any]]:
    """The exit code and the report."""
    paths = [str(ROOT), str(ROOT / "proto"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.chaos.lease_storm",
            "--limit-s",
            str(timeout_s - 10),
            *map(str, arguments),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    report: dict[str, Any] = json.loads(lines[-1])
    if done.returncode:
        report["stderr"] = done.stderr[-4000:]
        print(done.stderr[-4000:])  # pytest shows it when the test fails
    return done.returncode, report


@pytest.mark.parametrize("isolated", [False, True], ids=["one host", "as pods"])
def test_p21_p25_a_storm_with_kills_on_both_sides(isolated: bool) -> None:
    """No leak, no stale read accepted, integrity holds, and every reader maps each new encoder by itself."""
    if isolated and not can_isolate():
        pytest.skip("new PID and IPC namespaces are not permitted here")
    code, report = storm(
        "--operations", 20_000, "--readers", 2, "--grpc-clients", 1, "--reader-kills", 5,
        "--encoder-kills", 5, *(("--isolate",) if isolated else ()),
    )  # fmt: skip
    assert (code, report["failures"]) == (0, []), report
    assert report["operations"] >= 20_000
    assert report["kills"] == {"readers": 5, "encoder": 5}
    assert report["restarts"] == 5
    # Both low-level readers map each of six encoders, the client at least the first and the last.
    assert report["remaps"] >= 2 * 6 + 2
    assert report["stale_accepted"] == 0
    assert report["reads_by_directory"] > report["stale_by_directory"] > 0
    assert report["leaks"] == {"leases": 0, "slots": 0, "bytes": 0}
    assert set(report["descriptors"]) == {"encoder", "reader 0", "reader 1", "reader 2"}


@pytest.mark.parametrize("num_readers", [1, 4])
def test_p21_readers_that_share_leases(num_readers: int) -> None:
    """With one reader process nobody is there to be the other ranks; with four they read each other's."""
    code, report = storm(
        "--operations", 6_000, "--readers", num_readers, "--grpc-clients", 0, "--reader-kills", 1,
        "--encoder-kills", 1,
    )  # fmt: skip
    if num_readers == 1:
        assert report["failures"] == ["the storm was too calm: reads_shared_by_ranks is 0"]
    else:
        assert (code, report["failures"]) == (0, []), report


@pytest.mark.parametrize("defect", ["returns", "late"])
def test_p21_a_generation_that_fails_its_purpose_is_found(defect: str) -> None:
    """A slot's generation that comes back, or that changes after the first byte of the next tenant."""
    code, report = storm(
        "--operations", 20_000, "--readers", 2, "--grpc-clients", 0, "--reader-kills", 0,
        "--encoder-kills", 0, "--reads", 6000, "--sabotage", defect,
    )  # fmt: skip
    assert code == 1
    assert report["stale_accepted"] > 0
    assert f"{report['stale_accepted']} accepted reads had rows of another tenant" in report["failures"]


def test_p21_leases_that_outlive_their_connection_are_found() -> None:
    code, report = storm(
        "--operations", 2_000, "--readers", 1, "--grpc-clients", 1, "--reader-kills", 1,
        "--encoder-kills", 0, "--sabotage", "keeps",
    )  # fmt: skip
    assert code == 1
    assert report["leaks"]["leases"] > 0
    assert report["leaks"]["bytes"] > 0
    assert f"{report['leaks']['leases']} leases leaked" in report["failures"]
