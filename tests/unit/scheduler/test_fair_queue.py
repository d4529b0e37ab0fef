"""Whose turn it is: shares of namespaces, turns of priorities, nothing remembered for longer than needed."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.scheduler.buckets import ladder_of_sizes
from encoder_service.scheduler.fair_queue import AGING_BATCHES, FairQueue, Line
from encoder_service.scheduler.planner import LOOK_AHEAD, MAX_PASSES, Planner, Ticket, launch_of

LADDER = ladder_of_sizes([256, 1024, 4096, 16384])


def spent_us(batch: list[Ticket]) -> dict[str, float]:
    """What each namespace's items add to a batch."""
    spent: dict[str, float] = defaultdict(float)
    for ticket in batch:
        spent[ticket.namespace] += LADDER.cost.added_us(launch_of([ticket]))
    return spent


def test_one_namespace_is_first_come() -> None:
    queue = FairQueue()
    tickets = [Ticket(4, namespace="a") for _ in range(20)]
    for ticket in tickets:
        queue.add(ticket)
    assert list(queue.turn()) == tickets


def test_a_namespace_that_comes_late_is_next_however_deep_the_other_queue_is() -> None:
    planner = Planner(10, 8)
    flood = [Ticket(10, namespace="flood") for _ in range(1000)]
    for ticket in flood:
        planner.add(ticket)
    for turn in range(5):
        assert planner.next_batch(0.0).batch == [flood[turn]]
    late = [Ticket(10, namespace="small"), Ticket(10, namespace="small")]
    for ticket in late:
        planner.add(ticket)
    ran = [planner.next_batch(0.0).batch[0] for _ in range(4)]
    assert ran.index(late[0]) <= 1
    assert ran.index(late[1]) <= 3


# Most of the lead that one namespace can have over another: what passes the other's items until they let
# nothing past, and the batches in which either's item goes whole.
LEAD_IN_BATCHES = MAX_PASSES + 2


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000),
    st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5),
    st.sampled_from([2048, 16384]),
    st.booleans(),
)
def test_namespaces_that_always_wait_get_time_by_their_weights(
    seed: int, weights: list[float], max_patches: int, with_ladder: bool
) -> None:
    """At no time does one lead another, time over weight, by more than the bound, whatever their sizes."""
    generator = random.Random(seed)
    names = [str(index) for index in range(len(weights))]
    by_name = dict(zip(names, weights, strict=True))
    kinds = [[4 * generator.randint(1, generator.choice([20, 500, 2000])) for _ in range(4)] for _ in names]
    planner = Planner(max_patches, 16, LADDER if with_ladder else None, by_name)
    waiting: dict[str, int] = defaultdict(int)
    got: dict[str, float] = defaultdict(float)
    # The most that items add to one batch, or to one that an item above the budget fills alone.
    most = 0.0
    for _ in range(120):
        for name, kind in zip(names, kinds, strict=True):
            while waiting[name] < 40:
                planner.add(Ticket(generator.choice(kind), namespace=name))
                waiting[name] += 1
        batch = planner.next_batch(0.0).batch
        if with_ladder:
            spent = spent_us(batch)
        else:
            spent = {name: float(sum(t.num_patches for t in batch if t.namespace == name)) for name in names}
        most = max(most, sum(spent.values()))
        for ticket in batch:
            waiting[ticket.namespace] -= 1
        for name, us in spent.items():
            got[name] += us
        over_weight = [got[name] / by_name[name] for name in names]
        assert max(over_weight) - min(over_weight) <= LEAD_IN_BATCHES * most / min(weights)


def test_shares_come_out_as_weights_in_the_long_run() -> None:
    planner = Planner(16384, 64, LADDER, {"big": 3.0})
    generator = random.Random(7)
    got: dict[str, float] = defaultdict(float)
    waiting = {"big": 0, "other": 0}
    for _ in range(400):
        for name in waiting:
            while waiting[name] < 60:
                planner.add(Ticket(4 * generator.randint(50, 1000), namespace=name))
                waiting[name] += 1
        batch = planner.next_batch(0.0).batch
        for ticket in batch:
            waiting[ticket.namespace] -= 1
        for name, us in spent_us(batch).items():
            got[name] += us
    assert got["big"] / got["other"] == pytest.approx(3.0, rel=0.05)


