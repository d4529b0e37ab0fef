"""The planner's policy, as properties: budget, order, no starvation, nothing lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.scheduler.planner import Planner, Ticket


def test_first_come_within_budget_and_later_small_items_fill_up() -> None:
    planner = Planner(max_patches=10, max_items=8)
    a, b, c, d = Ticket(6), Ticket(6), Ticket(3), Ticket(1)
    for ticket in (a, b, c, d):
        planner.add(ticket)
    assert planner.next_batch(0.0).batch == [a, c, d]
    assert planner.next_batch(0.0).batch == [b]
    assert len(planner) == 0


def test_an_item_above_the_budget_runs_alone() -> None:
    planner = Planner(max_patches=10, max_items=8)
    small, huge = Ticket(2), Ticket(50)
    planner.add(small)
    planner.add(huge)
    assert planner.next_batch(0.0).batch == [small]
    assert planner.next_batch(0.0).batch == [huge]


def test_priority_goes_first() -> None:
    planner = Planner(max_patches=4, max_items=8)
    low, high = Ticket(4), Ticket(4, priority=1)
    planner.add(low)
    planner.add(high)
    assert planner.next_batch(0.0).batch == [high]


def test_cancelled_and_expired_never_run() -> None:
    planner = Planner(max_patches=10, max_items=8)
    gone, late, fine = Ticket(1, cancelled=True), Ticket(1, deadline_s=5.0), Ticket(1, deadline_s=5.1)
    for ticket in (gone, late, fine):
        planner.add(ticket)
    plan = planner.next_batch(5.0)
    assert (plan.batch, plan.cancelled, plan.expired) == ([fine], [gone], [late])


tickets = st.builds(
    Ticket,
    num_patches=st.integers(1, 30),
    priority=st.integers(0, 2),
    deadline_s=st.none() | st.floats(0, 20),
    cancelled=st.booleans(),
)


@settings(deadline=None)
@given(st.lists(tickets, max_size=30), st.integers(1, 30), st.integers(1, 5))
def test_every_ticket_comes_out_once_and_batches_keep_the_budget(
    queued: list[Ticket], max_patches: int, max_items: int
) -> None:
    planner = Planner(max_patches, max_items)
    for ticket in queued:
        planner.add(ticket)
    out: list[Ticket] = []
    for now_s in range(100):
        oldest = min(
            (t for t in queued if t not in out and not t.cancelled and (t.deadline_s or 1e9) > now_s),
            key=lambda t: (-t.priority, queued.index(t)),
            default=None,
        )
        plan = planner.next_batch(float(now_s))
        assert plan.num_patches <= max_patches or len(plan.batch) == 1
        assert len(plan.batch) <= max_items
        if oldest is not None and oldest.deadline_s != 0.0:
            assert plan.batch[0] is oldest
        out += [*plan.batch, *plan.cancelled, *plan.expired]
        if not len(planner):
            break
    assert sorted(map(id, out)) == sorted(map(id, queued))
    assert planner.num_patches == 0
