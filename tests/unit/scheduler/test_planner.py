"""The planner: batch budget, order, two classes, no starvation, no lost ticket, cuts at buckets."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.errors import Cancelled, DeadlineExceeded
from encoder_service.scheduler.buckets import Bucket, BucketLadder, default_ladder, ladder_of_sizes
from encoder_service.scheduler.cost import CostModel, Launch
from encoder_service.scheduler.planner import (
    LOOK_AHEAD,
    MAX_ENCODE_BATCHES,
    MAX_PASSES,
    Planner,
    Ticket,
    launch_of,
    launches_of,
)


def planner_of(
    tickets: Iterable[Ticket], max_patches: int = 4, ladder: BucketLadder | None = None
) -> Planner:
    planner = Planner(max_patches, 8, ladder)
    for ticket in tickets:
        planner.add(ticket)
    return planner


class JoinedMeanwhile(Ticket):
    """A caller without a deadline joins while the planner drops it."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "is_dropped" and value:
            super().__setattr__("deadline_s", None)


def test_a_ticket_whose_deadline_moves_while_it_is_dropped_stays() -> None:
    late, joined = Ticket(2, deadline_s=1.0), JoinedMeanwhile(2, deadline_s=1.0)
    plan = planner_of((late, joined)).next_batch(2.0)
    assert plan.batch == [joined]
    assert list(plan.dropped) == [late]
    assert (late.is_dropped, joined.is_dropped) == (True, False)


@pytest.mark.parametrize("is_prefetch", [False, True])
def test_a_ticket_is_late_from_its_deadline_on(is_prefetch: bool) -> None:
    tickets = [Ticket(4, deadline_s=deadline_s, is_prefetch=is_prefetch) for deadline_s in (10.0, 20.0)]
    planner = planner_of(tickets)
    tickets[1].deadline_s = 10.0 + 1e-6  # a deadline counts as it is when the batch is formed
    plan = planner.next_batch(10.0)
    assert (plan.batch, list(plan.dropped)) == (tickets[1:], tickets[:1])
    assert isinstance(plan.dropped[tickets[0]], DeadlineExceeded)
    assert len(planner) == planner.num_patches == 0


def test_an_encode_that_joins_a_queued_prefetch_raises_it_behind_the_encodes() -> None:
    first, joined, encode = Ticket(4, is_prefetch=True), Ticket(4, is_prefetch=True), Ticket(4)
    planner = planner_of((first, joined, encode), 4)
    joined.is_prefetch = False
    assert [planner.next_batch(0.0).batch[0] for _ in range(3)] == [encode, joined, first]
    joined.is_prefetch = True  # it has run: no effect
    assert planner.next_batch(0.0).batch == []


def test_a_prefetch_does_not_starve_under_a_stream_of_encodes() -> None:
    prefetches = [Ticket(4, is_prefetch=True) for _ in range(3)]
    planner = planner_of(prefetches, 4)
    ran: list[Ticket] = []
    for _ in range(3 * (MAX_ENCODE_BATCHES + 1)):
        for _ in range(2):
            planner.add(Ticket(4))
        ran += planner.next_batch(0.0).batch
    assert [ticket for ticket in ran if ticket.is_prefetch] == prefetches
    assert len(ran) == 3 * (MAX_ENCODE_BATCHES + 1)


def test_removed_and_drained_tickets_leave_nothing_and_may_wait_elsewhere() -> None:
    planner, other = Planner(4, 8), Planner(4, 8)
    tickets = [Ticket(4, is_prefetch=index % 2 > 0) for index in range(12)]
    for ticket in tickets:
        planner.add(ticket)
    planner.remove(tickets[3])
    with pytest.raises(ValueError, match="does not wait"):
        planner.remove(tickets[3])
    assert set(planner.drain()) == {*tickets} - {tickets[3]}
    assert (len(planner), planner.num_patches) == (0, 0)
    for ticket in tickets:
        other.add(ticket)
    assert len(other) == 12


