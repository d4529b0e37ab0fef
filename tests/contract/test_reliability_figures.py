"""docs/reliability.md says what the soak's result file says, and the file passes the code's own rule."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chaos.soak_process import HELD, INTEGRITY
from tests.chaos.soak_verdict import BOUNDS, MIB, judge, judge_rests

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
(NAME,) = re.findall(r"<!-- figures: (\S+) -->", PAGE)
RESULT: dict[str, Any] = json.loads((ROOT / NAME).read_text())
SECTION = PAGE.partition(f"<!-- figures: {NAME} -->")[2].partition("\n## ")[0]


def series() -> dict[str, list[tuple[float, float]]]:
    seconds = RESULT["series"]["seconds"]
    return {
        name: list(zip(seconds, figures, strict=True))
        for name, figures in RESULT["series"].items()
        if name != "seconds"
    }


def test_it_is_an_hour_without_a_complaint() -> None:
    assert RESULT["plan"]["minutes"] >= 60
    assert RESULT["complaints"] == []
    assert RESULT["series"]["seconds"][-1] > 3500
    assert len(RESULT["rests"]) == RESULT["plan"]["num_rests"] == 6
    assert {"device", "versions", "commit", "date", "settings"} <= set(RESULT)


def test_its_samples_pass_the_rule_of_today() -> None:
    drifts, complaints = judge(series(), RESULT["plan"]["warm_up_s"])
    assert complaints == []
    assert judge_rests(RESULT["rests"], HELD) == []
    assert not any(rest[INTEGRITY] for rest in RESULT["rests"])
    for name, found in drifts.items():
        assert found.drift == pytest.approx(RESULT["drifts"][name]["drift"], rel=1e-6)


def test_a_leak_in_its_samples_would_be_seen() -> None:
    """What a call may leave behind at most: some hundreds of bytes."""
    leaking, calls = series(), series()["calls"]
    leaking["rss_bytes"] = [
        (at_s, figure + 1500 * made)
        for (at_s, figure), (_, made) in zip(leaking["rss_bytes"], calls, strict=True)
    ]
    (complaint,) = judge(leaking, RESULT["plan"]["warm_up_s"])[1]
    assert complaint.startswith("rss_bytes gained")


def test_the_table_is_the_files() -> None:
    rows = re.findall(r"^\| (.+) \|$", SECTION, re.MULTILINE)
    head, body = rows[0].split(" | "), [row.split(" | ") for row in rows[1:]]
    assert head[2] == f"gained in {RESULT['drifts']['rss_bytes']['measured_s']:.0f} s"
    expected = []
    for name in BOUNDS:
        unit = MIB if name.endswith("_bytes") else 1
        found = RESULT["drifts"][name]
        expected.append(
            [
                f"{found['level'] / unit:.0f}",
                f"{found['drift'] / unit:+.0f}",
                f"{found['allowed'] / unit:.0f}",
                f"{RESULT['rests'][0][name] / unit:.0f}",
                f"{RESULT['rests'][-1][name] / unit:.0f}",
            ]
        )
    assert [row[1:] for row in body] == expected


def test_the_counts_are_the_files() -> None:
    text, counts = " ".join(SECTION.split()), RESULT["counts"]
    for figure, what in (
        (RESULT["calls"], "calls"),
        (counts["bad inputs"], "of them bad inputs"),
        (counts["deadlines"], "past their deadline"),
        (counts["cancelled"], "cancelled"),
        (counts["leases run out"], "leases that ran out"),
        (counts["leases given back"], "given back"),
        (RESULT["num_kills"], "kills"),
        (len(RESULT["complaints"]), "complaints"),
    ):
        assert f"{figure:,} {what}" in text, what


def test_the_range_of_memory_is_the_files() -> None:
    kept = [figure for at_s, figure in series()["rss_bytes"] if at_s >= RESULT["plan"]["warm_up_s"]]
    low, high = (np.percentile(kept, share) / MIB for share in (5, 95))
    assert f"between {low:.0f} and {high:.0f} MiB" in SECTION
