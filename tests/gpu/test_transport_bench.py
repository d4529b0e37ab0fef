"""The transport bench on a GPU: rows by device lease from a whole service, with one GPU and with two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


def test_rows_come_by_device_lease_and_are_held_against_plain_copies(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "bench/transport.py", "--quick", "--paths", "device_same_gpu", "device_nvlink",
         "--sizes-mib", "0.4", "3", "--resident-mib", "64", "--time-limit-s", "120", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto"), *sys.path])},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = tmp_path.glob("transport-*.json")
    result = json.loads(path.read_text())
    expected = {"device_same_gpu"}
    if torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(1, 0):
        expected.add("device_nvlink")
    assert {one["path"] for one in result["records"]} == expected, result["left_out"]
    for record in result["records"]:
        # Other tests use the device meanwhile: how the two compare is the recorded run's to tell.
        assert record["median_ms"] > 0
        assert record["floor_ms"] > 0
        if record["concurrency"] == 1:
            assert record["copy_ms"] > 0
            assert record["floor_device_ms"] > 0
            # The quickest of each has had the device and the cores to itself.
            assert 0 < record["min_ms"] < record["socket_min_ms"] < record["grpc_min_ms"], record
