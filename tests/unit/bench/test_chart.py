"""Charts of the tower bench from results alone."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import chart
import numpy as np
import pytest
from cases import CASES
from padding_load import padding_under_load
from PIL import Image

ROOT = Path(__file__).resolve().parents[3]
RECORDED = sorted((ROOT / "bench" / "results").glob("tower-*.json"))


@pytest.fixture
def result() -> dict[str, Any]:
    records = [
        {
            "family": family,
            "case": case,
            "variant": variant,
            "median_ms": 2.0 + number + place,
            "useful_tflops": 400.0 / (1 + number),
            "padding_share": 0.0,
        }
        for family in ("qwen3_vl", "kimi_k25")
        for place, case in enumerate(CASES)
        for number, variant in enumerate(chart.STYLES)
        if (variant, case) != ("ref_compiled", "clip")
    ]
    return {
        "date": "2026-11-20T00:00:00",
        "device": "NVIDIA H200",
        "commit": "abc",
        "complete": True,
        "versions": {"torch": "2.11.0"},
        "settings": {"size": "full", "dtype": "bfloat16"},
        "ceilings": {"matmul_tflops": 790.0},
        "padding": padding_under_load(max_patches=8192, max_items=16, seed=0, num_images=60),
        "records": records,
    }


def test_a_full_result_makes_a_picture(result: dict[str, Any], tmp_path: Path) -> None:
    before = copy.deepcopy(result)
    path = chart.draw(result, tmp_path / "chart.png")
    with Image.open(path) as picture:
        assert picture.width > 1000
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3).astype(np.int64)
    colours = set(np.unique(pixels @ (1 << 16, 1 << 8, 1)).tolist())
    for _, colour, _ in chart.STYLES.values():
        assert int(colour[1:], 16) in colours, colour
    assert result == before


@pytest.mark.skipif(not RECORDED, reason="no recorded results")
def test_the_oldest_recorded_result_can_be_drawn_again(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "bench/chart.py", str(RECORDED[0]), "--out", str(tmp_path / "a.png")],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width > 1000


def test_floor_is_the_useful_work_at_the_measured_rate(result: dict[str, Any]) -> None:
    record = {"median_ms": 10.0, "useful_tflops": 395.0}
    assert chart.floor_ms(record, result) == pytest.approx(5.0)


def test_patches_of_results_that_do_not_have_them_follow_from_the_case() -> None:
    assert chart.patches_of({"case": "32x448"}) == 32 * 28 * 28
    assert chart.patches_of({"case": "clip", "num_patches": 7}) == 7


def test_a_run_that_was_cut_short_says_so(result: dict[str, Any]) -> None:
    assert "cut short" not in chart.title_of(result)
    assert "cut short" in chart.title_of(result | {"complete": False})


def test_a_result_without_records_is_refused(result: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 records"):
        chart.draw(result | {"records": []}, tmp_path / "chart.png")


def test_without_matplotlib_the_message_says_what_to_do(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(chart.NoMatplotlib, match="pip install matplotlib"):
        chart.draw(result, tmp_path / "chart.png")


def test_recorded_results_are_json_with_records() -> None:
    for path in RECORDED:
        assert json.loads(path.read_text())["records"], path.name
