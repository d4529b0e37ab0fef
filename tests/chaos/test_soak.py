"""The soak's rule on figures that leak and on figures that do not, and a short soak."""

from __future__ import annotations

import math
import os
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.chaos.soak import Plan, Soak
from tests.chaos.soak_process import HELD, seen_from_outside
from tests.chaos.soak_verdict import BOUNDS, MIB, MIN_SAMPLES, Bound, drift_of, judge, judge_rests

HOUR_S = 3600.0
WARM_UP_S = HOUR_S / 3
LEVEL = 450 * MIB


def hour(figure: Callable[[float], float]) -> list[tuple[float, float]]:
    return [(6.0 * number, figure(6.0 * number)) for number in range(601)]


def noise(rng: random.Random) -> float:
    """What load that varies does to memory: up to 30 MiB, and a burst now and then."""
    return rng.uniform(0, 30 * MIB) + (200 * MIB if rng.random() < 0.05 else 0)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(random.SystemRandom().randrange(1 << 30))


def test_noise_and_bursts_about_a_level_are_flat(rng: random.Random) -> None:
    found = drift_of(hour(lambda _: LEVEL + noise(rng)), BOUNDS["rss_bytes"], WARM_UP_S)
    assert found.is_flat
    assert abs(found.drift) < found.allowed / 2


def test_what_fills_while_it_warms_up_is_flat(rng: random.Random) -> None:
    def warming(at_s: float) -> float:
        return LEVEL + 100 * MIB * (1 - math.exp(-at_s / 300)) + noise(rng)

    assert drift_of(hour(warming), BOUNDS["rss_bytes"], WARM_UP_S).is_flat
    assert not drift_of(hour(warming), BOUNDS["rss_bytes"], 0).is_flat, "the warm-up is what is left out"


def test_a_kilobyte_for_each_of_thirty_calls_a_second_is_found_under_the_noise(rng: random.Random) -> None:
    leak_s = 30 * 1024
    found = drift_of(hour(lambda at_s: LEVEL + leak_s * at_s + noise(rng)), BOUNDS["rss_bytes"], WARM_UP_S)
    assert not found.is_flat
    assert found.drift == pytest.approx(leak_s * (HOUR_S - WARM_UP_S), rel=0.2)
    assert found.per_hour == pytest.approx(leak_s * HOUR_S, rel=0.2)


def test_a_descriptor_every_four_minutes_is_found(rng: random.Random) -> None:
    def leaking(at_s: float) -> float:
        return 32 + at_s // 240 + rng.choice((0, 0, 0, 1, 5))

    found = drift_of(hour(leaking), BOUNDS["descriptors"], WARM_UP_S)
    assert not found.is_flat
    assert drift_of(hour(lambda _: 32 + rng.choice((0, 1, 5))), BOUNDS["descriptors"], WARM_UP_S).is_flat


def test_what_falls_is_flat() -> None:
    assert drift_of(hour(lambda at_s: LEVEL - 1000 * at_s), Bound(0), WARM_UP_S).is_flat


def test_too_few_samples_are_no_verdict() -> None:
    points = [(float(number), 1.0) for number in range(MIN_SAMPLES + 3)]
    drift_of(points, Bound(1), 4.0 - 1.0)
    with pytest.raises(
        ValueError, match=f"{MIN_SAMPLES - 1} samples after 4 s of warm-up, needs {MIN_SAMPLES}"
    ):
        drift_of(points, Bound(1), 4.0)


def test_a_complaint_names_both_figures() -> None:
    series = {name: hour(lambda _: 10.0) for name in BOUNDS}
    assert judge(series, WARM_UP_S)[1] == []
    series["threads"] = hour(lambda at_s: 10 + at_s / 600)
    (complaint,) = judge(series, WARM_UP_S)[1]
    assert complaint.startswith("threads gained 4 in 2400 s after the warm-up, at most 2 at a level of 14")


def rest(**figures: float) -> dict[str, float]:
    return {**dict.fromkeys(HELD, 0.0), "descriptors": 32.0, "threads": 15.0, **figures}


@pytest.mark.parametrize(
    ("rests", "complaint"),
    [
        ([rest(), rest(ve_queued_bytes=2), rest()], "ve_queued_bytes is 2 at rest 1"),
        ([rest(ve_encodes_in_flight=1), rest()], "ve_encodes_in_flight is 1 at rest 0"),
        ([rest(), rest(descriptors=37)], "descriptors at rest went from 32 to 37, at most 36"),
        ([rest(), rest(threads=18)], "threads at rest went from 15 to 18, at most 17"),
    ],
)
def test_what_is_left_at_rest_is_said(rests: Sequence[dict[str, float]], complaint: str) -> None:
    assert judge_rests([rest(), rest(descriptors=36)], HELD) == []
    (found,) = judge_rests(rests, HELD)
    assert found.startswith(complaint)


def test_a_process_is_seen_from_outside() -> None:
    before = seen_from_outside(os.getpid())
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    with open(os.devnull):
        after = seen_from_outside(os.getpid())
    go_on.set()
    thread.join()
    assert after["threads"] == before["threads"] + 1
    assert after["descriptors"] == before["descriptors"] + 1
    assert 0 < after["pss_bytes"] <= after["rss_bytes"]


@pytest.mark.extended
def test_p21_p33_a_short_soak_is_flat() -> None:
    """Half a minute finds leaks by the call: nothing is held at rest, and memory gains no more than caches
    that still fill."""
    plan = Plan(0.5, random.SystemRandom().randrange(1 << 30), num_rests=2, kill_every_s=6.0)
    bounds = {**BOUNDS, "rss_bytes": Bound(96 * MIB), "pss_bytes": Bound(96 * MIB)}
    with tempfile.TemporaryDirectory(prefix="ve-soak-") as folder:
        result = Soak(plan, Path(folder), bounds).run()
    assert result["complaints"] == [], f"seed {plan.seed}"
    assert result["num_kills"] >= 3
    counts = result["counts"]
    for what in ("rows host", "rows miss", "pixels", "bad inputs", "deadlines", "cancelled", "slow readers"):
        assert counts.get(what), f"no {what}: {counts}"
    assert result["calls"] > 100
