"""A step's order on a device that runs when told: no slot is reused early, whatever the device's order."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.engine.copies import Copies, CopyList, HostCopies, Memory, TorchCopies
from encoder_service.engine.graphs import Captured, GraphRunner
from encoder_service.engine.launch import LaunchedBatch, TowerLauncher, host_seconds
from encoder_service.engine.rows import NUM_HOST_SLOTS, HostRows, PlacedRows
from encoder_service.engine.streams import streams_of
from encoder_service.errors import InternalError, PixelTensorMismatch
from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.towers.fused_inputs import BatchShape, FusedInputs, ShapeRows, TablePlaces
from encoder_service.types import FrameItem, Grid, PatchItem, TowerItem
from tests.fakes import FakePreprocessor
from tests.parity.tower_cases import fresh_seed
from tests.unit.engine.bucketed_tower import PATCH_DIM, WIDTH, SmallTower
from tests.unit.engine.stepped_device import Record, SteppedDevice, Wait

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

    def check_grid(self, grid: Grid) -> None:
        pass

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


class SteppedGraph:
    """What a captured graph's replay is to the device: work in the compute stream, in known memory."""

    def __init__(self, device: SteppedDevice, work: Callable[[], object]) -> None:
        self.device = device
        self.work = work

    def replay(self) -> None:
        self.device.compute.run(self.work)


class Rig:
    """replayed: forward passes are replays, which leave their rows in the pool's memory."""

    def __init__(
        self,
        device: SteppedDevice,
        *,
        merges_time: bool = False,
        replayed: bool = False,
        copies: Copies | None = None,
    ) -> None:
        self.device = device
        self.tower = PoolTower(merges_time=merges_time)
        self.preprocessor = PixelPatches()
        self.runner = GraphRunner(
            self.tower,
            LADDER,
            CPU,
            capture=False,
            clock=itertools.count().__next__,
            streams=device.streams,
            copies=copies,
        )
        self.launcher = TowerLauncher(
            self.tower,  # type: ignore[arg-type]
            self.preprocessor,
            self.runner,
            clock=itertools.count().__next__,
        )
        if replayed:
            self.runner._graphs = {bucket: self.captured(bucket) for bucket in LADDER.buckets}

    def captured(self, bucket: Bucket) -> Captured:
        inputs, pool = self.runner._inputs[bucket], self.tower.pool
        graph = SteppedGraph(self.device, lambda: self.tower(inputs))
        return Captured(graph, pool, Memory(pool))  # type: ignore[arg-type]

    def expected(self, items: list[TowerItem]) -> list[torch.Tensor]:
        """Each item's rows from a forward of its own."""
        found = []
        for item in items:
            pixels = (
                self.preprocessor.patchify(item.frames_THWC)
                if isinstance(item, FrameItem)
                else item.pixel_values
            )
            rows = SmallTower.__call__(self.tower, self.tower.prepare([item.grid]).with_pixels(pixels))
            found.append(rows)
        return found


def host_rows(launcher: TowerLauncher) -> HostRows:
    sink = getattr(launcher._sink, "_others", launcher._sink)
    assert isinstance(sink, HostRows)
    return sink


def random_item(generator: random.Random) -> TowerItem:
    grid = Grid(generator.randint(1, FRAMES), 2 * generator.randint(1, 3), 2 * generator.randint(1, 2))
    torch.manual_seed(generator.randrange(1 << 30))
    if generator.random() < 0.5:
        return FrameItem(torch.randint(0, 256, (grid.t, grid.h, grid.w, 3), dtype=torch.uint8), grid)
    return PatchItem(torch.randn(grid.num_patches, PATCH_DIM), grid)


