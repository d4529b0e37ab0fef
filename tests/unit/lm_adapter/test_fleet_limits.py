"""What bounds a fleet client: its settings, its retry budget, and what it takes for late."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_adapter.errors import InvalidRequest
from lm_adapter.fleet import FleetSettings
from lm_adapter.fleet.budget import WINDOW_S, RetryBudget
from lm_adapter.fleet.latency import MIN_SAMPLES, Latencies


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_attempts": 0}, "max_attempts is 0, 1 to 32"),
        ({"retry_share": -0.1}, "retry_share is -0.1, 0 to 10"),
        ({"refresh_s": float("nan")}, "refresh_s is nan"),
        ({"hedge_min_s": 2.0, "hedge_max_s": 1.0}, "hedge_min_s is 2.0, above hedge_max_s, which is 1.0"),
        ({"eject_s": 60.0}, "eject_s is 60.0, above max_eject_s, which is 30.0"),
        ({"max_attempts": 2.5}, "max_attempts is 2.5, a whole number is needed"),
        ({"refresh_s": "5"}, "refresh_s is '5', a number is needed"),
        ({"locality": "near"}, "locality is 'near', possible are prefer, ignore"),
    ],
)
def test_settings_out_of_bounds_name_both_numbers(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        FleetSettings(**changes)


def test_every_setting_is_said() -> None:
    assert FleetSettings.__doc__ is not None
    for one in fields(FleetSettings):
        assert one.name in FleetSettings.__doc__, one.name


def test_the_reserve_is_there_without_any_calls_and_comes_back() -> None:
    budget = RetryBudget(0.0, 0.5)
    assert [budget.take(100.0) for _ in range(6)] == [True] * 5 + [False]
    assert budget.num_refused == 1
    assert not budget.take(100.0 + WINDOW_S - 0.1)
    assert budget.take(100.0 + WINDOW_S + 0.1)


def test_what_was_asked_counts_for_ten_seconds() -> None:
    budget = RetryBudget(0.2, 0.0)
    budget.asked(50, 5.0)
    assert budget.left(6.0) == pytest.approx(10)
    assert budget.left(5.0 + WINDOW_S) == pytest.approx(0)


@given(st.integers(0, 2**32), st.floats(0, 0.5), st.floats(0, 5))
def test_extra_attempts_of_any_ten_seconds_are_bounded(seed: int, share: float, reserve: float) -> None:
    """By the share of what was asked within twenty seconds and twice the reserve, whatever happens when."""
    draw, budget, now_s = random.Random(seed), RetryBudget(share, reserve), 0.0
    asked: list[float] = []
    taken: list[float] = []
    for _ in range(300):
        now_s += draw.expovariate(20)
        if draw.random() < 0.4:
            budget.asked(1, now_s)
            asked.append(now_s)
        elif budget.take(now_s):
            taken.append(now_s)
        recent = sum(one > now_s - WINDOW_S for one in taken)
        wide = sum(one > now_s - 2 * WINDOW_S - 1 for one in asked)
        assert recent <= share * wide + 2 * reserve * WINDOW_S + 1


def test_a_client_that_never_retries_remembers_no_more_than_ten_seconds() -> None:
    budget = RetryBudget(0.2, 1.0)
    for second in range(3600):
        budget.asked(1, float(second))
    assert len(budget._buckets) <= WINDOW_S + 1


def test_a_percentile_needs_samples_and_forgets_old_ones() -> None:
    latencies = Latencies(size=100)
    for _ in range(MIN_SAMPLES - 1):
        latencies.add(9.0)
    assert latencies.percentile(0.95) is None
    for number in range(1, 101):
        latencies.add(number / 100)
    assert latencies.percentile(0.95) == 0.95
    assert latencies.percentile(1.0) == 1.0
    assert latencies.percentile(0.5) == 0.5
    assert latencies.percentile(0.55) == 0.55, "a product that floating point makes a little too large"
    latencies.clear()
    assert latencies.percentile(0.5) is None


def test_of_calls_that_were_given_up_a_bound_is_known() -> None:
    latencies = Latencies(size=100)
    for _ in range(80):
        latencies.add(0.05, at_least=True)
    for _ in range(20):
        latencies.add(0.4)
    assert latencies.percentile(0.5) == 0.4, "none of those that ended took less"
    for _ in range(90):
        latencies.add(0.02)
    for _ in range(10):
        latencies.add(0.05, at_least=True)
    assert latencies.percentile(0.5) == 0.02, "a few that were given up change little"
    for _ in range(100):
        latencies.add(0.05, at_least=True)
    assert latencies.percentile(0.5) == 0.05, "nothing but bounds"


def test_percentiles_with_bounds_are_kaplan_and_meiers() -> None:
    """The textbook's example (Kaplan and Meier's own): 0.8, 1.0+, 2.7+, 3.1, 5.4, 7.0+, 9.2, 12.1+."""
    latencies = Latencies()
    for _ in range(MIN_SAMPLES):  # each as often, which changes no share
        for seconds in (0.8, 3.1, 5.4, 9.2):
            latencies.add(seconds)
        for seconds in (1.0, 2.7, 7.0, 12.1):
            latencies.add(seconds, at_least=True)
    # Above 0.8 are 7/8 of all, above 3.1 7/10, above 5.4 21/40, above 9.2 21/80.
    expected = {
        0.124: 0.8,
        0.126: 3.1,
        0.299: 3.1,
        0.301: 5.4,
        0.474: 5.4,
        0.476: 9.2,
        0.737: 9.2,
        0.738: 12.1,
    }
    assert {share: latencies.percentile(share) for share in expected} == expected


def test_without_bounds_both_ways_agree() -> None:
    for _ in range(200):
        samples = [random.choice([random.random(), 0.5]) for _ in range(random.randint(MIN_SAMPLES, 90))]
        plain, with_bound = Latencies(), Latencies()
        for seconds in samples:
            plain.add(seconds)
            with_bound.add(seconds)
        with_bound.add(0.0, at_least=True)  # waited for no time at all: says nothing
        share = random.random()
        assert plain.percentile(share) == with_bound.percentile(share)
