"""docs/video.md says what the result file of ``bench/video.py`` says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "video.md").read_text().partition("## Measured")[2]
NAMES = re.findall(r"<!-- figures: (\S+) -->", PAGE)
RESULTS = [json.loads((ROOT / name).read_text()) for name in NAMES]
FAMILIES = {"qwen3_vl": "Qwen3-VL", "qwen3_5": "Qwen3.5", "kimi_k25": "Kimi-K2.5"}


@pytest.mark.parametrize("number", range(len(NAMES)))
def test_the_tables_are_the_files(number: int) -> None:
    tables = re.findall(r"((?:^\|.*\n)+)", PAGE, re.MULTILINE)
    assert len(tables) == len(NAMES) == 2
    table = tables[number]
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table.splitlines()[2:]]
    expected = []
    result = RESULTS[number]
    for record in result["records"]:
        medians = record["medians_ms"]
        figures = (
            medians["ours_reading.open"] + medians["ours_reading.decode"],
            medians["reference.decode"],
            medians["ours_reading.resize"],
            medians["reference.process"],
            medians["ours.first_rows"],
            medians["ours.end_to_end"],
            *([medians["ours_shared.end_to_end"]] if result["device"] == "NVIDIA H200" else []),
            medians["reference.end_to_end"],
        )
        expected.append([FAMILIES[record["family"]], *(f"{figure:,.0f}" for figure in figures)])
    assert rows == expected


def test_the_words_are_the_files() -> None:
    for result in RESULTS:
        settings = result["settings"]
        assert f"{settings['seconds']:.0f} s of 720p H.264 at {settings['fps']} frames a second" in PAGE
        assert (settings["height"], settings["codec"]) == (720, "h264")
        assert all(f"{record['num_frames']} frames sampled" in PAGE for record in result["records"])
    on_cpu, on_gpu = RESULTS
    assert (on_cpu["settings"]["dtype"], on_gpu["settings"]["dtype"]) == ("float32", "bfloat16")
    for record in on_cpu["records"]:
        medians = record["medians_ms"]
        reference = medians["reference.decode"] + medians["reference.process"]
        assert medians["ours_reading.read_alone"] < 0.5 * reference
        assert record["relative_error"] < 1.15e-6
        assert medians["ours.first_rows"] < medians["ours.end_to_end"]
    records = {record["family"]: record for record in on_gpu["records"]}
    assert set(records) == set(FAMILIES)
    assert (on_gpu["device"], on_gpu["num_threads"]) == ("NVIDIA H200", 16)
    num_rows = records["qwen3_vl"]["num_rows"]
    assert f"{num_rows:,} rows" in PAGE
    assert f"{num_rows * 4 * 4096 * 2 / 1e6:.0f} MB" in PAGE
    kimi = records["kimi_k25"]
    _, height, width = kimi["grid_thw"]
    assert f"four frames at once, {4 * height * width:,} of them" in PAGE
    assert f"{kimi['medians_ms']['reference.tower']:,.0f}" in PAGE
    earlier = json.loads((ROOT / "bench/results/video-nvidia-h200-2026-11-23-2.json").read_text())
    assert (earlier["device"], earlier["num_threads"]) == ("NVIDIA H200", 32)
    reading = [record["medians_ms"] for record in earlier["records"]]
    took = [one["ours_reading.open"] + one["ours_reading.decode"] for one in reading]
    words = f"with the 8 threads of a machine of 32 cores it took {min(took):.0f} to {max(took):.0f}"
    assert words in " ".join(PAGE.split())
