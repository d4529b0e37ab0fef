"""A step's host cost on a GPU, and that what makes it small changes no bit of what the device gets."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Iterator

import pytest
import torch

from encoder_service.engine.copies import DriverCopies
from encoder_service.engine.launch import TowerLauncher
from encoder_service.engine.patches import looked_through
from encoder_service.scheduler.buckets import BucketLadder, default_ladder
from encoder_service.types import FrameItem, Grid, TowerItem
from tests.gpu.test_graphs import (
    CUDA,
    FAMILIES,
    MAX_FRAMES,
    MAX_PATCHES,
    RELATIVE,
    backends,
    captured_runner,
    fused_tower,
    relative_error,
)
from tests.gpu.test_overlap import Rig

pytestmark = pytest.mark.gpu

PYTHON_US = 150.0
# Of launches: the median is what a service under load pays, the least what the code costs.
WARM_UP, LAUNCHES = 20, 200


@pytest.fixture(scope="module", params=FAMILIES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    tower = fused_tower(request.param, "small", backends()[0])
    yield Rig(captured_runner(tower, default_ladder(MAX_PATCHES, max_frames=MAX_FRAMES)))
    torch.cuda.empty_cache()


def driver_version() -> int:
    version = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    return version.value


def rows_of(launcher: TowerLauncher, items: list[TowerItem]) -> torch.Tensor:
    launched = launcher.launch(items)
    launched.wait()
    return torch.cat(list(launched.collect()))


def without_batched_copies(launcher: TowerLauncher) -> TowerLauncher:
    assert launcher._pixels is not None
    launcher._pixels._copies = None
    return launcher


def ready_batch(rig: Rig) -> list[TowerItem]:
    return [looked_through(item, rig.tower.plain) for item in rig.batch()]  # type: ignore[arg-type]


def test_the_driver_takes_many_copies_at_once_where_it_is_new_enough(rig: Rig) -> None:
    launcher = rig.launcher()
    assert launcher._pixels is not None
    assert isinstance(launcher._pixels._copies, DriverCopies) is (driver_version() >= 12080)


def test_rows_are_bit_equal_with_batched_copies_and_one_by_one(rig: Rig) -> None:
    batched, each = rig.launcher(), without_batched_copies(rig.launcher())
    for _ in range(100):
        items = ready_batch(rig)
        found = rows_of(batched, items)
        assert torch.equal(found.view(torch.int16), rows_of(each, items).view(torch.int16))
        assert relative_error(found, rig.expected(items)) < RELATIVE


def test_p29_replayed_cuts_leave_the_preprocessors_bits_and_zeros(rig: Rig) -> None:
    launcher = rig.launcher()
    assert launcher._cuts is not None
    assert len(launcher._cuts._graphs) == len(rig.runner.ladder)
    for _ in range(100):
        items = ready_batch(rig)
        bucket = rig.runner.can_use(rig.runner.prepare([item.grid for item in items]))
        assert bucket is not None
        pixels = rig.runner.static(bucket).pixels
        pixels.fill_(torch.nan)
        rows_of(launcher, items)
        expected = torch.cat(
            [
                rig.preprocessor.patchify(item.frames_THWC.to(CUDA)).to(torch.bfloat16)
                if isinstance(item, FrameItem)
                else item.pixel_values.to(CUDA)
                for item in items
            ]
        )
        assert torch.equal(pixels[: len(expected)], expected)
        assert not pixels[len(expected) :].any()


def test_p14_pinned_pixels_are_not_given_away_before_the_device_has_read_them(rig: Rig) -> None:
    """The third batch's transfer waits for the first's pixels to be consumed, behind a device that sleeps.
    Its items are dropped meanwhile, and whoever asks for pinned memory of their size writes over it."""
    launcher = rig.launcher()
    generator = random.Random(rig.generator.random())
    for _ in range(5):
        first, second, third = (ready_batch(rig) for _ in range(3))
        expected = rig.expected(third)
        sizes = [
            (item.frames_THWC if isinstance(item, FrameItem) else item.pixel_values).nbytes for item in third
        ]
        torch.cuda.synchronize()
        torch.cuda._sleep(generator.randint(20, 60) * 1_000_000)  # type: ignore[no-untyped-call]
        launched = [launcher.launch(items) for items in (first, second, third)]
        third.clear()
        for size in sizes:
            torch.full((size,), 255, dtype=torch.uint8, pin_memory=True)
        for one in launched:
            one.wait()
        rows = [torch.cat(list(one.collect())) for one in launched]
        assert relative_error(rows[2], expected) < RELATIVE


@pytest.mark.whole_device
@pytest.mark.parametrize(
    ("count", "side"), [(1, 28), (8, 64), (32, 28), (64, 14)], ids=["1x448", "8x1024", "32x448", "64x224"]
)
def test_the_python_of_a_step_stays_under_its_bound(count: int, side: int) -> None:
    grids = [Grid(1, side, side)] * count
    bucket = default_ladder(32_768).choose(count * side * side, count, side * side)
    assert bucket is not None
    tower = fused_tower("qwen3_vl", "full", backends()[0])
    rig = Rig(captured_runner(tower, BucketLadder([bucket])))
    launcher, counters = rig.launcher(), rig.runner.counters
    items = [looked_through(rig.item(grid, frames=True), tower.plain) for grid in grids]  # type: ignore[arg-type]
    whole_us, replay_us = [], []
    for _ in range(WARM_UP + LAUNCHES):
        torch.cuda.synchronize()
        replay_s, started_s = counters.replay_host_s, time.perf_counter()
        launched = launcher.launch(items)
        whole_us.append((time.perf_counter() - started_s) * 1e6)
        replay_us.append((counters.replay_host_s - replay_s) * 1e6)
        launched.wait()
        list(launched.collect())
    rest_us = [whole - replay for whole, replay in zip(whole_us, replay_us, strict=True)][WARM_UP:]
    print(
        f"{count} items: a launch costs the host {statistics.median(whole_us[WARM_UP:]):.0f} us, its graph "
        f"{statistics.median(replay_us[WARM_UP:]):.0f}, the rest {statistics.median(rest_us):.0f} (least "
        f"{min(rest_us):.0f})"
    )
    assert statistics.median(rest_us) < PYTHON_US
    torch.cuda.empty_cache()