def test_time_away_is_not_saved_up() -> None:
    planner = Planner(10, 8)
    for _ in range(100):
        planner.add(Ticket(10, namespace="steady"))
    for _ in range(50):
        planner.next_batch(0.0)
    for _ in range(100):
        planner.add(Ticket(10, namespace="back"))
    ran = [planner.next_batch(0.0).batch[0].namespace for _ in range(20)]
    assert 9 <= ran.count("steady") <= 11


def test_one_item_at_a_time_gains_nothing() -> None:
    """A namespace whose next item comes as soon as the one before went is not new each time."""
    planner = Planner(10, 1)
    for _ in range(300):
        planner.add(Ticket(10, namespace="deep"))
    ran = []
    for _ in range(40):
        if "eager" not in ran[-1:]:
            planner.add(Ticket(10, namespace="eager"))
        ran.append(planner.next_batch(0.0).batch[0].namespace)
    assert 18 <= ran.count("deep") <= 22


def test_a_stream_of_new_namespaces_holds_nobody_back_for_good() -> None:
    planner = Planner(10, 8)
    old = [Ticket(10, namespace="old") for _ in range(4)]
    for ticket in old:
        planner.add(ticket)
    ran: list[Ticket] = []
    for turn in range(60):
        for copy in range(5 if turn == 0 else 1):  # from then on as much as the device takes
            planner.add(Ticket(10, namespace=f"{turn}-{copy}"))
        ran += planner.next_batch(0.0).batch
    assert set(old) <= set(ran)


def test_what_is_withdrawn_costs_its_namespace_nothing() -> None:
    planner = Planner(10, 8)
    a, b = ([Ticket(10, namespace=name) for _ in range(6)] for name in "ab")
    for ticket in (*a, *b):
        planner.add(ticket)
    for ticket in a[:5]:
        planner.remove(ticket)
    ran = [planner.next_batch(0.0).batch[0] for _ in range(2)]
    assert a[5] in ran


def test_p17_namespaces_that_come_and_go_leave_nothing_behind() -> None:
    planner = Planner(64, 8)
    generator = random.Random(3)
    for turn in range(2000):
        planner.add(Ticket(generator.randint(1, 64), namespace=f"n{turn}", deadline_s=1e9))
        if turn % 3 == 0:
            gone = Ticket(5, namespace=f"gone{turn}", deadline_s=1e9)
            planner.add(gone)
            planner.remove(gone)
        if len(planner) > 20:
            planner.next_batch(0.0)
    queue = planner._queue
    (line,) = queue._lines.values()
    assert queue.num_flows <= 200
    assert len(line._heap) + len(line._idle) <= 1000
    assert len(planner._deadlines) <= 100
    assert len(queue._sizes) <= 64
    while len(planner):
        planner.next_batch(0.0)
    assert queue.num_flows == 0
    assert planner.num_patches == 0


# -- priorities ----------------------------------------------------------------------------------------


@given(st.integers(2, 5), st.integers(1, 3))
def test_every_priority_leads_a_batch_in_bounded_time(num_priorities: int, rounds: int) -> None:
    """However much of higher ones comes: once within (priorities - 1) * (AGING_BATCHES + 1) batches, while
    the highest leads all but one of AGING_BATCHES + 1."""
    queue = FairQueue()
    for priority in range(num_priorities):
        for _ in range(400):
            queue.add(Ticket(1, priority))
    bound = (num_priorities - 1) * (AGING_BATCHES + 1)
    led = []
    for _ in range(bound * rounds):
        head = next(iter(queue.turn()))
        led.append(head.priority)
        queue.serve([head])
    for start in range(0, len(led), bound):
        assert set(led[start : start + bound]) == set(range(num_priorities))
    assert led.count(num_priorities - 1) == len(led) * AGING_BATCHES // (AGING_BATCHES + 1)