def overwrite(item: TowerItem) -> None:
    """What the allocator may do to an item's pixels once nobody needs them."""
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
    """Batches in flight and what their rows have to be. generator: says which items' rows go to a place that
    was reserved for them; without it none's do."""

    def __init__(self, rig: Rig, generator: random.Random | None = None) -> None:
        self.rig = rig
        self.generator = generator
        self.in_flight: deque[
            tuple[LaunchedBatch, list[TowerItem], list[torch.Tensor], list[torch.Tensor | None]]
        ] = deque()

    def launch(self, items: list[TowerItem]) -> None:
        expected = self.rig.expected(items)
        places: list[torch.Tensor | None] = [None] * len(items)
        if self.generator is not None:
            share = self.generator.choice((0, 0.5, 1))
            places = [
                torch.full_like(rows, torch.nan) if self.generator.random() < share else None
                for rows in expected
            ]
        self.in_flight.append((self.rig.launcher.launch(items, places), items, expected, places))

    def finish(self, meanwhile: list[TowerItem] | None = None) -> None:
        """Waits for the oldest batch; ``meanwhile`` is launched before its rows are given out."""
        launched, items, expected, places = self.in_flight.popleft()
        launched.wait()
        for item in items:
            overwrite(item)
        if meanwhile is not None:
            self.launch(meanwhile)
        found = list(launched.collect())
        assert len(found) == len(expected)
        for rows, right, place in zip(found, expected, places, strict=True):
            torch.testing.assert_close(rows, right, rtol=1e-5, atol=1e-5)
            assert place is None or rows is place
            assert rows.untyped_storage().nbytes() == rows.nbytes


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("merges_time", [False, True])
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1 << 30), actions=st.lists(st.sampled_from("llfss"), max_size=30))
def test_p14_p20_p30_rows_are_right_in_any_order_of_the_device(
    merges_time: bool, replayed: bool, seed: int, actions: list[str]
) -> None:
    generator = random.Random(seed)
    device = SteppedDevice(Favouring(generator))
    rig = Rig(device, merges_time=merges_time, replayed=replayed)
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
    sink = host_rows(rig.launcher)
    assert (len(sink.device_slots), len(sink.host_slots)) == (2, NUM_HOST_SLOTS)


def test_a_place_that_is_not_the_rows_is_refused_with_both_shapes() -> None:
    rig = Rig(SteppedDevice(lambda count: 0))
    item = PatchItem(torch.zeros(4, PATCH_DIM), Grid(1, 2, 2))
    strided = torch.empty(WIDTH, 2)[:, :1].T
    for place in (torch.empty(2, WIDTH), torch.empty(1, WIDTH, dtype=torch.float16), strided):
        with pytest.raises(InternalError, match=r"torch\.float.* was reserved, .* \(1, \d+\)"):
            rig.launcher.launch([item], [place])
    assert not rig.tower.forwards


def test_p21_places_of_an_abandoned_batch_are_still_when_they_are_given_back() -> None:
    """Whoever gets them next writes in another stream."""
    device = SteppedDevice(lambda count: 0)
    sink = PlacedRows(HostRows(WIDTH, torch.float32, CPU, device.streams, MAX_ROWS))
    place = torch.zeros(2, WIDTH)
    target = sink.open([2], [place])
    rows = torch.ones(2, WIDTH)
    target.write(rows)
    device.compute.run(lambda: place.fill_(7))  # what the batch would still do
    target.abandon()
    assert bool((place == 7).all())
    assert not device.compute.queue


def test_pixels_travel_while_the_batches_before_have_not_run_and_never_into_a_slot_in_use() -> None:
    device = SteppedDevice(lambda count: 0)
    rig = Rig(device)
    device.compute.run_on()
    items = [PatchItem(torch.full((4, PATCH_DIM), float(value)), Grid(1, 2, 2)) for value in (1, 2, 3)]
    batches = [rig.launcher.launch([item]) for item in items[:2]]
    device.upload.run_on()
    assert not device.upload.queue
    assert not rig.tower.forwards
    staging = rig.launcher._pixels
    assert staging is not None
    slots = [next(staging._slots) for _ in range(2)]
    assert [slot.read(0, items[0].pixel_values)[0, 0] for slot in slots] == [1, 2]
    batches.append(rig.launcher.launch([items[2]]))  # two before it: this waits on the host for none
    device.upload.run_on()
    assert device.upload.queue
    assert [slot.read(0, items[0].pixel_values)[0, 0] for slot in slots] == [1, 2]
    device.compute.run_on()
    device.upload.run_on()
    assert [slot.read(0, items[0].pixel_values)[0, 0] for slot in slots] == [3, 2]
    assert len(rig.tower.forwards) == 2


def test_no_pixels_travel_before_the_compute_stream_has_given_the_slot_its_first_zeros() -> None:
    device = SteppedDevice(lambda count: 0)
    rig = Rig(device)
    rig.launcher.launch([PatchItem(torch.zeros(4, PATCH_DIM), Grid(1, 2, 2))])
    device.upload.run_on()
    copied = len(device.upload.queue)
    device.compute.run_on()
    device.upload.run_on()
    assert (copied, len(device.upload.queue)) == (3, 0)  # the wait, the copies, their event


