"""docs/vllm.md says what the result file of ``bench/epd.py`` says."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text().partition("## What it costs")[2]
(NAME,) = re.findall(r"<!-- figures: (\S+) -->", PAGE)
RESULT = json.loads((ROOT / NAME).read_text())
TOWER, SERVICE = "tower in vLLM", "rows from the service"
RECORDS = {(one["server"], one["requests_per_s"]): one for one in RESULT["records"]}


def test_the_table_is_the_files() -> None:
    (table,) = re.findall(r"((?:^\|.*\n)+)", PAGE, re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table.splitlines()[2:]]
    expected = []
    for rate in RESULT["settings"]["rates"]:
        pair = [RECORDS[server, rate] for server in (TOWER, SERVICE)]
        images = [one["image_first_token_ms"] for one in pair]
        expected.append(
            [
                f"{rate:g}",
                *(f"{one['answered_per_s']:.2f}" for one in pair),
                *(f"{image['p50']:.0f} ({image['p95']:.0f})" for image in images),
                *(f"{one['text_first_token_ms']['p50']:.0f}" for one in pair),
            ]
        )
    assert rows == expected


def test_the_words_are_the_files() -> None:
    """The machine was idle, and nothing failed."""
    assert RESULT["settings"]["load_average_before"][0] < 0.5
    assert all(one["num_failed"] == 0 for one in RESULT["records"])
    apart = [
        abs(RECORDS[SERVICE, rate]["answered_per_s"] / RECORDS[TOWER, rate]["answered_per_s"] - 1)
        for rate in RESULT["settings"]["rates"]
    ]
    assert f"Throughput is the same to {100 * max(apart):.1f} %" in PAGE
    later = {
        rate: RECORDS[SERVICE, rate]["image_first_token_ms"]["p50"]
        - RECORDS[TOWER, rate]["image_first_token_ms"]["p50"]
        for rate in RESULT["settings"]["rates"]
    }
    least, most = (round(figure, -1) for figure in (min(later.values()), max(later.values())))
    assert f"Images come {least:.0f} to {most:.0f} ms later" in PAGE
    text = [RECORDS[server, max(later)]["text_first_token_ms"]["p50"] for server in (SERVICE, TOWER)]
    assert f"at {max(later):g} requests/s ({text[0]:.0f} against {text[1]:.0f} ms)" in PAGE
    counts = {sum(not answer["with_image"] for answer in one["answers"]) for one in RESULT["records"]}
    assert f"With {min(counts)} to {max(counts)} text requests" in PAGE
