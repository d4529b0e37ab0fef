"""Goodput from the times of requests, its tables and its picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.charts import draw
from bench.epd_figures import figures, goodput, summary, tables


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


def record(peer: str, rate: float, turn: int, fast: int, slow: int) -> dict[str, Any]:
    """Of a point with so many requests within all bounds, and within none."""
    requests = [[0, 100, 9, 9, 900, ""]] * fast + [[0, 900, 90, 9, 900, ""]] * slow
    about = {"mix": "chat", "rate": rate, "peer": peer, "round": turn, "requests_per_s": rate}
    return {**about, "gaps_ms": None, "cpu_ms": {"EngineCore": 5.0}, "encoder": {}, **figures(requests)}


RECORDS = [
    *(record("graphs", 10, turn, 10, 0) for turn in (0, 1)),
    record("graphs", 20, 0, 8, 2),
    record("graphs", 20, 1, 6, 4),
    *(record("mps", rate, turn, 10, 0) for rate in (10, 20) for turn in (0, 1)),
]


def test_a_table_has_the_goodput_of_each_peer_over_its_rounds() -> None:
    lines = tables({"records": RECORDS, "left_out": {"tp": "needs two GPUs"}}).splitlines()
    assert "| graphs | 12.5 to 15.0 | 12.5 to 15.0 | 12.5 to 15.0 |" in lines
    assert "| mps | over 20 | over 20 | over 20 |" in lines
    assert lines[-1] == "- tp: needs two GPUs"


def test_intervals_reach_from_the_least_to_the_greatest_round() -> None:
    rounds = [
        {**record("graphs", 20, turn, fast, 10 - fast), "requests_per_s": rate, "cpu_ms": {"EngineCore": cpu}}
        for turn, (fast, rate, cpu) in enumerate(((8, 19.0, 5.0), (5, 21.0, 9.0), (9, 18.0, 6.0)))
    ]
    row, _ = summary(rounds)
    assert row["requests_per_s"] == [19.0, 18.0, 21.0]
    assert row["within"] == {bound: [0.8, 0.5, 0.9] for bound in ("150/10", "250/15", "500/25")}
    assert row["cpu_ms"] == {"EngineCore": [6.0, 5.0, 9.0]}
    assert row["first_token_ms p99"] == [900, 900, 900]
    assert "| 20: graphs | 19.0 (18.0 to 21.0) |" in tables({"records": rounds, "left_out": {}})


def test_a_round_that_was_cut_short_has_no_goodput() -> None:
    """Its highest rate may be one that was not sent."""
    rows = summary([*RECORDS, record("graphs", 10, 2, 10, 0)])
    (row,) = [row for row in rows if "goodput" in row and row["peer"] == "graphs"]
    assert set(row["goodput"].values()) == {"12.5 to 15.0"}


def test_a_result_has_a_picture(tmp_path: Path) -> None:
    about = {
        "settings": {"engine": "vllm", "gpus": 1},
        "device": "a GPU",
        "date": "2026-01-01",
        "commit": "c",
    }
    result = {**about, "records": RECORDS, "summary": summary(RECORDS)}
    # As it is read from its file.
    path = draw("epd", json.loads(json.dumps(result)), tmp_path / "epd.png")
    assert path.read_bytes().startswith(b"\x89PNG")