def test_within_a_low_priority_turns_are_in_order_too() -> None:
    planner = Planner(4, 8)
    low = [Ticket(4) for _ in range(3)]
    for ticket in low:
        planner.add(ticket)
    ran: list[Ticket] = []
    for _ in range(3 * (AGING_BATCHES + 1)):
        for _ in range(2):
            planner.add(Ticket(4, priority=1))
        ran += planner.next_batch(0.0).batch
    assert [ticket for ticket in ran if ticket.priority == 0] == low


def test_a_caller_in_a_hurry_takes_a_waiting_item_along() -> None:
    """It joins behind those of its new priority."""
    planner = Planner(4, 8)
    first, second, third = Ticket(4), Ticket(4), Ticket(4, priority=1)
    for ticket in (first, second, third):
        planner.add(ticket)
    second.priority = 1
    assert [planner.next_batch(0.0).batch[0] for _ in range(3)] == [third, second, first]
    second.priority = 5  # it has gone: nothing comes of it
    assert planner.next_batch(0.0).batch == []


def test_what_is_cancelled_deep_in_the_queue_comes_out_with_the_next_batch() -> None:
    planner = Planner(4, 8)
    tickets = [Ticket(4) for _ in range(2000)]
    for ticket in tickets:
        planner.add(ticket)
    tickets[-1].cancelled = True
    plan = planner.next_batch(0.0)
    assert (plan.batch, plan.cancelled) == ([tickets[0]], [tickets[-1]])
    assert len(planner) == 1998


def test_removing_what_does_not_wait_is_an_error() -> None:
    planner = Planner(4, 8)
    with pytest.raises(ValueError, match="does not wait"):
        planner.remove(Ticket(4))


def test_drained_tickets_may_wait_again_elsewhere() -> None:
    planner = Planner(4, 8)
    tickets = [Ticket(4, index % 2, namespace=str(index % 3)) for index in range(12)]
    for ticket in tickets:
        planner.add(ticket)
    assert set(planner.drain()) == set(tickets)
    assert (len(planner), planner.num_patches) == (0, 0)
    other = Planner(4, 8)
    for ticket in tickets:
        other.add(ticket)
    assert len(other) == 12


def test_a_batch_looks_at_few_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep queue costs a batch no more than a shallow one: what is looked at is bounded."""
    looked_at = 0
    order = Line.order

    def counting(line: Line) -> Iterator[Ticket]:
        nonlocal looked_at
        for ticket in order(line):
            looked_at += 1
            yield ticket

    monkeypatch.setattr(Line, "order", counting)
    generator = random.Random(11)
    planner = Planner(16384, 64, LADDER)
    for index in range(5000):
        planner.add(Ticket(4 * generator.randint(1, 4000), index % 3, namespace=str(index % 7)))
    for _ in range(50):
        looked_at = 0
        planner.next_batch(0.0)
        assert looked_at <= 64 + 2 * LOOK_AHEAD


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2), st.sampled_from("abc")), max_size=40))
def test_the_order_holds_everything_once_and_keeps_each_namespaces_own(
    items: list[tuple[int, int, str]],
) -> None:
    queue = FairQueue({"a": 2.0})
    tickets = [Ticket(size, priority, namespace=name) for size, priority, name in items]
    for ticket in tickets:
        ticket.charge = float(ticket.num_patches)
        queue.add(ticket)
    order = list(islice(queue.turn(), 100))
    assert sorted(map(id, order)) == sorted(map(id, tickets))
    assert [t.priority for t in order] == sorted((t.priority for t in order), reverse=True)
    for key in {(t.priority, t.namespace) for t in tickets}:
        own = [t for t in order if (t.priority, t.namespace) == key]
        assert own == [t for t in tickets if (t.priority, t.namespace) == key]
    assert queue.least_patches == min((t.num_patches for t in tickets), default=0)
