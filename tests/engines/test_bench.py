"""The bench that compares a vLLM with its own tower and one with an encoder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.epd_rates import figures, goodput
from tests.engines.epd import check_epd, check_rates
from tests.engines.stack import Stack

pytestmark = pytest.mark.timeout(600)


@pytest.mark.extended
def test_epd_compares_both_servers(tmp_path: Path) -> None:
    check_epd(tmp_path, 2)


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True, scope="session")
def test_epd_compares_a_tower_with_a_running_server(family: str, stack: Stack, tmp_path: Path) -> None:
    """Which saves the start of a second vLLM and of an encoder."""
    check_epd(tmp_path, 2, "--running", "rows from the encoder", stack.vllm.url)


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True, scope="session")
def test_epd_finds_the_goodput_of_a_running_server(family: str, stack: Stack, tmp_path: Path) -> None:
    """For both names, so that no further server starts."""
    running = [("--running", name, stack.vllm.url) for name in ("its own tower", "rows from the encoder")]
    check_rates(tmp_path, *(word for words in running for word in words))


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({10: 1.0, 16: 0.95}, math.inf),
        ({10: 1.0, 16: 0.8}, 13),
        ({10: 0.8, 16: 0.95}, 0),
        ({16: 0.8, 10: 0.9, 22: 0.95}, 10),
    ],
    ids=[
        "beyond what was measured",
        "between two rates",
        "not the lowest one",
        "up to the first that misses",
    ],
)
def test_goodput_is_the_rate_up_to_which_enough_requests_are_within_the_bound(
    shares: dict[float, float], expected: float
) -> None:
    assert goodput(shares) == pytest.approx(expected)


def test_a_request_that_failed_is_within_no_bound() -> None:
    fast, slow, failed = [0, 100, 9, 9, 900, ""], [0, 100, 11, 11, 900, ""], [0, 0, 0, 0, 0, "503"]
    found = figures([fast, slow, failed, fast])
    assert found["within"] == {"150/10": 0.5, "250/15": 0.75, "500/25": 0.75}
    assert found["num_failed"] == 1