def test_a_batch_is_chosen_from_a_bounded_part_of_the_queue() -> None:
    generator = random.Random(11)
    planner = Planner(16384, 64, default_ladder(16384))
    tickets = [Ticket(4 * generator.randint(1, 4000), is_prefetch=index % 3 > 0) for index in range(3000)]
    for ticket in tickets:
        planner.add(ticket)
    order = sorted(tickets, key=lambda ticket: ticket.is_prefetch)
    for _ in range(MAX_ENCODE_BATCHES):
        batch = planner.next_batch(0.0).batch
        assert {*batch} <= {*order[: 64 + LOOK_AHEAD]}
        order = [ticket for ticket in order if ticket not in batch]


tickets = st.builds(
    Ticket,
    num_patches=st.integers(1, 30),
    is_prefetch=st.booleans(),
    deadline_s=st.none() | st.floats(0, 20) | st.integers(0, 20).map(lambda whole: whole + 1e-5),
    cancelled=st.booleans(),
    num_sequences=st.integers(1, 3),
    num_frames=st.integers(1, 2),
)
# Coarse, so that cutting pays; some batches have no bucket.
ladders = st.none() | st.builds(
    lambda sizes, fixed, slots: BucketLadder(
        (Bucket(size, slots, size) for size in sizes), CostModel(fixed, 1.0, 1e-3)
    ),
    st.sets(st.integers(1, 40), min_size=1, max_size=5),
    st.floats(0, 20),
    st.integers(1, 8),
)


@settings(deadline=None)
@given(st.lists(tickets, max_size=30), st.integers(1, 30), st.integers(1, 5), ladders)
def test_every_ticket_comes_out_once_and_batches_keep_the_budget(
    queued: list[Ticket], max_patches: int, max_items: int, ladder: BucketLadder | None
) -> None:
    planner = Planner(max_patches, max_items, ladder)
    for ticket in queued:
        planner.add(ticket)
    out: list[Ticket] = []
    for now_s in range(100):
        waiting = [t for t in queued if t not in out]
        plan = planner.next_batch(float(now_s))
        assert sum(t.num_patches for t in plan.batch) <= max_patches or len(plan.batch) == 1
        assert len(plan.batch) <= max_items
        dropped = list(plan.dropped)
        assert all(t.cancelled == isinstance(error, Cancelled) for t, error in plan.dropped.items())
        assert all(t.cancelled or t.deadline_s is not None for t in dropped)
        assert not [t for t in plan.batch if t.cancelled or (t.deadline_s or 1e9) <= now_s]
        heads: dict[bool, Ticket] = {}
        for ticket in waiting:
            if ticket not in dropped:
                heads.setdefault(ticket.is_prefetch, ticket)
        assert bool(plan.batch) == bool(heads)
        if plan.batch:
            assert plan.batch == sorted(plan.batch, key=lambda t: (t.is_prefetch, queued.index(t)))
            assert heads[plan.batch[0].is_prefetch] is plan.batch[0]
            assert now_s >= MAX_ENCODE_BATCHES or plan.batch[0].is_prefetch == min(heads)
        out += [*plan.batch, *dropped]
        if not len(planner):
            break
    assert sorted(map(id, out)) == sorted(map(id, queued))
    assert planner.num_patches == 0


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(10, 60), st.integers(1, 6), ladders)
def test_no_item_starves_while_others_keep_coming(
    seed: int, max_patches: int, max_items: int, ladder: BucketLadder | None
) -> None:
    """More arrives than is served; each ticket still goes within as many batches as there were tickets
    before it, and later ones go before it at most MAX_PASSES times."""
    generator = random.Random(seed)
    planner = Planner(max_patches, max_items, ladder)
    arrived: list[Ticket] = []
    ahead: dict[Ticket, int] = {}
    passed: dict[Ticket, int] = {}
    for turn in range(60):
        for _ in range(generator.randint(0, 4) if turn < 40 else 0):
            ticket = Ticket(generator.randint(1, 40))
            ahead[ticket], passed[ticket] = len(planner), 0
            arrived.append(ticket)
            planner.add(ticket)
        batch = planner.next_batch(0.0).batch
        assert bool(batch) == bool(arrived)
        waiting = [ticket for ticket in arrived if ticket not in batch]
        for ticket in waiting:
            passed[ticket] += any(arrived.index(other) > arrived.index(ticket) for other in batch)
            ahead[ticket] -= 1
            assert ahead[ticket] >= 0
            assert ticket.passes == passed[ticket] <= MAX_PASSES
        arrived = waiting


