"""Items are dropped when they would be late; the timeline predicts how long the device stays busy."""

from __future__ import annotations

import random

import pytest

from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.scheduler.cost import CostModel
from encoder_service.scheduler.planner import SURE, Planner, Ticket
from encoder_service.scheduler.timeline import DeviceTimeline

# One millisecond a patch and nothing else.
LADDER = BucketLadder([Bucket(size, size, size) for size in range(1, 17)], CostModel(0.0, 1000.0, 0.0))


def planner_of(*tickets: Ticket, max_patches: int = 16) -> Planner:
    planner = Planner(max_patches, 16, LADDER)
    for ticket in tickets:
        planner.add(ticket)
    return planner


def test_an_item_that_is_late_even_alone_is_dropped_with_both_numbers() -> None:
    late = Ticket(16, deadline_s=10.0 + SURE * 0.016 - 1e-4)
    plan = planner_of(late).next_batch(10.0)
    assert plan.batch == []
    assert list(plan.dropped) == [late]
    assert plan.dropped[late].details == {"needed_ms": "12.0", "left_ms": "11.9"}
    tight = Ticket(16, deadline_s=10.0 + SURE * 0.016 + 1e-4)
    assert planner_of(tight).next_batch(10.0).batch == [tight]


def test_items_ahead_in_the_same_batch_count_and_those_behind_do_not() -> None:
    first, tight, last = Ticket(8), Ticket(4, deadline_s=0.75 * 0.012 - 1e-4), Ticket(4)
    plan = planner_of(first, tight, last).next_batch(0.0)
    assert plan.batch == [first, last]
    assert list(plan.dropped) == [tight]
    fine = Ticket(4, deadline_s=0.75 * 0.012 + 1e-4)
    assert planner_of(Ticket(8), fine, Ticket(4)).next_batch(0.0).dropped == {}


def test_an_item_that_got_late_behind_a_batch_is_dropped_with_the_next_one() -> None:
    head, tight, fine = Ticket(16), Ticket(8, deadline_s=0.017), Ticket(8, deadline_s=0.019)
    planner = planner_of(head, tight, fine)
    assert planner.next_batch(0.0).batch == [head]
    plan = planner.next_batch(0.0, busy_s=SURE * 0.016)
    assert plan.batch == [fine]
    assert list(plan.dropped) == [tight]
    assert plan.dropped[tight].details["needed_ms"] == "18.0"


def test_a_batch_of_late_items_gives_way_to_one_that_is_not_late() -> None:
    head, late, fine = Ticket(16, deadline_s=0.011), Ticket(16, deadline_s=0.010), Ticket(16)
    plan = planner_of(head, late, fine).next_batch(0.0)
    assert plan.batch == [fine]
    assert set(plan.dropped) == {head, late}


@pytest.mark.parametrize("moved_s", [1.0, None])
def test_a_deadline_that_moves_back_while_its_item_waits_counts(moved_s: float | None) -> None:
    planner = planner_of(Ticket(16), ticket := Ticket(16, deadline_s=0.03))
    planner.next_batch(0.0)
    ticket.deadline_s = moved_s
    assert planner.next_batch(0.5).batch == [ticket]


def test_no_item_is_dropped_that_the_fastest_device_would_end_in_time() -> None:
    """The device takes SURE of the predicted times. A dropped item would have been late even if it had been
    launched at that moment, behind the batch on the device. Items that wait before it do not count."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    generator = random.Random(seed)
    planner = Planner(16, 16, LADDER)
    timeline = DeviceTimeline()
    ends: list[float] = []
    now_s, num_late = 0.0, 0
    for _ in range(300):
        for _ in range(generator.randint(0, 4)):
            size = generator.randint(1, 16)
            planner.add(Ticket(size, deadline_s=now_s + generator.uniform(0.0, 0.08)))
        busy_s = timeline.busy_s(now_s)
        free_s = max([now_s, *ends])
        assert busy_s <= free_s - now_s + 1e-9
        plan = planner.next_batch(now_s, busy_s)
        batch_s = SURE * planner.predicted_us(plan.batch) / 1e6
        for ticket, error in plan.dropped.items():
            assert ticket.deadline_s is not None
            if ticket.deadline_s <= now_s:
                continue
            num_late += 1
            needed_s = float(error.details["needed_ms"]) / 1e3  # rounded to 0.1 ms
            assert needed_s + 1e-4 > ticket.deadline_s - now_s
            own_s = SURE * ticket.num_patches / 1e3
            assert busy_s + own_s - 1e-4 <= needed_s <= busy_s + SURE * 16 / 1e3 + own_s + 1e-4
            assert ticket.deadline_s < free_s + batch_s + own_s + SURE * 16 / 1e3
        if plan.batch:
            ends.append(free_s + batch_s)
            timeline.launched(now_s, planner.predicted_us(plan.batch))
        while len(ends) > 1 or (ends and not plan.batch):
            now_s = ends.pop(0)
            timeline.finished(now_s)
        now_s += generator.choice([0.0, 0.001])
        now_s = min([now_s, *ends])
    assert num_late > 10


def test_the_device_is_busy_for_its_batches_less_the_time_that_passed() -> None:
    timeline = DeviceTimeline()
    assert timeline.busy_s(5.0) == 0.0
    timeline.launched(5.0, 40_000.0)
    timeline.launched(5.01, 20_000.0)
    assert timeline.busy_s(5.01) == pytest.approx(SURE * 0.06 - 0.01)
    assert timeline.busy_s(6.0) == pytest.approx(SURE * 0.02)  # the first takes longer than predicted
    timeline.finished(6.0)
    assert timeline.busy_s(6.005) == pytest.approx(SURE * 0.02 - 0.005)
    timeline.finished(6.1)
    assert timeline.busy_s(6.1) == 0.0
    timeline.launched(9.0, 10_000.0)
    assert timeline.busy_s(9.0) == pytest.approx(SURE * 0.01)