def test_the_hosts_own_work_does_not_count_as_the_devices() -> None:
    now_s = 0.0

    class SlowShape(BatchShape):
        def write(self, places: TablePlaces) -> None:
            nonlocal now_s
            now_s += 1.0
            super().write(places)

    class SlowlyPadded(PoolTower):
        def shape_of(self, shapes: ShapeRows) -> BatchShape:
            nonlocal now_s
            now_s += 1.0
            return SlowShape(shapes, merge_size=2, merges_time=False)

        def __call__(self, inputs: FusedInputs) -> torch.Tensor:
            nonlocal now_s
            now_s += 4.0
            return super().__call__(inputs)

    tower = SlowlyPadded()
    runner = GraphRunner(tower, LADDER, CPU, capture=False, clock=lambda: now_s)
    launcher = TowerLauncher(tower, PixelPatches(), runner, clock=lambda: now_s)  # type: ignore[arg-type]
    for grid in (Grid(1, 4, 4), Grid(1, 8, 8)):
        item = PatchItem(torch.zeros(grid.num_patches, PATCH_DIM), grid)
        assert launcher.launch([item]).wait() == 4.0


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1 << 30))
def test_p30_launches_in_a_row_without_any_wait_keep_their_own_metadata(seed: int) -> None:
    """Without the limit of two in flight: the staging waits by itself before it overwrites."""
    generator = random.Random(seed)
    rig = Rig(SteppedDevice(Favouring(generator)))
    expected, found = [], []
    for _ in range(6):
        item = random_item(generator)
        pixels = item.pixel_values if isinstance(item, PatchItem) else torch.ones(item.grid.num_patches, 6)
        expected += rig.expected([PatchItem(pixels, item.grid)])
        rig.runner.launch(rig.runner.prepare([item.grid]), [pixels], lambda rows: found.append(rows.clone()))
    while rig.device.step():
        pass
    for rows, right in zip(found, expected, strict=True):
        torch.testing.assert_close(rows, right, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1 << 30), num_batches=st.integers(3, 6))
def test_p14_p30_more_batches_in_flight_than_slots_keep_their_own_rows(seed: int, num_batches: int) -> None:
    """Rows lie in memory that the next batch overwrites, whether or not a slot is free."""
    generator = random.Random(seed)
    rig = Rig(SteppedDevice(Favouring(generator)), replayed=generator.random() < 0.5)
    checker = Checker(rig, generator if generator.random() < 0.5 else None)
    for _ in range(num_batches):
        checker.launch([random_item(generator) for _ in range(generator.randint(1, 3))])
    while checker.in_flight:
        checker.finish()
    sink = host_rows(checker.rig.launcher)
    assert 2 <= len(sink.device_slots) <= max(2, num_batches)


def test_p21_places_of_an_abandoned_replay_are_still_when_they_are_given_back() -> None:
    device = SteppedDevice(lambda count: 0)
    sink = PlacedRows(HostRows(WIDTH, torch.float32, CPU, device.streams, MAX_ROWS))
    place, rows = torch.zeros(2, WIDTH), torch.ones(4, WIDTH)
    target = sink.open([2], [place])
    target.write_memory(Memory(rows), 2)
    ended = device.streams.make_event()
    device.compute.record(ended)  # type: ignore[arg-type]
    assert target.send(ended) is not None
    target.abandon()
    assert bool((place == 1).all())
    assert not device.place.queue
    rows.fill_(7)
    assert bool((place == 1).all())


def test_rows_next_to_each_other_on_both_sides_are_one_copy() -> None:
    device = SteppedDevice(lambda count: 0)
    sink = PlacedRows(HostRows(WIDTH, torch.float32, CPU, device.streams, MAX_ROWS))
    arena, rows = torch.zeros(12, WIDTH), torch.randn(9, WIDTH)
    counts, starts = [2, 1, 3, 1, 2], [0, 2, 4, 7, 10]
    places = [arena[start : start + count] for start, count in zip(starts, counts, strict=True)]
    seen: list[list[list[int]]] = []

    class Watched(HostCopies):
        def many(self, copies: CopyList, count: int, stream: int) -> None:
            seen.append(copies.first(count))
            super().many(copies, count, stream)

    sink._others.copies = Watched()
    target = sink.open(counts, places)
    target.write_memory(Memory(rows), 9)
    target.send(device.streams.make_event())
    target.wait()
    assert [[size for _, _, size in one] for one in seen] == [[3 * WIDTH * 4, 4 * WIDTH * 4, 2 * WIDTH * 4]]
    assert torch.equal(torch.cat(list(target.collect())), rows)
    assert not arena[3].any()
    assert not arena[8:10].any()


def test_who_was_waited_for_is_not_waited_for_on_the_device_again() -> None:
    """Events of a batch that is over belong to the next; the fourth batch finds its slots free."""
    device = SteppedDevice(lambda count: 0)
    rig = Rig(device, replayed=True)
    item = PatchItem(torch.zeros(4, PATCH_DIM), Grid(1, 2, 2))
    for _ in range(3):
        launched = rig.launcher.launch([item])
        launched.wait()
        list(launched.collect())
    rig.launcher.launch([item])
    waits = {name: sum(isinstance(piece, Wait) for piece in getattr(device, name).queue) for name in
             ("compute", "upload", "download", "place")}  # fmt: skip
    records = {name: sum(isinstance(piece, Record) for piece in getattr(device, name).queue) for name in
               ("compute", "upload", "download", "place")}  # fmt: skip
    assert waits == {"compute": 1, "upload": 0, "download": 1, "place": 0}
    assert records == {"compute": 2, "upload": 1, "download": 1, "place": 0}


