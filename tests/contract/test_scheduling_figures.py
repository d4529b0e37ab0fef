"""docs/scheduling.md says what its result file and the code say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from encoder_service.scheduler.fair_queue import AGING_BATCHES
from encoder_service.scheduler.planner import LOOK_AHEAD, MAX_PASSES, SURE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "scheduling.md").read_text()
(RESULT_NAME,) = re.findall(r"<!-- figures: (\S+) -->", PAGE)
RESULT: dict[str, Any] = json.loads((ROOT / RESULT_NAME).read_text())
RECORDS = {(one["scenario"], one["policy"]): one for one in RESULT["records"]}
SHARING = {
    "small tenant beside a flood: p50, ms": ("flood", "small", "p50_ms", ".0f"),
    "small tenant beside a flood: p99, ms": ("flood", "small", "p99_ms", ".0f"),
    "small tenant beside a flood: slowdown": ("flood", "small", "slowdown", ".1f"),
    "high priority: p99, ms": ("priorities", "high", "p99_ms", ".0f"),
    "low priority: p99, ms": ("priorities", "low", "p99_ms", ".0f"),
    "low priority: longest, ms": ("priorities", "low", "max_ms", ".0f"),
    "deadlines: in time": ("deadlines", "all", "in_time_share", ".1%"),
    "huge: longest wait over own time": ("huge among small", "huge", "most_wait_over_own_cost", ".1f"),
}


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, its head first."""
    _, _, rest = PAGE.partition(heading)
    (table,) = re.findall(r"((?:^\|.*\n)+)", rest, re.MULTILINE)[:1]
    lines = [[cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in table.splitlines()]
    return [lines[0], *lines[2:]]


@pytest.mark.parametrize(
    ("heading", "form"),
    [
        ("### Latency", "{p50_ms:.0f} / {p99_ms:.0f}"),
        ("### Items per second", "{items_per_s:.1f}, {waste_share:.1%}"),
    ],
)
def test_the_policies_figures_are_those_of_the_file(heading: str, form: str) -> None:
    head, *rows = rows_under(heading)
    assert len(rows) == 6
    for scenario, *cells in rows:
        for policy, cell in zip(head[1:], cells, strict=True):
            assert cell == form.format(**RECORDS[scenario, policy])


def test_the_figures_of_sharing_are_those_of_the_file() -> None:
    policies, *rows = rows_under("### Tenants")
    assert [row[0] for row in rows] == list(SHARING)
    for label, *cells in rows:
        scenario, stream, name, form = SHARING[label]
        for policy, cell in zip(policies[-4:], cells, strict=True):
            assert cell == format(RECORDS[scenario, policy]["streams"][stream][name], form)


def test_planning_times_are_those_of_the_file() -> None:
    _, *rows = rows_under("## What planning costs")
    expected = [
        [one["sizes"], str(one["namespaces"]), f"{one['median_us']:.0f}", f"{one['p90_us']:.0f}"]
        for one in RESULT["planner_us"]
        if one["deadlines"]
    ]
    assert rows == expected


def test_the_bounds_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    for sentence in (
        f"{LOOK_AHEAD} items beyond those that fit are looked at (`LOOK_AHEAD`)",
        f"late when {SURE:.0%}".replace("%", " %") + " (`SURE`)",
        f"in at most {MAX_PASSES} batches (`MAX_PASSES`)",
        f"more than {MAX_PASSES + 2} full batches (`MAX_PASSES` + 2)",
        f"after every {AGING_BATCHES} batches (`AGING_BATCHES`)",
        f"once within {AGING_BATCHES + 1} (n - 1) batches",
    ):
        assert sentence in text


def test_its_pictures_and_the_settings_that_it_names_are_there() -> None:
    for name in re.findall(r"!\[[^]]*\]\((\S+)\)", PAGE):
        assert (ROOT / "docs" / name).stat().st_size > 10_000
    assert RESULT["settings"]["tower"] in PAGE
    assert RESULT["settings"]["padding"] in PAGE