# -- with a ladder -------------------------------------------------------------------------------------

COARSE = BucketLadder([Bucket(8, 4, 8), Bucket(16, 8, 16), Bucket(32, 16, 32)], CostModel(1.0, 10.0, 0.0))


def test_a_batch_ends_where_its_bucket_does_and_the_rest_heads_the_next() -> None:
    queue = [Ticket(8), Ticket(8), Ticket(4)]
    planner = planner_of(queue, 32, COARSE)
    # 20 patches in a bucket of 32 take 321 us; 16 and 4 take 161 and 81.
    assert planner.next_batch(0.0).batch == queue[:2]
    assert planner.next_batch(0.0).batch == queue[2:]


def test_a_batch_is_not_cut_where_one_more_launch_costs_more() -> None:
    slow_start = BucketLadder(COARSE.buckets, CostModel(500.0, 10.0, 0.0))
    queue = [Ticket(8), Ticket(8), Ticket(4)]
    planner = planner_of(queue, 32, slow_start)
    assert planner.next_batch(0.0).batch == queue


def test_room_that_a_cut_leaves_is_filled_from_further_behind() -> None:
    a, b, c, d, e = Ticket(7), Ticket(7), Ticket(8), Ticket(20), Ticket(2)
    planner = planner_of((a, b, c, d, e), 32, COARSE)
    # First come: a, b, c, e are 24 patches in 32. In 16: a and b, and e beside them.
    assert planner.next_batch(0.0).batch == [a, b, e]
    assert (c.passes, d.passes) == (1, 1)
    assert planner.next_batch(0.0).batch[0] is c


def test_an_item_that_no_bucket_takes_is_left_out_of_a_batch_that_one_takes() -> None:
    """An eager batch costs the host's launches; a clip of many frames would send all its fellows there."""
    stills = [Ticket(4) for _ in range(4)]
    clip = Ticket(4, num_frames=4)
    planner = planner_of((*stills, clip), 32, COARSE)
    planner.ladder = BucketLadder(COARSE.buckets, CostModel(1.0, 10.0, 0.0))
    assert planner.next_batch(0.0).batch == [*stills, clip]  # two launches would be slower still
    for ticket in (*stills, clip):
        planner.add(ticket)
    planner.add(Ticket(32))
    assert planner.next_batch(0.0).batch == stills


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(4, 170).map(lambda n: 4 * n), min_size=1, max_size=24))
def test_a_queue_that_fits_one_batch_takes_no_longer_than_in_one(sizes: list[int]) -> None:
    ladder = ladder_of_sizes([256, 1024, 4096, 16384])
    planner = Planner(16384, 64, ladder)
    for size in sizes:
        planner.add(Ticket(size))
    whole_us = ladder.predicted_us(Launch.of(sizes))
    us = 0.0
    while len(planner):
        us += ladder.predicted_us(launch_of(planner.next_batch(0.0).batch))
    assert us <= whole_us * 1.001


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 3)), max_size=8))
def test_launches_of_tickets_grow_ticket_by_ticket(shapes: list[tuple[int, int, int]]) -> None:
    queue = [
        Ticket(sequences * seqlen, num_sequences=sequences, num_frames=frames)
        for sequences, seqlen, frames in shapes
    ]
    expected = [
        Launch.of(
            [seqlen for sequences, seqlen, _ in shapes[:count] for _ in range(sequences)],
            max(frames for *_, frames in shapes[:count]),
        )
        for count in range(1, len(shapes) + 1)
    ]
    assert launches_of(queue) == expected
    assert launch_of(queue) == (expected[-1] if queue else Launch.of([]))
