"""The bench that compares SGLang's ways to rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.epd import check_epd

pytestmark = [pytest.mark.timeout(600), pytest.mark.extended]


def test_epd_compares_all_servers(tmp_path: Path) -> None:
    ways = check_epd(tmp_path, 4, "--engine", "sglang")["groups"][0]["rows_come_by"]
    assert len(ways) == 4
    assert all("'mm_feature_transport': 'cpu'" in lines for lines in ways.values())
    assert any(line.startswith("rows come by host:") for line in ways["beside"])
