"""The bench that compares LMDeploy's own tower with rows from the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.epd import check_epd

pytestmark = [pytest.mark.timeout(600), pytest.mark.extended]


def test_epd_compares_the_tower_with_both_ways_of_rows(tmp_path: Path) -> None:
    peers = ("--peers", "tower", "beside", "host")
    ways = check_epd(tmp_path, 3, "--engine", "lmdeploy", *peers)["groups"][0]["rows_come_by"]
    assert not ways["tower"]
    assert all(any(line.startswith("rows come by host:") for line in ways[name]) for name in peers[2:])
