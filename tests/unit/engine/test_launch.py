"""The steps of a launch on a device that runs work later, in any order that its events allow."""

from __future__ import annotations

import itertools
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.engine import launch
from encoder_service.engine.graphs import Captured, GraphRunner
from encoder_service.engine.launch import LaunchedBatch, TowerLauncher
from encoder_service.engine.rows import RowCopier
from encoder_service.engine.staging import PixelStaging
from encoder_service.engine.streams import Streams
from encoder_service.errors import InternalError, PixelTensorMismatch
from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.towers.fused_inputs import FusedInputs
from encoder_service.types import FrameItem, Grid, PatchItem, TowerItem
from tests.fakes import FakePreprocessor
from tests.unit.engine.bucketed_tower import PATCH_DIM, WIDTH, SmallTower
from tests.unit.engine.stepped_device import SteppedDevice

CPU = torch.device("cpu")
FRAMES = 2
LADDER = BucketLadder([Bucket(16, 4, 16, FRAMES), Bucket(32, 4, 16, FRAMES), Bucket(48, 6, 48, FRAMES)])
MAX_ROWS = 48 // 4


class PoolTower(SmallTower):
    """Leaves its rows in memory that its next forward overwrites, as captured graphs do."""

    device = CPU
    patch_size = 1
    temporal_patch_size = 1

    def __init__(self, *, merges_time: bool = False) -> None:
        super().__init__(merges_time=merges_time)
        self.pool = torch.empty(MAX_ROWS, WIDTH)

    def num_rows(self, grid: Grid) -> int:
        return (1 if self.merges_time else grid.t) * grid.h * grid.w // 4

    def __call__(self, inputs: FusedInputs) -> torch.Tensor:
        rows = super().__call__(inputs)
        if len(rows) > MAX_ROWS:
            return rows
        self.pool[: len(rows)] = rows
        return self.pool[: len(rows)]


class PixelPatches(FakePreprocessor):
    """A patch is one pixel, twice."""

    patch_dim = PATCH_DIM

    def patchify(self, frames_THWC: torch.Tensor) -> torch.Tensor:
        return frames_THWC.reshape(-1, 3).repeat(1, 2).float() / 64


class Replay:
    """A captured graph of the tower in one bucket."""

    def __init__(self, forward: Callable[[], object]) -> None:
        self.replay = forward


class ReplayingRunner(GraphRunner):
    """Replays the forward pass of every bucket."""

    def capture_in(self, tower: PoolTower) -> None:
        for bucket in self.ladder.buckets:
            inputs = self._static(self._filled(bucket))
            self._graphs[bucket] = Captured(Replay(partial(tower, inputs)), tower.pool)  # type: ignore[arg-type]


def on_a_gpu(width: int, dtype: torch.dtype, _: torch.device, streams: Streams) -> RowCopier:
    """A copier that takes destinations for host memory."""
    return RowCopier(width, dtype, torch.device("cuda", 0), streams)


def launcher_of(tower: PoolTower, runner: GraphRunner, clock: Callable[[], float]) -> TowerLauncher:
    return TowerLauncher(tower, PixelPatches(), runner, clock=clock)  # type: ignore[arg-type]


