"""DeviceEngine on a plain tower: batching, split and retry, drops, faults and stop."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from bench.harness.waiting import wait_until
from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.faults import is_device_fault
from encoder_service.engine.jobs import TowerResult
from encoder_service.errors import Cancelled, DeviceFault, Draining, InternalError
from encoder_service.ops.metrics import Metrics
from encoder_service.scheduler.buckets import BucketLadder
from encoder_service.scheduler.planner import Planner, Ticket
from encoder_service.scheduler.timeline import DeviceTimeline
from encoder_service.towers.tower import TowerInputs
from encoder_service.types import Grid, PatchItem
from tests.fakes import FakePreprocessor, FakeTower


class Rig:
    def __init__(
        self,
        max_patches: int = 1000,
        ladder: BucketLadder | None = None,
        timeline: DeviceTimeline | None = None,
    ) -> None:
        self.tower = FakeTower()
        self.faults: list[DeviceFault] = []
        self.now_s = 0.0
        self.planner = Planner(max_patches, 64, ladder)
        self.metrics = Metrics()
        self.engine = DeviceEngine(
            self.tower,
            FakePreprocessor(),
            self.planner,
            self.metrics,
            clock=lambda: self.now_s,
            on_fault=self.faults.append,
            timeline=timeline,
        )

    def submit(self, value: float, side: int = 4, **ticket: object) -> Future[TowerResult]:
        grid = Grid(1, side, side)
        pixels = torch.full((grid.num_patches, 4), value)
        return self.engine.submit(PatchItem(pixels, grid), Ticket(grid.num_patches, **ticket))  # type: ignore[arg-type]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.tower.gate.set()
    assert rig.engine.stop(10)


def test_out_of_memory_fails_the_batch_and_not_the_device(rig: Rig) -> None:
    rig.tower.fails_with = torch.OutOfMemoryError("CUDA out of memory")
    future = rig.submit(1.0)
    rig.engine.start()
    with pytest.raises(InternalError, match="out of memory"):
        future.result(10)
    rig.tower.fails_with = None
    assert (rig.submit(2.0).result(10).rows[:, :8] == 2).all()
    assert rig.faults == []


def test_halves_are_retried_without_the_failed_batchs_tensors(rig: Rig) -> None:
    """After running out of memory, the halves would not fit beside what the traceback still holds."""
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    forward = rig.tower.forward

    def recording(inputs: TowerInputs) -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in seen))
        assert inputs.pixel_values is not None
        seen.append(weakref.ref(inputs.pixel_values))
        return forward(inputs)

    rig.tower.forward = recording  # type: ignore[method-assign]
    futures = [rig.submit(1.0), rig.submit(-1.0)]
    rig.engine.start()
    assert futures[0].result(10)
    with pytest.raises(InternalError, match="poisoned"):
        futures[1].result(10)
    assert alive == [0, 0, 0]


def test_a_defect_in_an_engine_thread_fails_the_running_items() -> None:
    rig = Rig()

    def fail(num_patches: float) -> None:
        raise ValueError("a defect beside the forward")

    rig.metrics.batch_patches.observe = fail  # type: ignore[method-assign, assignment]
    future = rig.submit(1.0)
    rig.engine.start()
    with pytest.raises(DeviceFault, match="a defect beside the forward"):
        future.result(10)
    assert len(rig.faults) == 1


def test_p17_a_discarded_item_leaves_the_queue_while_the_device_is_busy(rig: Rig) -> None:
    rig.tower.gate.clear()
    running = rig.submit(1.0)
    rig.engine.start()
    wait_until(lambda: not len(rig.planner))
    ticket = Ticket(16)
    item = PatchItem(torch.ones(16, 4), Grid(1, 4, 4))
    pixels = weakref.ref(item.pixel_values)
    waiting = rig.engine.submit(item, ticket)
    del item
    assert pixels() is not None
    rig.engine.discard(ticket)
    rig.engine.discard(ticket)
    with pytest.raises(Cancelled):
        waiting.result(0)
    assert pixels() is None
    assert len(rig.planner) == 0
    assert rig.engine.counters.dropped_items == 1
    rig.tower.gate.set()
    assert running.result(10)


def test_an_engine_that_never_started_stops(rig: Rig) -> None:
    waiting = rig.submit(1.0)
    assert rig.engine.stop(0)
    with pytest.raises(Draining):
        waiting.result(0)


def test_a_refused_call_is_no_device_fault() -> None:
    refused = torch.AcceleratorError("CUDA error: invalid configuration argument")
    assert is_device_fault(refused)
    refused.error_code = 9  # type: ignore[attr-defined]
    assert not is_device_fault(refused)
    refused.error_code = 700  # type: ignore[attr-defined]
    assert is_device_fault(refused)


def test_a_callers_cancel_does_not_break_the_engine(rig: Rig) -> None:
    future = rig.submit(1.0)
    assert not future.cancel()
    rig.engine.start()
    assert future.result(10)
