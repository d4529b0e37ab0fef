"""The figures of a run, from made-up calls."""

from __future__ import annotations

import numpy as np
import pytest

from bench.harness.fleet.callers import Mark, Measured

NUM_CALLERS = 12
CALL_S = 0.01
MARK_S, RUN_S = 10.0, 40.0
MARGIN_S = 0.5


def blocked(for_s: float, run_s: float = RUN_S) -> Measured:
    """Callers that send call after call. All wait from the mark on for so long, then go on."""
    ends_s = MARK_S + for_s
    calls = []
    for number in range(NUM_CALLERS):
        now_s = number * 1e-3
        while now_s < run_s:
            is_blocked = now_s < ends_s and now_s + CALL_S > MARK_S
            took_s = ends_s - now_s if is_blocked else CALL_S
            calls.append((now_s, took_s))
            now_s += took_s
    started_s, durations_s = np.array(sorted(calls)).T
    zeros = np.zeros(len(calls))
    states, images = zeros.astype(np.uint8), zeros.astype(np.int32)
    return Measured(started_s, durations_s, states, images, [], [Mark("blocked", MARK_S)])


@pytest.mark.parametrize("run_s", [RUN_S, MARK_S + 5])
def test_recovery_covers_a_time_in_which_no_call_starts(run_s: float) -> None:
    """Also where the run is stopped meanwhile."""
    measured = blocked(20.0, run_s)
    assert measured.recovery_s(measured.marks[0], MARGIN_S) == pytest.approx(20.0, abs=0.2)
    assert measured.longest_s() == pytest.approx(20.0, abs=0.02)


@pytest.mark.parametrize(("for_s", "bound_s"), [(0.0, 0.0), (0.3, 0.0), (0.8, 1.0)])
def test_a_short_wait_is_a_short_recovery(for_s: float, bound_s: float) -> None:
    measured = blocked(for_s)
    assert measured.recovery_s(measured.marks[0], MARGIN_S) <= bound_s


@pytest.mark.parametrize(("before_s", "counts"), [(2.0, True), (5.0, False)])
def test_a_wait_long_after_the_mark_has_another_cause(before_s: float, counts: bool) -> None:
    made = blocked(0.8)
    mark = Mark("earlier", MARK_S - before_s)
    measured = Measured(made.started_s, made.took_s, made.state, made.image, [], [mark])
    assert (measured.recovery_s(mark, MARGIN_S) > before_s) == counts


def test_a_wait_before_the_mark_does_not_count() -> None:
    made = blocked(0.8)
    marks = [Mark("later", MARK_S + 1)]
    measured = Measured(made.started_s, made.took_s, made.state, made.image, [], marks)
    assert measured.recovery_s(marks[0], MARGIN_S) == 0.0
    assert measured.longest_s() == pytest.approx(CALL_S)