@pytest.mark.parametrize("placed", [False, True])
def test_rows_through_torch_are_the_rows_by_address(placed: bool) -> None:
    generator = random.Random(fresh_seed())
    found: list[list[torch.Tensor]] = []
    items = [random_item(generator) for _ in range(4)]
    for copies in (HostCopies(), TorchCopies(CPU)):
        device = SteppedDevice(lambda count: 0)
        rig = Rig(device, replayed=True, copies=copies)
        places = [torch.full_like(one, torch.nan) for one in rig.expected(items)] if placed else []
        launched = rig.launcher.launch(items, places)
        launched.wait()
        found.append(list(launched.collect()))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_the_host_does_not_wait_while_two_batches_are_handed_over() -> None:
    device = SteppedDevice(lambda count: 0)
    rig = Rig(device)
    for _ in range(2):
        rig.launcher.launch([PatchItem(torch.randn(4, PATCH_DIM), Grid(1, 2, 2))])
    assert device.steps == 0


def test_a_tower_that_gives_the_wrong_rows_loses_no_slot() -> None:
    tower = PoolTower()
    runner = GraphRunner(tower, LADDER, CPU, capture=False, clock=itertools.count().__next__)
    launcher = TowerLauncher(tower, PixelPatches(), runner, clock=time.monotonic)  # type: ignore[arg-type]
    tower.num_rows = lambda grid: 3  # type: ignore[method-assign]
    for _ in range(4):
        with pytest.raises(InternalError, match=r"gave \(4, 5\) rows, grids need \(3, 5\)"):
            launcher.launch([PatchItem(torch.zeros(16, PATCH_DIM), Grid(1, 4, 4))])
    sink = host_rows(launcher)
    assert (len(sink.device_slots), len(sink.host_slots)) == (2, NUM_HOST_SLOTS)


def test_rows_beyond_the_slots_bring_their_own_memory() -> None:
    sink = HostRows(WIDTH, torch.float32, CPU, streams_of(CPU, time.monotonic), max_rows=4)
    for counts in ([3, 2], [1, 1], [4], [0, 1]):
        rows = torch.randn(sum(counts), WIDTH)
        target = sink.open(counts)
        target.write(rows)
        event = sink.streams.make_event()
        sink.streams.compute.record(event)
        target.send(event)
        target.wait()
        assert torch.equal(torch.cat(list(target.collect())), rows)
    assert (len(sink.device_slots), len(sink.host_slots)) == (2, NUM_HOST_SLOTS)


def test_p27_warming_up_runs_patches_and_frames_of_each_grid() -> None:
    tower = PoolTower()
    runner = GraphRunner(tower, LADDER, CPU, capture=False, clock=itertools.count().__next__)
    launcher = TowerLauncher(tower, PixelPatches(), runner, clock=time.monotonic)  # type: ignore[arg-type]
    launcher.warm_up([Grid(1, 2, 2), Grid(1, 4, 4)])
    assert [inputs.num_patches for inputs in tower.forwards] == [16, 16, 16, 16]
    assert runner.counters.real_patches == 2 * 4 + 2 * 16


def test_a_fault_of_the_device_shows_in_the_wait_and_the_probe() -> None:
    device = SteppedDevice(lambda count: 0)
    rig = Rig(device)
    launched = rig.launcher.launch([PatchItem(torch.zeros(4, PATCH_DIM), Grid(1, 2, 2))])
    device.failure = torch.AcceleratorError("CUDA error: unspecified launch failure")
    with pytest.raises(torch.AcceleratorError, match="unspecified"):
        launched.wait()
    with pytest.raises(torch.AcceleratorError, match="unspecified"):
        rig.launcher.probe()


def test_the_cost_of_a_step_on_the_host_is_measured_launch_by_launch() -> None:
    tower = PoolTower()
    runner = GraphRunner(tower, LADDER, CPU, capture=False, clock=itertools.count().__next__)
    launcher = TowerLauncher(tower, PixelPatches(), runner, clock=time.monotonic)  # type: ignore[arg-type]
    clock = itertools.count(0.0, 0.5).__next__
    items: list[TowerItem] = [PatchItem(torch.zeros(4, PATCH_DIM), Grid(1, 2, 2))]
    assert host_seconds(launcher, items, clock, 3) == [0.5, 0.5, 0.5]
    assert len(tower.forwards) == 3
