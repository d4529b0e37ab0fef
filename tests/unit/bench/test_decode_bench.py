"""The bench of decoders runs on a CPU with the host's alone, and says what it measured."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import decode
import pytest
import torch
from PIL import Image

from encoder_service.ingest import nvjpeg
from encoder_service.ingest.device_decode import DeviceDecoding
from tests.unit.ingest.test_device_decode import Stand

ROOT = Path(__file__).resolve().parents[3]


def test_it_runs_without_a_gpu_and_writes_each_case(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "bench/decode.py", "--device", "cpu", "--quick", "--threads", "1", "2",
         "--commit", "abc", "--out", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = tmp_path.glob("decode-cpu-*.json")
    result = json.loads(path.read_text())
    assert result["complete"]
    assert result["commit"] == "abc"
    assert result["num_cores"] >= 1
    assert set(result["left_out"]) == {"cuda", "hardware"}
    assert "needs a CUDA device, this is cpu" in result["left_out"]["cuda"]
    records = result["records"]
    assert [(one["size"], one["variant"], one["num_threads"]) for one in records] == [
        (size, "host", threads) for size in ("448", "1024") for threads in (1, 2)
    ]
    for one in records:
        assert one["num_images"] >= 2 * one["num_threads"]
        assert one["from_host"] is None
        assert one["file_bytes"] * 8 > one["height"] * one["width"] / 2, "a photograph has some bits a pixel"
        assert 0 < one["cpu_ms_per_image"] < 1e4
        assert one["ms_per_image"] == pytest.approx(1e3 * one["num_threads"] / one["images_per_s"], rel=0.5)
    assert "images/s" in ended.stdout


def test_photographs_are_in_420_and_differ() -> None:
    one, other = (decode.photograph(90, 120, seed) for seed in (1, 2))
    assert one != other == decode.photograph(90, 120, 2)
    with Image.open(io.BytesIO(one)) as picture:
        assert picture.size == (120, 90)
        assert picture.layer[0][1:3] == (2, 2)  # type: ignore[attr-defined]


def test_a_device_is_compared_with_the_host_and_what_cannot_open_has_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stands = {"cuda": Stand(), "hardware": Stand(lambda data: False)}

    def open_stand_in(device: torch.device, engine: str) -> DeviceDecoding:
        return stands[engine].decoding

    monkeypatch.setattr(nvjpeg, "open_nvjpeg", open_stand_in)
    found, left_out = decode.open_variants(torch.device("cuda:0"), ["host", "cuda", "hardware"])
    assert found == {"host": None, "cuda": stands["cuda"].decoding}
    assert list(left_out) == ["hardware"]
    assert "refuses a probe image" in left_out["hardware"]
    files = [decode.photograph(60, 50, seed) for seed in range(3)]
    near = decode.distances(files, stands["cuda"].decoding)
    assert (near["mean"], near["near_share"], near["max"]) == (1.0, 1.0, 1)
    assert near["places"]["device"] == 3
    with ThreadPoolExecutor(2) as pool:
        taken = decode.sample(files, stands["cuda"].decoding, 2, pool, 0.01)
    assert taken.num_images >= 2
    assert taken.wall_s >= 0.01
    assert stands["cuda"].decoding.counts["device"] == 3 + taken.num_images
