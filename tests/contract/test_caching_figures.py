"""docs/caching.md says what its result files and the code say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from encoder_service.config import Settings
from encoder_service.store.shared_tier import MAX_LOOKS
from encoder_service.store.shared_tier_breaker import MAX_IN_WINDOW, MAX_RUN, WINDOW
from encoder_service.store.shared_tier_server import PIECE_BYTES, PIECES_AT_ONCE
from encoder_service.store.use_order import PROBATION_PART, YOUNG_PART

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "caching.md").read_text()
POLICIES, TIER = (
    json.loads((ROOT / name).read_text()) for name in re.findall(r"<!-- figures: (\S+) -->", PAGE)
)
RATES: dict[tuple[str, float, str], float] = {
    (one["mix"], one["cache_share"], one["policy"]): 100 * one["patch_hit_rate"]
    for one in POLICIES["records"]
}


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, its head first."""
    _, _, rest = PAGE.partition(heading)
    (table,) = re.findall(r"((?:^\|.*\n)+)", rest, re.MULTILINE)[:1]
    lines = [[cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in table.splitlines()]
    return [lines[0], *lines[2:]]


def test_hit_rates_are_those_of_the_file() -> None:
    (_, *policies), *rows = rows_under("### Hit rates with a cache of 10 %")
    assert [mix for mix, *_ in rows] == list(POLICIES["mixes"])
    assert {"lru", "service", "farthest"} < set(policies)
    for mix, *cells in rows:
        assert cells == [f"{RATES[mix, 0.1, policy]:.1f}" for policy in policies]


def gains(policy: str) -> list[float]:
    return [rate - RATES[mix, share, "lru"] for (mix, share, found), rate in RATES.items() if found == policy]


def test_gains_are_those_of_the_file() -> None:
    for policy, *cells in rows_under("### Against least recently used")[1:]:
        found = gains(policy)
        assert cells == [f"{figure:+.1f}" for figure in (fmean(found), min(found), max(found))]


def test_the_policy_in_use_is_the_one_that_the_page_argues_for() -> None:
    """Above LRU on the average, and close to it where it is best."""
    assert fmean(gains("service")) > 2.5
    assert min(gains("service")) > -2.5
    for rejected in ("sieve", "s3-fifo", "slru", "tinylfu", "arc"):
        assert min(gains(rejected)) < min(gains("service"))


def test_times_and_ratios_are_those_of_the_file() -> None:
    times: list[dict[str, Any]] = TIER["times"]
    assert rows_under("### What it costs")[1:] == [
        [f"{one['mib']}", f"{one['write_ms']:.1f}", f"{one['hit_ms']:.1f}", f"{one['miss_ms']:.2f}"]
        for one in times
    ]
    assert rows_under("Rows are not compressed")[1:] == [
        [
            one["codec"],
            one["order"],
            f"{one['ratio']:.2f}",
            f"{one['compress_mib_s']:.0f}",
            f"{one['decompress_mib_s']:.0f}",
        ]
        for one in TIER["compression"]
    ]


def test_constants_and_settings_are_the_codes() -> None:
    assert (PROBATION_PART, YOUNG_PART) == (1 / 3, 0.1)
    assert f"{MAX_RUN} failures in a row or {MAX_IN_WINDOW} of the last {WINDOW}" in PAGE
    assert f"At most {MAX_LOOKS} looks" in PAGE
    assert PIECE_BYTES == 1 << 19
    assert f"then {PIECES_AT_ONCE} at a time" in PAGE
    shared = {name for name in Settings.model_fields if name.startswith("shared_")}
    assert {cells[0].strip("`") for cells in rows_under("It is for several encoders")[1:]} == shared
