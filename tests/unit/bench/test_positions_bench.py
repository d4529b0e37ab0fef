"""The bench of positions runs on a CPU, kernels interpreted, and says what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("interpreted", [True, False])
def test_it_runs_without_a_gpu_and_writes_each_case(tmp_path: Path, interpreted: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    ended = subprocess.run(
        [sys.executable, "bench/positions.py", "--device", "cpu", "--quick", "--tokens", "2", "--rows", "1",
         "--budget-s", "0.01", "--commit", "abc", "--out", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        env=environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = tmp_path.glob("positions-*.json")
    result = json.loads(path.read_text())
    assert result["complete"]
    assert result["commit"] == "abc"
    records = result["records"]
    assert [(one["op"], one["num_tokens"]) for one in records] == [("apply_mrope", 2)] * 3 + [
        ("splice", 1)
    ] * 3
    for one in records:
        expected = {"torch", "engine", "copy"} | ({"kernel"} if interpreted else set())
        assert set(one["median_us"]) == expected
        assert all(value > 0 for value in one["median_us"].values())
        assert one["error"] <= 4e-3
        assert ("over_copy" in one) == ("over_torch" in one) == interpreted
    # Bytes of the floor: read and written once, elements that turn or rows with their levels.
    first, partial, _, spliced, *_ = records
    assert first["num_bytes"] == 2 * 2 * (32 + 8) * 128 * 4
    assert partial["num_bytes"] == 2 * 2 * (16 + 4) * 64 * 4
    assert spliced["num_bytes"] == 2 * 1 * 4096 * 4 * 4
    assert all(one["whole_us"]["torch"] > 0 for one in records[3:])
