"""Two batches in flight: order, failures, faults and stop. Every item is answered, in any order of events."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.harness.waiting import wait_until
from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.jobs import TowerResult
from encoder_service.errors import Cancelled, DeviceFault, Draining, InternalError
from encoder_service.ops.metrics import Metrics
from encoder_service.scheduler.planner import Planner, Ticket
from encoder_service.scheduler.timeline import LEAD_S, LIKELY, DeviceTimeline
from encoder_service.types import Grid, PatchItem
from tests.fakes import FakePreprocessor, FakeTower
from tests.unit.engine.held_launcher import POISON, HeldBatch, HeldLauncher

PATCHES = 16
LOST = torch.AcceleratorError("CUDA error: unspecified launch failure")


class CountedDelays(DeviceTimeline):
    num_delays = 0

    def batch_delay_s(self, now_s: float) -> float:
        delay_s = super().batch_delay_s(now_s)
        self.num_delays += delay_s > 0.0
        return delay_s


class PredictingPlanner(Planner):
    """Predicts the same time for every batch."""

    batch_us = 0.0

    def predicted_us(self, tickets: Iterable[Ticket]) -> float:
        return self.batch_us


class Rig:
    """items_per_batch: number of items in a full batch."""

    def __init__(self, items_per_batch: int = 1) -> None:
        self.planner = PredictingPlanner(PATCHES * items_per_batch, 64)
        self.timeline = CountedDelays()
        self.launcher = HeldLauncher()
        self.faults: list[DeviceFault] = []
        self.metrics = Metrics()
        self.now_s = 0.0
        self.engine = DeviceEngine(
            FakeTower(),
            FakePreprocessor(),
            self.planner,
            self.metrics,
            clock=lambda: self.now_s,
            on_fault=self.faults.append,
            launcher=self.launcher,
            timeline=self.timeline,
        )

    def submit(self, value: float, ticket: Ticket | None = None) -> Future[TowerResult]:
        item = PatchItem(torch.full((PATCHES, 4), value), Grid(1, 4, 4))
        return self.engine.submit(item, ticket or Ticket(PATCHES))

    def batch(self, index: int) -> HeldBatch:
        wait_until(lambda: len(self.launcher.launched) > index)
        return self.launcher.launched[index]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.launcher.end_all()
    assert rig.engine.stop(10)


def rows_value(future: Future[TowerResult]) -> float:
    rows = future.result(10).rows
    assert (rows == rows[0, 0]).all()
    return float(rows[0, 0])


def test_two_batches_are_in_flight_and_no_third(rig: Rig) -> None:
    futures = [rig.submit(float(value)) for value in range(5)]
    rig.engine.start()
    for index in range(5):
        rig.batch(min(index + 1, 4))
        assert len(rig.planner) == max(0, 3 - index)
        rig.batch(index).end()
        assert rows_value(futures[index]) == index
    assert rig.launcher.most_in_flight == 2


def test_p33_a_poisoned_batch_is_split_while_another_is_in_flight() -> None:
    rig = Rig(items_per_batch=4)
    rig.planner.batch_us = 600e6  # until the batch is full
    rig.engine.start()
    before = rig.submit(9.0)
    rig.batch(0)
    futures = [rig.submit(value) for value in (1.0, POISON, 3.0, 4.0)]
    # The first half fails again; its first item runs beside ``before``, the rest waits for room.
    wait_until(lambda: len(rig.launcher.launched) == 2)
    assert rig.launcher.launched[1].values == [1.0]
    rig.launcher.end_all()
    assert rows_value(before) == 9
    assert [rows_value(futures[index]) for index in (0, 2, 3)] == [1, 3, 4]
    with pytest.raises(InternalError, match="poisoned"):
        futures[1].result(10)
    assert [batch.values for batch in rig.launcher.launched] == [[9], [1], [3, 4]]
    assert rig.engine.counters.retried_batches == 2
    assert rig.engine.stop(10)


def test_items_that_have_their_rows_keep_them_when_host_memory_runs_out() -> None:
    rig = Rig(items_per_batch=2)
    futures = [rig.submit(float(value)) for value in range(2)]
    rig.engine.start()
    rig.batch(0).error_at_collect = MemoryError("host")
    rig.batch(0).end()
    assert rows_value(futures[0]) == 0
    with pytest.raises(InternalError, match="MemoryError"):
        futures[1].result(10)
    assert rig.engine.stop(10)


def test_p32_p36_a_fault_in_the_wait_fails_everything_once(rig: Rig) -> None:
    futures = [rig.submit(float(value)) for value in range(4)]
    rig.engine.start()
    rig.batch(1)
    rig.batch(0).end(LOST)
    for future in futures:
        with pytest.raises(DeviceFault, match="unspecified launch failure") as caught:
            future.result(10)
        assert caught.value.retryable
    wait_until(lambda: rig.faults)
    with pytest.raises(DeviceFault):
        rig.submit(5.0)
    rig.batch(1).end(LOST)
    assert rig.engine.stop(10)
    assert len(rig.faults) == 1


def test_p32_a_fault_in_a_launch_fails_what_is_in_flight_without_waiting_for_it(rig: Rig) -> None:
    rig.engine.start()
    running = rig.submit(1.0)
    rig.batch(0)
    rig.launcher.fails_with = LOST
    failing = rig.submit(2.0)
    for future in (running, failing):
        with pytest.raises(DeviceFault):
            future.result(10)
    rig.batch(0).end()  # its rows come too late; no item is answered twice
    assert rig.engine.stop(10)
    assert len(rig.faults) == 1


def test_p36_a_device_fault_behind_another_error_is_recognised(rig: Rig) -> None:
    """Triton raises an earlier batch's fault as an error of its own."""
    rig.launcher.fails_with = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    rig.launcher.lost_with = LOST
    future = rig.submit(1.0)
    rig.engine.start()
    with pytest.raises(DeviceFault, match="unspecified launch failure"):
        future.result(10)