class Rig:
    """replayed: forward passes are replays. on_host: destinations count as host memory instead of the
    device's."""

    def __init__(
        self,
        device: SteppedDevice,
        *,
        merges_time: bool = False,
        replayed: bool = False,
        on_host: bool = False,
    ) -> None:
        self.device = device
        self.tower = PoolTower(merges_time=merges_time)
        clock = itertools.count().__next__
        runner = ReplayingRunner(self.tower, LADDER, CPU, capture=False, clock=clock, streams=device.streams)
        with mock.patch.object(launch, "RowCopier", on_a_gpu if on_host else RowCopier):
            self.launcher = launcher_of(self.tower, runner, clock)
        if replayed:
            runner.capture_in(self.tower)

    def expected(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        """Each item's rows from a separate forward pass."""
        rows = []
        for item in items:
            frames = isinstance(item, FrameItem)
            pixels = PixelPatches().patchify(item.frames_THWC) if frames else item.pixel_values  # type: ignore[union-attr]
            inputs = self.tower.prepare([item.grid]).with_pixels(pixels)
            rows.append(SmallTower.__call__(self.tower, inputs))
        return rows


def still(value: float = 0.0) -> PatchItem:
    return PatchItem(torch.full((4, PATCH_DIM), value), Grid(1, 2, 2))


def random_item(generator: random.Random) -> TowerItem:
    grid = Grid(generator.randint(1, FRAMES), 2 * generator.randint(1, 3), 2 * generator.randint(1, 2))
    torch.manual_seed(generator.randrange(1 << 30))
    if generator.random() < 0.5:
        return FrameItem(torch.randint(0, 256, (grid.t, grid.h, grid.w, 3), dtype=torch.uint8), grid)
    return PatchItem(torch.randn(grid.num_patches, PATCH_DIM), grid)


def overwrite(item: TowerItem) -> None:
    """What the allocator may do to an item's pixels after their last use."""
    (item.frames_THWC if isinstance(item, FrameItem) else item.pixel_values).fill_(99)


class Favouring:
    """Lets one stream run ahead of the others for a while, then another."""

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator
        self.first = True

    def __call__(self, count: int) -> int:
        if self.generator.random() < 0.04:
            self.first = not self.first
        if self.generator.random() < 0.1:
            return self.generator.randrange(count)
        return 0 if self.first else count - 1


class Checker:
    """Batches in flight and their expected rows. generator: chooses which items have a destination."""

    def __init__(self, rig: Rig, generator: random.Random) -> None:
        self.rig = rig
        self.generator = generator
        self.in_flight: deque[
            tuple[LaunchedBatch, list[TowerItem], list[torch.Tensor], list[torch.Tensor | None]]
        ] = deque()

    def launch(self, items: list[TowerItem]) -> None:
        expected = self.rig.expected(items)
        share = self.generator.choice((0, 0.5, 1))
        destinations = [
            torch.full_like(rows, torch.nan) if self.generator.random() < share else None for rows in expected
        ]
        launched = self.rig.launcher.launch(items, destinations)
        self.in_flight.append((launched, items, expected, destinations))

    def finish(self, meanwhile: list[TowerItem] | None = None) -> None:
        """Waits for the oldest batch; ``meanwhile`` is launched before its rows are handed out."""
        launched, items, expected, destinations = self.in_flight.popleft()
        launched.wait()
        for item in items:
            overwrite(item)
        if meanwhile is not None:
            self.launch(meanwhile)
        collected = list(launched.collect())
        for rows, right, destination in zip(collected, expected, destinations, strict=True):
            torch.testing.assert_close(rows, right, rtol=1e-5, atol=1e-5)
            assert destination is None or rows is destination
            assert rows.untyped_storage().nbytes() == rows.nbytes


@pytest.mark.parametrize(("replayed", "on_host"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("merges_time", [False, True])
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1 << 30), actions=st.lists(st.sampled_from("llfss"), max_size=30))
def test_p14_p20_p30_rows_are_right_in_any_order_of_the_device(
    merges_time: bool, replayed: bool, on_host: bool, seed: int, actions: list[str]
) -> None:
    generator = random.Random(seed)
    device = SteppedDevice(Favouring(generator))
    rig = Rig(device, merges_time=merges_time, replayed=replayed, on_host=on_host)
    checker = Checker(rig, generator)
    for action in actions:
        if action == "s":
            for _ in range(generator.randint(1, 8)):
                device.step()
        elif action == "f" or len(checker.in_flight) == 2:
            if checker.in_flight:
                checker.finish([random_item(generator)] if generator.random() < 0.3 else None)
        elif generator.random() < 0.1:
            with pytest.raises(PixelTensorMismatch, match=r"needs \(4, 6\)"):
                rig.launcher.launch([PatchItem(torch.zeros(3, PATCH_DIM), Grid(1, 2, 2))])
        else:
            checker.launch([random_item(generator) for _ in range(generator.randint(1, 5))])
    while checker.in_flight:
        checker.finish()


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1 << 30), num_batches=st.integers(3, 6))
def test_p14_p30_more_batches_in_flight_than_slots_keep_their_own_pixels_and_rows(
    seed: int, num_batches: int
) -> None:
    generator = random.Random(seed)
    rig = Rig(SteppedDevice(Favouring(generator)), replayed=generator.random() < 0.5)
    checker = Checker(rig, generator)
    for _ in range(num_batches):
        checker.launch([random_item(generator) for _ in range(generator.randint(1, 3))])
    while checker.in_flight:
        checker.finish()


