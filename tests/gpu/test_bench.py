"""The tower bench on a GPU: every variant that can run does, in one case of a small tower."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from encoder_service.towers.attention.fa3 import INTERFACES

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
HAS_FA3 = any(importlib.util.find_spec(name) for name in INTERFACES)


@pytest.mark.parametrize("family", ["qwen3_vl", "kimi_k25"])
def test_every_variant_runs_and_is_profiled(family: str, tmp_path: Path) -> None:
    expected = {"ref_sdpa", "plain", "fused", "graph", "graph_torch"}
    if HAS_FA3:
        expected |= {"ref_fa3", "ref_fa3_graph"}
    ended = subprocess.run(
        [sys.executable, "-m", "bench.tower", "--quick", "--size", "small", "--cases", "1x448", "--profile",
         "--families", family, "--variants", *sorted(expected), "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto"), *sys.path])},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = tmp_path.glob("tower-*.json")
    result = json.loads(path.read_text())
    assert result["complete"], result["left_out"]
    records = {one["variant"]: one for one in result["records"]}
    assert set(records) == expected, result["left_out"]
    assert 0 < records["graph"]["host_us"] < 1e5
    (gain,) = result["gains"]
    assert gain["ratio"] == records["graph_torch"]["median_ms"] / records["graph"]["median_ms"]
    errors = {one["variant"]: one["relative_error"] for one in result["accuracy"]}
    assert max(errors.values()) < 5e-2, errors
    (profile,) = result["profile"]
    assert 0 <= profile["idle_share"] < 1
    groups = {row["name"] for row in profile["groups"]}
    assert {"attention", "products", "norms", "rope"} <= groups, groups
