"""What a step costs the host: the same number of tensor operations for one item and for many."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from encoder_service.engine.copies import Copies, CopyList, HostCopies, Memory
from encoder_service.engine.graphs import Captured, GraphRunner
from encoder_service.engine.launch import TowerLauncher
from encoder_service.engine.patches import StagedBatch, Upload, looked_through, upload_of
from encoder_service.engine.staging import NUM_METADATA_SLOTS, PixelStaging
from encoder_service.engine.streams import streams_of
from encoder_service.errors import PixelTensorMismatch
from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.towers.fused_inputs import FusedInputs
from encoder_service.types import FrameItem, Grid, PatchItem, TowerItem
from tests.parity.tower_cases import fresh_seed
from tests.unit.engine.bucketed_tower import PATCH_DIM, WIDTH
from tests.unit.engine.test_launch import CPU, PixelPatches, PoolTower, random_item

MANY = 24
LADDER = BucketLadder([Bucket(MANY * 4, MANY, 96, 1)])


class Operations(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class OneLaunch:
    """A cutter that costs one operation, as the kernel's replay costs none."""

    def cut(self, frames_THWC: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("frames were cut item by item")

    def cut_staged(self, batch: StagedBatch, out: torch.Tensor) -> None:
        out.zero_()


class NoGraph:
    def replay(self) -> None:
        pass


class OneForward(PoolTower):
    """Its rows cost no operation."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.zeros(MANY, WIDTH)

    def __call__(self, inputs: FusedInputs) -> torch.Tensor:
        return self.rows


def counted_launcher(copies: Copies | None = None, *, replayed: bool = False) -> TowerLauncher:
    """Its graphs, and copies where they are given, are stand-ins."""
    tower = OneForward()
    runner = GraphRunner(tower, LADDER, CPU, capture=False, clock=time.monotonic)
    launcher = TowerLauncher(tower, PixelPatches(), runner, clock=time.monotonic)  # type: ignore[arg-type]
    assert launcher._cuts is not None
    launcher._cuts._cutter = OneLaunch()
    if replayed:
        runner._graphs = {
            bucket: Captured(NoGraph(), tower.rows, Memory(tower.rows))  # type: ignore[arg-type]
            for bucket in LADDER.buckets
        }
        launcher._cuts._graphs = {bucket: NoGraph() for bucket in LADDER.buckets}  # type: ignore[misc]
    if copies is not None:
        assert launcher._pixels is not None
        launcher._pixels._copies = copies
    return launcher


def still(*, frames: bool) -> TowerItem:
    grid = Grid(1, 2, 2)
    if frames:
        return FrameItem(torch.zeros(1, 2, 2, 3, dtype=torch.uint8), grid)
    return PatchItem(torch.zeros(4, PATCH_DIM), grid)


def operations(launcher: TowerLauncher, items: list[TowerItem]) -> Counter[str]:
    with Operations() as found:
        launched = launcher.launch(items)
    launched.wait()
    list(launched.collect())
    return found.counts


def test_operations_of_a_step_do_not_grow_with_its_items() -> None:
    launcher = counted_launcher()
    tower = launcher._tower
    items = [looked_through(still(frames=index % 3 > 0), tower) for index in range(MANY)]
    for _ in range(NUM_METADATA_SLOTS):  # views of each are made once
        operations(launcher, items[:2])
    counts = [operations(launcher, items[:count]) for count in (1, 3, MANY)]
    assert counts[0] == counts[1] == counts[2]
    # The patches, the slice of the rows, their copy into a slot. All else is copied by address.
    assert 2 <= counts[0].total() <= 6, counts[0]


@pytest.mark.parametrize("placed", [False, True])
def test_a_step_that_replays_asks_torch_for_nothing(placed: bool) -> None:
    launcher = counted_launcher(replayed=True)
    items = [looked_through(still(frames=index % 3 > 0), launcher._tower) for index in range(MANY)]
    rows = torch.empty(2 * MANY, WIDTH)
    for _ in range(NUM_METADATA_SLOTS):  # views of each are made once
        operations(launcher, items[:2])
    for count in (1, 3, MANY):
        places = [rows[2 * index : 2 * index + 1] for index in range(count)] if placed else []
        rows.fill_(torch.nan)
        launcher._tower.rows.normal_()
        with Operations() as found:
            launched = launcher.launch(items[:count], places)
        assert not found.counts, found.counts
        launched.wait()
        assert torch.equal(torch.cat(list(launched.collect())), launcher._tower.rows[:count])
        if placed:
            assert torch.equal(rows[0 : 2 * count : 2], launcher._tower.rows[:count])
            assert rows[1::2].isnan().all()
            assert rows[2 * count :].isnan().all()


def test_items_that_nobody_looked_through_cost_no_operation_either() -> None:
    launcher = counted_launcher()
    items = [still(frames=index % 2 == 0) for index in range(MANY)]
    for _ in range(NUM_METADATA_SLOTS):  # views of each are made once
        operations(launcher, items[:2])
    assert operations(launcher, items[:1]) == operations(launcher, items)


@pytest.mark.parametrize("frames", [True, False])
def test_an_item_is_looked_through_once_for_its_tower(frames: bool) -> None:
    tower, other = PoolTower(), PoolTower()
    item = still(frames=frames)
    ready = looked_through(item, tower)  # type: ignore[type-var]
    assert upload_of(ready, tower) is ready.upload  # type: ignore[arg-type]
    assert upload_of(ready, other) is not ready.upload  # type: ignore[arg-type]
    assert isinstance(ready.upload, Upload)
    assert ready.upload.num_rows == 1
    wrong = still(frames=frames)
    for name in ("upload", "grid"):
        object.__setattr__(wrong, name, {"upload": None, "grid": Grid(1, 2, 4)}[name])
    with pytest.raises(PixelTensorMismatch):
        looked_through(wrong, tower)  # type: ignore[type-var]


class LateCopies(HostCopies):
    """Copies nothing until told, as a busy device does. The lists may be written again by then."""

    def __init__(self) -> None:
        self.waiting: list[tuple[CopyList, int]] = []

    def many(self, copies: CopyList, count: int, stream: int) -> None:
        kept = CopyList(*(np.array(one) for one in zip(*copies.first(count), strict=True)))
        self.waiting.append((kept, count))

    def run(self) -> None:
        for copies, count in self.waiting:
            HostCopies().many(copies, count, 0)
        self.waiting.clear()


def test_p14_pixels_live_until_their_batch_was_waited_for_also_when_the_launch_failed() -> None:
    launcher = counted_launcher(LateCopies())
    assert launcher._pixels is not None
    tensor = torch.zeros(4, PATCH_DIM)
    item = looked_through(PatchItem(tensor, Grid(1, 2, 2)), launcher._tower)  # type: ignore[arg-type]
    launched = launcher.launch([item])
    slots = [next(launcher._pixels._slots) for _ in range(2)]
    assert sorted(len(slot.held) for slot in slots) == [0, 1]
    assert launched._held[0] is tensor
    launched.wait()
    assert not launched._held
    assert not any(slot.held for slot in slots)

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    assert launcher._cuts is not None
    launcher._cuts.write = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        launcher.launch([item])
    assert sum(one is tensor for slot in slots for one in slot.held) == 1


@pytest.mark.parametrize("all_at_once", [True, False])
def test_both_ways_of_transfer_bring_the_same_bytes_to_the_same_places(all_at_once: bool) -> None:
    generator = random.Random(fresh_seed())
    streams = streams_of(CPU, itertools.count().__next__)
    staging = PixelStaging(1 << 16, 16, CPU, streams, HostCopies() if all_at_once else None)
    tower = PoolTower()
    for _ in range(10):
        items = [random_item(generator) for _ in range(generator.randint(1, 16))]
        uploads = [upload_of(item, tower) for item in items]  # type: ignore[arg-type]
        pixels = [one.pixels for one in uploads]
        rows = np.frombuffer(b"".join(one.row for one in uploads), np.int64).reshape(len(items), -1)
        staged = staging.upload(rows, pixels, all_pinned=True)
        assert staged is not None
        for offset, one, (source, num_frames) in zip(
            staged.offsets.tolist(), pixels, staged.sources.tolist(), strict=True
        ):
            assert torch.equal(staged.slot.read(offset, one), one)
            assert source == offset + staged.slot.first_byte
            assert num_frames == (len(one) if one.dtype == torch.uint8 else 0)
    assert staging.upload(np.tile(rows, (20, 1)), pixels * 20, all_pinned=True) is None
