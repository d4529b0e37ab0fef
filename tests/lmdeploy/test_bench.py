"""The bench that compares LMDeploy's own tower with rows from the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.epd import check_epd

pytestmark = [pytest.mark.timeout(600), pytest.mark.extended]


def test_epd_compares_both_servers(tmp_path: Path) -> None:
    check_epd(tmp_path, 2, "--engine", "lmdeploy")