def test_p37_stop_finishes_what_is_in_flight_and_refuses_the_rest() -> None:
    rig = Rig()
    futures = [rig.submit(float(value)) for value in range(3)]
    rig.engine.start()
    rig.batch(1)
    assert not rig.engine.stop(0.02)
    with pytest.raises(Draining):
        futures[2].result(10)
    with pytest.raises(Draining):
        rig.submit(4.0)
    assert not futures[0].done()
    rig.launcher.end_all()
    assert rig.engine.stop(10)
    assert [rows_value(future) for future in futures[:2]] == [0, 1]


def test_times_are_the_devices_and_never_counted_twice(rig: Rig) -> None:
    rig.now_s = 100.0
    futures = [rig.submit(float(value)) for value in range(2)]
    rig.engine.start()
    rig.batch(1).device_s = 0.5
    rig.now_s = 101.0
    rig.launcher.end_all()
    results = [future.result(10) for future in futures]
    assert [result.tower_ms for result in results] == [250, 500]
    assert [result.started_s for result in results] == [100.75, 100.5]
    counters = rig.engine.counters
    assert (counters.batches, counters.items, counters.patches, counters.busy_s) == (2, 2, 32, 0.75)
    assert rig.metrics.registry.get_sample_value("ve_step_host_seconds_count") == 2


ACTIONS = st.lists(
    st.one_of(
        st.sampled_from(["submit", "submit", "submit", "poison", "discard", "end", "end newest"]),
        st.sampled_from(["fail", "stop"]),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(items_per_batch=st.integers(1, 4), actions=ACTIONS, lost=st.booleans())
def test_every_item_is_answered_in_any_order_of_events(
    items_per_batch: int, actions: list[str], lost: bool
) -> None:
    rig = Rig(items_per_batch)
    rig.engine.start()
    values = itertools.count(1)
    tickets: list[Ticket] = []
    futures: list[tuple[float, Future[TowerResult]]] = []
    for action in actions:
        open_batches = [batch for batch in list(rig.launcher.launched) if not batch.ended.is_set()]
        if action in ("submit", "poison"):
            value = POISON if action == "poison" else float(next(values))
            tickets.append(Ticket(PATCHES))
            try:
                futures.append((value, rig.submit(value, tickets[-1])))
            except (Draining, DeviceFault):
                tickets.pop()
        elif action == "discard" and tickets:
            rig.engine.discard(tickets[-1])
        elif action == "end" and open_batches:
            open_batches[0].end()
        elif action == "end newest" and open_batches:
            open_batches[-1].end()
        elif action == "fail" and open_batches:
            open_batches[0].end(LOST if lost else RuntimeError("one batch"))
        elif action == "stop" and len(futures) > 5:
            rig.engine.stop(0)
    if "stop" not in actions:
        rig.launcher.end_all()
        for _, future in futures:
            future.exception(10)
    rig.launcher.end_all()
    assert rig.engine.stop(10)
    for value, future in futures:
        assert future.done()
        error = future.exception(0)
        if error is None:
            assert rows_value(future) == value != POISON
        else:
            assert isinstance(error, InternalError | DeviceFault | Draining | Cancelled)
            if isinstance(error, InternalError):
                assert value == POISON or "one batch" in error.message
    assert len(rig.faults) <= 1
    assert len(rig.planner) == 0
    if not rig.faults:
        assert rig.launcher.num_in_flight == 0


@pytest.fixture
def predicting() -> Iterator[Rig]:
    """With batches of up to four items, each predicted to take a second."""
    rig = Rig(items_per_batch=4)
    rig.planner.batch_us = 1e6
    rig.engine.start()
    yield rig
    rig.launcher.end_all()
    assert rig.engine.stop(10)


def test_while_the_device_is_busy_a_batch_waits_for_more_items(predicting: Rig) -> None:
    rig = predicting
    first = rig.submit(1.0)
    rig.batch(0)
    later = [rig.submit(2.0)]
    wait_until(lambda: rig.timeline.num_delays)
    later.append(rig.submit(3.0))
    assert rig.launcher.num_in_flight == 1
    assert len(rig.planner) == 2
    rig.batch(0).end()
    rig.batch(1).end()
    assert rig.batch(1).values == [2.0, 3.0]
    assert [rows_value(future) for future in (first, *later)] == [1.0, 2.0, 3.0]


def test_a_full_batch_does_not_wait(predicting: Rig) -> None:
    rig = predicting
    rig.submit(1.0)
    rig.batch(0)
    rig.submit(2.0)
    wait_until(lambda: rig.timeline.num_delays)
    for value in (3.0, 4.0, 5.0):
        rig.submit(value)
    assert rig.batch(1).values == [2.0, 3.0, 4.0, 5.0]
    wait_until(lambda: rig.launcher.num_in_flight == 2)


def test_a_batch_is_made_before_the_device_needs_it(predicting: Rig) -> None:
    rig = predicting
    rig.submit(1.0)
    rig.batch(0)
    rig.now_s = LIKELY * 1.0 - LEAD_S + 1e-6
    rig.submit(2.0)
    assert rig.batch(1).values == [2.0]


def test_a_stop_ends_the_wait_for_more_items(predicting: Rig) -> None:
    rig = predicting
    rig.planner.batch_us = 600e6
    rig.submit(1.0)
    rig.batch(0)
    waiting = rig.submit(2.0)
    wait_until(lambda: rig.timeline.num_delays)
    rig.launcher.end_all()
    assert rig.engine.stop(60), "the batch was held for minutes"
    with pytest.raises(Draining):
        waiting.result(10)
