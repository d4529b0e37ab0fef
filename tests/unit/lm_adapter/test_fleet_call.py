"""What a call over a fleet tries, in which order, and that each item is answered once. No I/O, no clock."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_adapter.errors import (
    DeadlineExceeded,
    EncoderError,
    EncoderFault,
    EncoderUnavailable,
    InvalidRows,
    ItemFailed,
    RequestRefused,
    StreamViolation,
)
from lm_adapter.fleet import FleetCounts, FleetSettings
from lm_adapter.fleet.attempt import Attempt
from lm_adapter.fleet.budget import RetryBudget
from lm_adapter.fleet.call import MAX_MOVES, FleetCall
from lm_adapter.fleet.latency import MIN_SAMPLES, Latencies
from lm_adapter.fleet.outcomes import as_item_failure
from lm_adapter.fleet.replica import Check, Replica, ReplicaState
from lm_adapter.fleet.ring import home_order

PLAIN = FleetSettings(max_attempts=3, backoff_s=0.1, patience_s=1.0, max_hedges=1)
DRAINING = EncoderUnavailable("stopping", reason="DRAINING")
UNKNOWN = ItemFailed("not here", reason="UNKNOWN_KEY", status=5)
FULL = ItemFailed("full", reason="QUEUE_FULL", status=8, retryable=True, retry_after_ms=700)


class Bench:
    """A call of some items over replicas, all of them up."""

    def __init__(self, num_items: int, num_replicas: int, **changes: Any) -> None:
        call_changes = {
            name: changes.pop(name) for name in ("hedge_after_s", "absent_moves") if name in changes
        }
        self.settings = replace(PLAIN, **changes)
        self.replicas = [Replica(f"10.0.0.{number}:1", self.settings) for number in range(num_replicas)]
        for one in self.replicas:
            one.checked(Check.SERVING, 0.0)
        self.counts = FleetCounts()
        self.budget = RetryBudget(self.settings.retry_share, self.settings.retry_reserve_per_s)
        self.keys = [random.randbytes(32) for _ in range(num_items)]
        self.latencies = Latencies()
        self.call = FleetCall(
            num_items, self.order, self.settings, self.budget, self.counts, self.latencies, 0.0,
            replicas=lambda: self.replicas, **call_changes,
        )  # fmt: skip

    def order(self, index: int) -> list[Replica]:
        return home_order(self.keys[index], [one for one in self.replicas if one.is_up] or self.replicas)

    def take(self, now_s: float = 0.0) -> list[Attempt]:
        attempts, lost = self.call.take(now_s)
        assert lost == []
        return attempts

    def one(self, now_s: float = 0.0) -> Attempt:
        (attempt,) = self.take(now_s)
        return attempt


def test_items_go_to_their_homes_in_one_call_each() -> None:
    bench = Bench(60, 4)
    attempts = bench.take()
    assert len(attempts) == 4
    assert sorted(index for attempt in attempts for index in attempt.indices) == list(range(60))
    for attempt in attempts:
        assert all(bench.order(index)[0] is attempt.replica for index in attempt.indices)
        assert attempt.replica.num_items == len(attempt.indices)
    assert bench.take() == []
    assert bench.counts.items == bench.counts.attempts == 60


def test_p37_a_draining_replica_is_left_at_once_for_the_next_in_order() -> None:
    bench = Bench(1, 4)
    order = bench.order(0)
    first = bench.one()
    assert bench.call.ended(first, DRAINING, 0.1) == []
    second = bench.one(0.1)
    assert [first.replica, second.replica] == order[:2]
    assert bench.call.succeeded(second, 0, 0.2)
    assert bench.counts.retries == 1
    assert [one.num_items for one in bench.replicas] == [0] * 4


def test_only_what_was_left_goes_again() -> None:
    bench = Bench(8, 1)
    attempt = bench.one()
    for index in range(5):
        assert bench.call.succeeded(attempt, index, 0.1)
    assert bench.call.ended(attempt, EncoderFault("cut", retryable=True), 0.2) == []
    assert bench.take(0.25) == [], "the only replica has been tried: a pause comes first"
    assert bench.one(0.31).indices == [5, 6, 7]


def test_what_is_not_retryable_ends_its_item_alone() -> None:
    bench = Bench(2, 1)
    attempt = bench.one()
    bad = ItemFailed("no image", reason="UNDECODABLE_IMAGE", status=3)
    assert bench.call.failed(attempt, 0, bad, 0.1) is bad
    assert bench.call.succeeded(attempt, 1, 0.1)
    assert bench.call.ended(attempt, None, 0.1) == []
    assert bench.counts.retries == 0
    other = Bench(3, 1)
    refused = RequestRefused("no token")
    assert other.call.ended(other.one(), refused, 0.1) == [(index, refused) for index in range(3)]


def test_attempts_are_bounded_and_wait_longer_each_time_on_the_same_replica() -> None:
    bench = Bench(1, 1)
    assert bench.call.failed(bench.one(), 0, FULL, 0.0) is None
    assert bench.call.next_due_s() == 0.7, "what the server asked for is longer than the pause"
    no_hint = replace_failure(FULL)
    assert bench.call.failed(bench.one(0.7), 0, no_hint, 1.0) is None
    assert bench.call.next_due_s() == 1.2
    last = bench.one(1.2)
    assert bench.call.failed(last, 0, FULL, 1.3) is FULL
    assert bench.call.num_attempts(0) == 3


def replace_failure(failure: ItemFailed) -> ItemFailed:
    return ItemFailed(failure.message, reason=failure.reason, status=failure.status, retryable=True)


def test_a_spent_budget_ends_the_item_and_says_so() -> None:
    bench = Bench(1, 4, retry_share=0.0, retry_reserve_per_s=0.0)
    assert bench.call.ended(bench.one(), DRAINING, 0.1) == [(0, DRAINING)]
    assert bench.call.notes == {0: "the retry budget is spent"}
    assert bench.counts.refused == 1


def test_a_late_item_is_asked_for_a_second_time_elsewhere_once() -> None:
    bench = Bench(1, 4, hedge_after_s=0.2)
    first = bench.one()
    assert bench.call.next_due_s() == 0.2
    assert bench.take(0.19) == []
    beside = bench.one(0.2)
    assert beside.is_hedge
    assert beside.replica is bench.order(0)[1]
    assert bench.take(9.0) == []
    assert bench.call.succeeded(beside, 0, 0.3)
    assert bench.call.superseded() == [first]
    bench.call.left_behind(first, 0.3)
    assert bench.call.running == [beside]
    assert bench.counts.hedges == bench.counts.hedges_won == 1
    assert [one.num_items for one in bench.replicas] == [0] * 4


def test_the_late_one_may_still_win_and_its_second_answer_is_dropped() -> None:
    bench = Bench(1, 4, hedge_after_s=0.2)
    first = bench.one()
    beside = bench.one(0.2)
    assert bench.call.succeeded(first, 0, 0.3)
    assert not bench.call.succeeded(beside, 0, 0.3)
    assert bench.counts.hedges_won == 0


def test_a_failure_beside_a_running_attempt_waits_for_it() -> None:
    bench = Bench(1, 4, hedge_after_s=0.2)
    first = bench.one()
    beside = bench.one(0.2)
    assert bench.call.ended(first, DRAINING, 0.3) == []
    assert bench.take(0.3) == []
    assert bench.call.ended(beside, DRAINING, 0.4) == []
    third = bench.one(0.4)
    assert third.replica not in (first.replica, beside.replica)


@pytest.mark.parametrize("hedge_fails", [True, False])
def test_p37_an_item_is_not_left_to_a_replica_that_hangs(hedge_fails: bool) -> None:
    """Of an attempt and its hedge one fails and the other never answers."""
    bench = Bench(1, 4, hedge_after_s=0.2)
    first = bench.one()
    beside = bench.one(0.2)
    failing = beside if hedge_fails else first
    assert bench.call.ended(failing, DRAINING, 0.5) == []
    assert bench.call.next_due_s() == (0.2 if hedge_fails else 0.4)
    third = bench.one(0.5)
    assert third.is_hedge
    assert third.replica not in (first.replica, beside.replica)
    assert bench.call.ended(third, DRAINING, 0.6) == []
    fourth = bench.one(0.6)
    assert bench.take(0.6) == []
    assert bench.call.ended(fourth, DRAINING, 0.7) == []
    assert bench.take(9.0) == [], "all have been asked, as often as is allowed"
    hanging = first if hedge_fails else beside
    assert bench.call.succeeded(hanging, 0, 9.5)
    assert (bench.counts.hedges, bench.counts.attempts) == (3, 4)
    assert [one.num_items for one in bench.replicas] == [0] * 4


def test_a_hedge_that_failed_is_made_anew_once_there_is_a_budget() -> None:
    bench = Bench(1, 4, hedge_after_s=0.2, retry_share=0.1, retry_reserve_per_s=0.1)
    first = bench.one()
    beside = bench.one(0.2)
    assert bench.call.ended(beside, DRAINING, 0.3) == []
    assert bench.take(0.3) == []
    assert (bench.counts.refused, bench.counts.hedges) == (1, 1)
    due_s = bench.call.next_due_s()
    assert due_s == pytest.approx(0.4)
    assert bench.take(0.39) == []
    assert bench.counts.refused == 1, "not looked at before"
    bench.budget.asked(100, 0.4)
    again = bench.one(0.4)
    assert again.is_hedge
    assert again.replica not in (first.replica, beside.replica)
    assert bench.call.succeeded(again, 0, 0.5)


def test_a_hedge_that_is_refused_is_looked_at_ever_more_rarely_and_never_given_up() -> None:
    bench = Bench(3, 2, hedge_after_s=0.2, retry_share=0.0, retry_reserve_per_s=0.0)
    attempts = bench.take()
    looks: list[float] = []
    now_s = 0.2
    while now_s < 30:
        assert bench.take(now_s) == []
        looks.append(now_s)
        due_s = bench.call.next_due_s()
        assert due_s is not None
        assert due_s > now_s
        now_s = due_s
    pauses = [round(after - before, 3) for before, after in itertools.pairwise(looks)]
    assert pauses[:7] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 3.2]
    assert bench.counts.refused == 3, "each item once"
    for attempt in attempts:
        for index in list(attempt.indices):
            assert bench.call.succeeded(attempt, index, 30.0)
    assert bench.call.next_due_s() is None


def test_what_an_item_whose_hedge_failed_has_to_wait_for_is_not_what_others_were_refused() -> None:
    bench = Bench(2, 3, hedge_after_s=0.2, retry_share=0.0, retry_reserve_per_s=0.1)
    bench.keys[1] = bench.keys[0]
    (first,) = bench.take()
    beside = bench.one(0.2)  # one token: the other item's hedge is refused
    assert len(beside.indices) == 1
    now_s = 0.2
    for _ in range(6):
        due_s = bench.call.next_due_s()
        assert due_s is not None
        now_s = due_s
        assert bench.take(now_s) == []
    assert first.hedge_not_before_s > now_s + 3
    bench.budget._add(5.0, now_s + 0.1)
    assert bench.take(now_s + 0.1) == []
    assert bench.call.ended(beside, DRAINING, now_s + 0.1) == []
    assert beside.indices[0] in [index for one in bench.take(now_s + 0.1) for index in one.indices]


def test_hedges_that_are_looked_at_again_leave_half_of_the_reserve_to_retries() -> None:
    """Those are final where there is none. What a hedge is looked at for the first time may take it all."""
    bench = Bench(40, 4, hedge_after_s=0.2, retry_share=0.0, retry_reserve_per_s=1.0)
    attempts = bench.take()
    assert sum(len(one.indices) for one in bench.take(0.2)) == 10
    due_s = 10.3  # the ten are forgotten by then
    assert bench.budget.left(due_s) == 10
    assert sum(len(one.indices) for one in bench.take(due_s)) == 5
    assert bench.budget.left(due_s) == 5
    alone = [index for index in attempts[-1].indices if len(bench.call._items[index].running) == 1]
    over = bench.call.ended(attempts[-1], DRAINING, due_s)
    assert bench.counts.retries == min(5, len(alone)) > 0
    assert len(over) == len(alone) - bench.counts.retries


def test_a_look_places_nothing_once_the_budget_is_spent() -> None:
    bench = Bench(60, 4, hedge_after_s=0.2, retry_share=0.0, retry_reserve_per_s=0.1)
    looked: list[int] = []
    order = bench.order
    bench.call._order = lambda index: (looked.append(index), order(index))[1]
    bench.take()
    looked.clear()
    bench.take(0.2)
    assert len(looked) == 2, "the one that was hedged, and the one that found the budget spent"
    assert bench.counts.refused == 59
    looked.clear()
    bench.take(0.5)
    assert looked == []


def test_a_hedge_finds_no_place_until_there_is_a_second_replica() -> None:
    bench = Bench(1, 1, hedge_after_s=0.2)
    first = bench.one()
    assert bench.take(0.2) == []
    assert (bench.counts.refused, bench.counts.hedges) == (0, 0)
    bench.replicas.append(Replica("10.0.0.9:1", bench.settings))
    bench.replicas[-1].checked(Check.SERVING, 0.25)
    assert bench.take(0.25) == []
    beside = bench.one(0.31)
    assert beside.is_hedge
    assert beside.replica is not first.replica


def test_hedges_are_of_the_budget_too() -> None:
    bench = Bench(4, 2, hedge_after_s=0.2, retry_share=0.5, retry_reserve_per_s=0.0)
    bench.take()
    beside = bench.take(0.2)
    assert sum(len(one.indices) for one in beside) == 2
    assert bench.counts.refused == 2
    assert bench.take(0.25) == [], "those that have theirs have no other, and the rest waits"
    assert bench.counts.refused == 2


def test_without_replicas_an_item_waits_for_one_as_long_as_its_patience() -> None:
    bench = Bench(1, 0)
    assert bench.take(0.0) == []
    due_s = bench.call.next_due_s()
    assert due_s is not None
    assert 0 < due_s <= 0.1
    _, lost = bench.call.take(1.0)
    assert [(index, failure.reason) for index, failure in lost] == [(0, "NO_ENDPOINTS")]
    other = Bench(1, 0)
    assert other.take(0.0) == []
    other.replicas.append(Replica("10.0.0.1:1", other.settings))
    assert other.one(0.5).replica is other.replicas[0]


def test_rows_of_a_digest_are_looked_for_where_they_may_have_been_before() -> None:
    bench = Bench(1, 9, absent_moves=[True], retry_share=0.0, retry_reserve_per_s=0.0)
    asked = []
    for _ in range(MAX_MOVES):
        attempt = bench.one()
        asked.append(attempt.replica)
        assert bench.call.failed(attempt, 0, UNKNOWN, 0.0) is None
    last = bench.one()
    assert [*asked, last.replica] == bench.order(0)[: MAX_MOVES + 1]
    assert bench.call.failed(last, 0, UNKNOWN, 0.0) is UNKNOWN
    assert (bench.counts.moves, bench.counts.retries) == (MAX_MOVES, 0)
    alone = Bench(1, 1, absent_moves=[True])
    assert alone.call.failed(alone.one(), 0, UNKNOWN, 0.1) is UNKNOWN


def test_rows_that_the_home_does_not_know_may_still_come_from_the_hedge() -> None:
    """The home has just joined; the other of two replicas, where the rows lie, was asked because it was
    late."""
    bench = Bench(1, 2, absent_moves=[True], hedge_after_s=0.2)
    first, beside = bench.one(), bench.one(0.2)
    assert bench.call.failed(first, 0, UNKNOWN, 0.3) is None
    assert bench.call.succeeded(beside, 0, 0.4)
    other = Bench(1, 2, absent_moves=[True], hedge_after_s=0.2)
    first, beside = other.one(), other.one(0.2)
    assert other.call.failed(first, 0, UNKNOWN, 0.3) is None
    assert other.call.failed(beside, 0, UNKNOWN, 0.4) is UNKNOWN


def test_a_hedge_that_was_not_needed_makes_its_replica_look_no_faster() -> None:
    bench = Bench(1, 2, hedge_after_s=0.2)
    first, beside = bench.one(), bench.one(0.2)
    for _ in range(MIN_SAMPLES):
        beside.replica.latencies.add(5.0)
    assert bench.call.succeeded(first, 0, 0.21)
    bench.call.left_behind(beside, 0.21)
    assert beside.replica.latencies.percentile(0.01) == 5.0


def test_what_a_hedge_ended_took_longer_than_it_was_waited_for() -> None:
    bench = Bench(1, 2, hedge_after_s=0.2)
    first, beside = bench.one(), bench.one(0.2)
    for _ in range(MIN_SAMPLES):
        first.replica.latencies.add(0.5)
    assert bench.call.succeeded(beside, 0, 0.21)
    bench.call.left_behind(first, 0.21)
    assert first.replica.latencies.percentile(0.01) == 0.5, "0.21 is a bound, and no sample"


@pytest.mark.parametrize(("took_s", "num_ejected"), [(0.1, 0), (0.6, 1)], ids=["in a hurry", "late"])
def test_a_deadline_blames_a_replica_that_was_late_and_not_a_caller_in_a_hurry(
    took_s: float, num_ejected: int
) -> None:
    """The same whether the channel or this client is the first to find that the time is up."""
    bench = Bench(1, 2)
    late = DeadlineExceeded("too late")
    for number in range(PLAIN.eject_failures):
        call = FleetCall(
            1, lambda _: bench.replicas[:1], bench.settings, bench.budget, bench.counts, bench.latencies, 0.0,
            late_after_s=0.5, replicas=lambda: bench.replicas,
        )  # fmt: skip
        ((attempt,), _) = call.take(0.0)
        if number % 2:
            assert call.ended(attempt, late, took_s) == [(0, late)]
        else:
            assert call.give_up(lambda _: late, took_s) == [(0, late)]
    assert sum(one.state is ReplicaState.EJECTED for one in bench.replicas) == num_ejected


class Counting(list[Any]):
    """Counts what is looked at."""

    num_looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.num_looks += 1
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[Any]:
        self.num_looks += len(self)
        return super().__iter__()


def test_an_outcome_costs_no_more_in_a_call_of_thousands() -> None:
    bench = Bench(2000, 4, hedge_after_s=0.2)
    looks = bench.call._items = Counting(bench.call._items)
    attempts = bench.take()
    looks.num_looks = 0
    for attempt in attempts:
        for index in list(attempt.indices):
            assert bench.call.succeeded(attempt, index, 0.1)
            bench.call.superseded()
            assert bench.take(0.1) == []
            bench.call.next_due_s()
    assert looks.num_looks < 2000 * 40


def test_an_abandoned_call_spends_no_retries_and_leaves_nobody_busy() -> None:
    bench = Bench(5, 2, hedge_after_s=0.2)
    bench.take()
    bench.take(0.3)
    left = bench.budget.left(0.3)
    bench.call.abandon()
    assert bench.budget.left(0.3) == left
    assert bench.counts.retries == 0
    assert list(bench.call.running) == []
    assert [one.num_items for one in bench.replicas] == [0, 0]


def test_calls_whose_time_says_nothing_leave_the_latencies_alone() -> None:
    bench = Bench(20, 1)
    call = FleetCall(20, bench.order, bench.settings, bench.budget, bench.counts, None, 0.0)
    ((attempt,), _) = call.take(0.0)
    for index in range(20):
        assert call.succeeded(attempt, index, 0.001)
    assert bench.replicas[0].latencies.percentile(0.5) is None


def test_an_answer_that_no_sound_replica_gives_is_asked_for_elsewhere() -> None:
    broken: list[EncoderError] = [
        InvalidRows("width", "the width is 7", found=7, expected=32),
        StreamViolation("a message that no correct server sends"),
    ]
    for failure in broken:
        bench = Bench(1, 3)
        first = bench.one()
        assert bench.call.failed(first, 0, failure, 0.1) is None
        assert bench.one(0.1).replica is not first.replica


@pytest.mark.parametrize("failure", [FULL, ItemFailed("no image", status=3), EncoderUnavailable("gone")])
def test_every_failure_says_how_many_attempts_there_were(failure: EncoderError) -> None:
    assert as_item_failure(failure, 1).details["num_attempts"] == "1"


FAILURES: list[EncoderError] = [
    DRAINING,
    FULL,
    EncoderUnavailable("gone"),
    RequestRefused("no"),
    UNKNOWN,
    EncoderFault("broken", retryable=True),
]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(0, 2**32),
    st.sampled_from([None, 0.05]),
    st.floats(0, 0.9),
)
def test_whatever_happens_each_item_is_answered_once(
    num_items: int, num_replicas: int, seed: int, hedge_after_s: float | None, failing: float
) -> None:
    """Nothing is lost, nothing is doubled, nobody is left counted as busy, attempts stay bounded."""
    draw = random.Random(seed)
    bench = Bench(num_items, num_replicas, hedge_after_s=hedge_after_s, absent_moves=[True] * num_items)
    call, answers, running, now_s = bench.call, Counter[int](), set[Attempt](), 0.0
    for _ in range(5000):
        if sum(answers.values()) == num_items and not running:
            break
        started, lost = call.take(now_s)
        running |= set(started)
        answers.update(index for index, _ in lost)
        for attempt in call.superseded():
            call.left_behind(attempt, now_s)
            running.discard(attempt)
        if running and draw.random() < 0.8:
            attempt = draw.choice(sorted(running, key=lambda one: one.number))
            failure = draw.choice(FAILURES)
            if attempt.left and draw.random() > failing:
                index = draw.choice(sorted(attempt.left))
                answers.update([index] if call.succeeded(attempt, index, now_s) else [])
            elif attempt.left and isinstance(failure, ItemFailed):
                index = draw.choice(sorted(attempt.left))
                answers.update([index] if call.failed(attempt, index, failure, now_s) else [])
            else:
                over = call.ended(attempt, failure if attempt.left else None, now_s)
                answers.update(index for index, _ in over)
                running.discard(attempt)
            if draw.random() < 0.3:
                draw.choice(bench.replicas).checked(Check.SERVING, now_s)
        else:
            now_s += draw.random() * 0.3
    assert answers == Counter(range(num_items))
    assert list(call.running) == []
    assert [one.num_items for one in bench.replicas] == [0] * num_replicas
    # A move is an attempt beside those that are allowed, and so is a hedge.
    assert max(map(call.num_attempts, range(num_items))) <= PLAIN.max_attempts + PLAIN.max_hedges + MAX_MOVES
