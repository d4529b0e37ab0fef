"""docs/video.md says what the result file of ``bench/video.py`` says."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "video.md").read_text().partition("## Measured")[2]
(NAME,) = re.findall(r"<!-- figures: (\S+) -->", PAGE)
RESULT = json.loads((ROOT / NAME).read_text())
FAMILIES = {"qwen3_vl": "Qwen3-VL", "qwen3_5": "Qwen3.5", "kimi_k25": "Kimi-K2.5"}


def test_the_table_is_the_files() -> None:
    (table,) = re.findall(r"((?:^\|.*\n)+)", PAGE, re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table.splitlines()[2:]]
    expected = []
    for record in RESULT["records"]:
        medians = record["medians_ms"]
        figures = (
            medians["ours_reading.open"] + medians["ours_reading.decode"],
            medians["reference.decode"],
            medians["ours_reading.resize"],
            medians["reference.process"],
            medians["ours.first_rows"],
            medians["ours.end_to_end"],
            medians["reference.end_to_end"],
        )
        expected.append([FAMILIES[record["family"]], *(f"{figure:,.0f}" for figure in figures)])
    assert rows == expected


def test_the_words_are_the_files() -> None:
    settings = RESULT["settings"]
    assert f"{settings['seconds']:.0f} s of 720p H.264 at {settings['fps']} frames a second" in PAGE
    assert (settings["height"], settings["codec"], settings["dtype"]) == (720, "h264", "float32")
    for record in RESULT["records"]:
        medians = record["medians_ms"]
        reference = medians["reference.decode"] + medians["reference.process"]
        assert f"{record['num_frames']} frames sampled" in PAGE
        assert medians["ours_reading.read_alone"] < 0.5 * reference
        assert record["relative_error"] < 1.15e-6
        assert medians["ours.first_rows"] < medians["ours.end_to_end"]
