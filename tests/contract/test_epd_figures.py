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


def test_the_slower_runs_are_as_said() -> None:
    text = " ".join(PAGE.split())

    def image_ms(number: int) -> tuple[list[float], list[float], list[float]]:
        """By rate: of the tower in vLLM, of the service, and the share of answers that the service lost."""
        run = json.loads((ROOT / NAME.replace(".json", f"-{number}.json")).read_text())
        assert all(one["num_failed"] == 0 for one in run["records"])
        found = {(one["server"], one["requests_per_s"]): one for one in run["records"]}
        rates = run["settings"]["rates"]
        medians = [[found[s, r]["image_first_token_ms"]["p50"] for r in rates] for s in (TOWER, SERVICE)]
        lost = [1 - found[SERVICE, r]["answered_per_s"] / found[TOWER, r]["answered_per_s"] for r in rates]
        return medians[0], medians[1], lost

    (one, by_one, lost), (other, by_other, lost_too) = image_ms(2), image_ms(3)
    first = RECORDS[TOWER, 0.5]["image_first_token_ms"]["p50"]
    assert f"itself took {one[0]:.0f} and {other[0]:.0f} ms, where {first:.0f} stand above" in text
    words = "{:.0f}, {:.0f} and {:.0f} ms in the one (tower in vLLM: {:.0f}, {:.0f}, {:.0f})"
    assert words.format(*by_one, *one) in text
    assert "{:.0f}, {:.0f} and {:.0f} in the other ({:.0f}, {:.0f}, {:.0f})".format(*by_other, *other) in text
    assert f"lower by up to {100 * max(lost + lost_too):.0f} %" in text
    ((before,), (by_before,), _), ((after,), (by_after,), _) = image_ms(4), image_ms(5)
    assert f"took {by_before:.0f} ms ({before:.0f}) and the later one {by_after:.0f} ({after:.0f})" in text