def test_a_destination_that_does_not_match_is_refused_with_both_shapes() -> None:
    rig = Rig(SteppedDevice(lambda count: 0))
    strided = torch.empty(WIDTH, 2)[:, :1].T
    for wrong in (torch.empty(2, WIDTH), torch.empty(1, WIDTH, dtype=torch.float16), strided):
        with pytest.raises(InternalError, match=r"destination is torch\.float.*rows are .* \(1, \d"):
            rig.launcher.launch([still()], [wrong])
    assert not rig.tower.forwards


def test_p21_a_batch_that_failed_half_way_writes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destinations may already belong to other batches."""
    device = SteppedDevice(lambda count: 0)
    rig = Rig(device)
    before = rig.launcher.launch([still(1.0)])
    destination = torch.zeros(1, WIDTH)

    def fail(batch: object, ended: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("encoder_service.engine.rows.BatchRows.send", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        rig.launcher.launch([still(2.0)], [destination])
    assert torch.equal(destination, rig.expected([still(2.0)])[0])
    assert not any(stream.queue for stream in device.all)
    monkeypatch.undo()
    before.wait()
    assert torch.equal(next(before.collect()), rig.expected([still(1.0)])[0])


def test_uploads_overlap_earlier_batches_and_never_enter_a_slot_in_use() -> None:
    device = SteppedDevice(lambda count: 0)
    staging = PixelStaging(64, 1, CPU, device.streams)
    device.compute.run_on()
    uploads = []
    for value in (1.0, 2.0, 3.0):
        uploads.append(staging.upload([torch.full((1, 4), value)], [0]))
        staging.release(uploads[-1])

    def values() -> list[float]:
        return [float(uploaded.pieces[0][0, 0]) for uploaded in uploads]

    device.upload.run_on()
    assert values() == [1.0, 2.0, 1.0]
    assert device.upload.queue, "the third batch waits until the first one's slot was read"
    device.compute.run_on()
    device.upload.run_on()
    assert values() == [3.0, 2.0, 3.0]


def test_p14_pixels_are_kept_until_their_batch_was_awaited() -> None:
    device = SteppedDevice(lambda count: 0)
    rig = Rig(device)
    item = still()
    pixels = weakref.ref(item.pixel_values)
    launched = rig.launcher.launch([item])
    del item
    while device.step():
        pass
    assert pixels() is not None
    launched.wait()
    assert pixels() is None


def test_the_hosts_work_does_not_count_as_the_devices() -> None:
    now_s = 0.0

    class SlowTower(PoolTower):
        def prepare(self, grids: Sequence[Grid]) -> FusedInputs:
            nonlocal now_s
            now_s += 1.0
            return super().prepare(grids)

        def __call__(self, inputs: FusedInputs) -> torch.Tensor:
            nonlocal now_s
            now_s += 4.0
            return super().__call__(inputs)

    tower = SlowTower()
    runner = GraphRunner(tower, LADDER, CPU, capture=False, clock=lambda: now_s)
    launcher = launcher_of(tower, runner, lambda: now_s)
    for grid in (Grid(1, 4, 4), Grid(1, 8, 8)):
        item = PatchItem(torch.zeros(grid.num_patches, PATCH_DIM), grid)
        assert launcher.launch([item]).wait() == 4.0


def test_p27_warming_up_runs_patches_and_frames_of_each_grid() -> None:
    tower = PoolTower()
    runner = GraphRunner(tower, LADDER, CPU, capture=False, clock=itertools.count().__next__)
    launcher_of(tower, runner, time.monotonic).warm_up([Grid(1, 2, 2), Grid(1, 4, 4)])
    assert [inputs.num_patches for inputs in tower.forwards] == [16, 16, 16, 16]
    assert runner.counters.padded_patches == 2 * 12


def test_a_fault_of_the_device_shows_in_the_wait_and_the_probe() -> None:
    device = SteppedDevice(lambda count: 0)
    rig = Rig(device)
    launched = rig.launcher.launch([still()])
    device.failure = torch.AcceleratorError("CUDA error: unspecified launch failure")
    with pytest.raises(torch.AcceleratorError, match="unspecified"):
        launched.wait()
    with pytest.raises(torch.AcceleratorError, match="unspecified"):
        rig.launcher.probe()
