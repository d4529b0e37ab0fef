"""The bench that compares SGLang's ways to rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.epd import check_epd

pytestmark = [pytest.mark.timeout(600), pytest.mark.extended]


def test_epd_compares_all_servers(tmp_path: Path) -> None:
    check_epd(tmp_path, 4, "--engine", "sglang")
