"""Calibration fits the device's cost from timed replays within its time budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.engine.calibrate import MAX_ROUNDS, MIN_ROUNDS, calibrate, calibration_batches, grid_of
from encoder_service.engine.graphs import GraphRunner, StagedInputs
from encoder_service.engine.streams import InlineEvent, InlineStream, Streams
from encoder_service.scheduler.buckets import Bucket, BucketLadder, default_ladder, ladder_of_sizes
from encoder_service.scheduler.cost import CostModel, Launch
from encoder_service.towers.fused_inputs import FusedInputBuilder, FusedInputs
from encoder_service.types import Grid
from tests.unit.engine.bucketed_tower import SmallTower
from tests.unit.store.arenas import Clock

MERGE = 2


class FakeRunner:
    """Chooses buckets as the graph runner does; a launch takes what ``us_of`` says, in virtual time."""

    def __init__(self, ladder: BucketLadder, us_of: Callable[[Launch, Bucket], float]) -> None:
        self.ladder = ladder
        self.clock = Clock()
        stream = InlineStream()

        self.streams = Streams(stream, stream, stream, lambda: InlineEvent(self.clock))
        self.launched: list[tuple[Launch, Bucket]] = []
        self._us_of = us_of
        self._inputs = FusedInputBuilder(lambda grid: None, merge_size=MERGE, merges_time=False)

    def prepare(self, grids: Sequence[Grid]) -> FusedInputs:
        return self._inputs.prepare(grids)

    def can_use(self, inputs: FusedInputs) -> Bucket | None:
        return self.ladder.choose(Launch.of(inputs.seqlens))

    def stage(self, inputs: FusedInputs) -> StagedInputs:
        self.clock.now_s += 0.5e-3  # host work, which must not be measured
        pixels = torch.zeros(inputs.num_patches, 2)
        return StagedInputs(
            self.can_use(inputs), inputs.with_pixels(pixels), inputs.num_patches, inputs.num_rows
        )

    def forward(self, batch: StagedInputs) -> torch.Tensor:
        assert batch.bucket is not None
        launch = Launch.of(batch.inputs.seqlens)
        self.clock.now_s += self._us_of(launch, batch.bucket) / 1e6
        self.launched.append((launch, batch.bucket))
        return torch.zeros(1, 2)


def us_of(cost: CostModel, noise: float = 0.0, seed: int = 0) -> Callable[[Launch, Bucket], float]:
    generator = random.Random(seed)

    def us(launch: Launch, bucket: Bucket) -> float:
        exact = cost.padded_us(launch, bucket.num_patches, bucket.num_sequences, bucket.max_seqlen)
        return exact * generator.gauss(1.0, noise)

    return us


@pytest.mark.parametrize(
    "true",
    [CostModel(700.0, 1.5, 1.9e-4, 2e-3), CostModel(2500.0, 0.9, 4e-4, 0.0), CostModel(0.0, 3.0, 5e-5, 1e-2)],
)
def test_calibration_finds_the_cost_of_the_device(true: CostModel) -> None:
    runner = FakeRunner(default_ladder(16384), us_of(true))
    found = calibrate(cast("GraphRunner", runner), MERGE, clock=runner.clock)
    assert found is not None
    for field in ("fixed_us", "us_per_patch", "us_per_square", "us_per_slot_patch"):
        assert getattr(found.cost, field) == pytest.approx(getattr(true, field), rel=1e-3, abs=1e-9), field
    assert found.max_error < 1e-3
    assert not found.cost.curve


def test_a_device_whose_time_rises_in_steps_gets_a_curve() -> None:
    steps = ((64, 900.0), (784, 1000.0), (1568, 3900.0), (4096, 4100.0), (8192, 14000.0), (16384, 22000.0))
    runner = FakeRunner(default_ladder(16384), us_of(CostModel(0.0, 1.5, 2e-4, 1e-3, curve=steps)))
    found = calibrate(cast("GraphRunner", runner), MERGE, clock=runner.clock)
    assert found is not None
    assert found.cost.curve
    assert found.mean_error <= found.max_error < 0.01
    fastest = BucketLadder(runner.ladder.buckets).calibrated(found)
    assert fastest.cost is found.cost
    assert set(fastest.buckets) == set(runner.ladder.buckets)


def test_rounds_end_with_the_budget_but_not_before_two() -> None:
    slow = FakeRunner(default_ladder(4096), us_of(CostModel(1e5, 10.0, 1e-3)))
    assert calibrate(cast("GraphRunner", slow), MERGE, clock=slow.clock, budget_s=0.0) is not None
    fast = FakeRunner(default_ladder(4096), us_of(CostModel(10.0, 0.1, 1e-6)))
    assert calibrate(cast("GraphRunner", fast), MERGE, clock=fast.clock) is not None
    batches = len(calibration_batches(slow.ladder, MERGE))
    assert len(slow.launched) == batches * (1 + MIN_ROUNDS)
    assert len(fast.launched) == batches * (1 + MAX_ROUNDS)


def test_one_bucket_determines_no_cost() -> None:
    runner = FakeRunner(BucketLadder([Bucket(64, 1, 64)]), us_of(default_ladder(4).cost))
    assert calibrate(cast("GraphRunner", runner), MERGE, clock=runner.clock) is None


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 3000).map(lambda n: 16 * n), min_size=1, max_size=12), st.sampled_from([2, 4]))
def test_every_batch_is_whole_merges_in_some_bucket(sizes: list[int], merge_size: int) -> None:
    ladder = ladder_of_sizes(sizes)
    for batch in calibration_batches(ladder, merge_size):
        assert batch
        for seqlen in batch:
            assert seqlen > 0
            assert seqlen % merge_size**2 == 0
            grid = grid_of(seqlen, merge_size)
            assert grid.num_patches == seqlen
            assert grid.h % merge_size == grid.w % merge_size == 0
        assert ladder.choose(Launch.of(batch)) is not None


def test_the_graph_runner_is_timed_through_its_own_launch() -> None:
    clock = Clock()

    class TimedTower(SmallTower):
        def __call__(self, inputs: FusedInputs) -> torch.Tensor:
            clock.now_s += 1e-3 + 1e-6 * inputs.num_patches
            return torch.zeros(inputs.num_patches // 4, self.width)

    runner = GraphRunner(TimedTower(), default_ladder(784), torch.device("cpu"), capture=False, clock=clock)
    found = calibrate(runner, MERGE, clock=clock)
    assert found is not None
    assert found.cost.fixed_us == pytest.approx(1000, rel=0.01)
    assert found.cost.us_per_patch == pytest.approx(1.0, rel=0.01)
    assert runner.counters.eager_runs == 0
