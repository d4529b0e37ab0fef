"""The bench that compares a vLLM with its own tower and one with an encoder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.epd import check_epd
from tests.engines.stack import Stack

pytestmark = pytest.mark.timeout(600)


@pytest.mark.extended
def test_epd_compares_both_servers(tmp_path: Path) -> None:
    check_epd(tmp_path, 2)


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True, scope="session")
def test_epd_compares_a_tower_with_a_running_server(family: str, stack: Stack, tmp_path: Path) -> None:
    """Which saves the start of a second vLLM and of an encoder."""
    check_epd(tmp_path, 2, "--running", "rows from the encoder", stack.vllm.url)
