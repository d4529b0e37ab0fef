"""When the shared tier is left alone, by an injected clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from encoder_service.store.shared_tier_breaker import (
    MAX_IN_WINDOW,
    MAX_RUN,
    WINDOW,
    BreakerState,
    Call,
    CircuitBreaker,
)


class Rig:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.breaker = CircuitBreaker(lambda: self.now_s, first_open_s=1.0, max_open_s=4.0)

    def call(self) -> Call:
        call = self.breaker.enter()
        assert call is not None
        return call

    def open(self) -> None:
        for _ in range(MAX_RUN):
            self.call().failed()
        assert self.breaker.state is BreakerState.OPEN


def test_a_run_of_failures_opens_it() -> None:
    rig = Rig()
    for _ in range(MAX_RUN - 1):
        rig.call().failed()
    rig.call().succeeded()
    for _ in range(MAX_RUN - 1):
        rig.call().failed()
    assert rig.breaker.state is BreakerState.CLOSED
    rig.call().failed()
    assert (rig.breaker.state, rig.breaker.enter(), rig.breaker.num_opened) == (BreakerState.OPEN, None, 1)


def test_a_server_that_fails_every_other_time_is_left_alone_too() -> None:
    rig = Rig()
    for number in range(WINDOW):
        if rig.breaker.state is BreakerState.OPEN:
            break
        call = rig.call()
        call.failed() if number % 2 else call.succeeded()
    assert rig.breaker.state is BreakerState.OPEN
    assert number == 2 * MAX_IN_WINDOW


def test_one_call_tries_it_and_a_good_end_closes_it() -> None:
    rig = Rig()
    rig.open()
    rig.now_s += 0.999
    assert rig.breaker.enter() is None
    rig.now_s += 0.001
    assert rig.breaker.state is BreakerState.HALF_OPEN
    probe = rig.call()
    assert rig.breaker.enter() is None
    probe.succeeded()
    assert rig.breaker.state is BreakerState.CLOSED
    rig.call().failed()
    assert rig.breaker.state is BreakerState.CLOSED


def test_the_wait_doubles_up_to_its_bound_and_begins_anew_after_a_good_end() -> None:
    rig = Rig()
    rig.open()
    for wait_s in (1.0, 2.0, 4.0, 4.0):
        rig.now_s += wait_s - 0.001
        assert rig.breaker.enter() is None
        rig.now_s += 0.001
        rig.call().failed()
    rig.now_s += 4.0
    rig.call().succeeded()
    rig.open()
    rig.now_s += 1.0
    assert rig.breaker.enter() is not None


def test_a_probe_whose_caller_leaves_is_followed_by_another() -> None:
    rig = Rig()
    rig.open()
    rig.now_s += 1.0
    rig.call().abandoned()
    assert rig.breaker.state is BreakerState.HALF_OPEN
    rig.call().succeeded()
    assert rig.breaker.state is BreakerState.CLOSED


def test_calls_from_before_it_opened_decide_nothing_after() -> None:
    rig = Rig()
    early = [rig.call() for _ in range(MAX_RUN + 2)]
    for call in early[:MAX_RUN]:
        call.failed()
    early[MAX_RUN].succeeded()
    assert rig.breaker.state is BreakerState.OPEN
    rig.now_s += 1.0
    probe = rig.call()
    early[MAX_RUN + 1].failed()
    probe.succeeded()
    assert rig.breaker.state is BreakerState.CLOSED


@given(st.lists(st.tuples(st.sampled_from("sfa"), st.booleans(), st.floats(0, 3)), max_size=120))
def test_there_is_never_more_than_one_probe_and_it_can_always_close(
    steps: list[tuple[str, bool, float]],
) -> None:
    rig = Rig()
    out: list[Call] = []
    for end, keeps, elapsed_s in steps:
        rig.now_s += elapsed_s
        before = rig.breaker.state
        call = rig.breaker.enter()
        assert (call is None) <= (before is not BreakerState.CLOSED)
        if call is not None:
            out.append(call)
        if out and not keeps:
            last = out.pop()
            {"s": last.succeeded, "f": last.failed, "a": last.abandoned}[end]()
            last.failed()  # a call ends once
    for call in out:
        call.abandoned()
    rig.now_s += 10
    rig.call().succeeded()
    assert rig.breaker.state is BreakerState.CLOSED
