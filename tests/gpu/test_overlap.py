"""Two batches in flight on a GPU: rows equal eager each time, memory is flat, the device does not idle."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
import torch

from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.graphs import GraphRunner
from encoder_service.engine.jobs import TowerResult
from encoder_service.engine.launch import LaunchedBatch, TowerLauncher
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.pinned import pinned
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.settings import MoonViTSettings, Normalisation, QwenVLSettings
from encoder_service.ops.metrics import Metrics
from encoder_service.scheduler.buckets import default_ladder
from encoder_service.scheduler.planner import Planner, Ticket
from encoder_service.towers.fused import FusedTower
from encoder_service.types import FrameItem, Grid, PatchItem, TowerItem
from tests.gpu.test_graphs import (
    CUDA,
    FAMILIES,
    MAX_FRAMES,
    MAX_PATCHES,
    RELATIVE,
    backends,
    captured_runner,
    eager_rows,
    fused_tower,
    random_batch,
    relative_error,
    tower_of,
)
from tests.parity.tower_cases import fresh_seed

pytestmark = pytest.mark.gpu

HALVES = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)
NUM_BATCHES = 2000
WARM_UP_BATCHES = 200


def host_seconds(
    launcher: TowerLauncher,
    items: Sequence[TowerItem],
    repeats: int,
    destinations: Sequence[torch.Tensor] = (),
) -> list[float]:
    """Seconds that the host spends on launching one batch, for each of ``repeats`` launches, each awaited
    before the next."""
    seconds = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        launched = launcher.launch(items, destinations)
        seconds.append(time.perf_counter() - started_s)
        launched.wait()
        list(launched.collect())
    return seconds


def preprocessor_of(tower: FusedTower) -> QwenVLPreprocessor | MoonViTPreprocessor:
    limits = DecodeLimits(max_encoded_bytes=1 << 20, max_image_pixels=1 << 26)
    if tower.merges_time:
        settings = MoonViTSettings(tower.patch_size, tower.merge_size, 1 << 20, 512, HALVES)
        return MoonViTPreprocessor(settings, limits)
    return QwenVLPreprocessor(
        QwenVLSettings(tower.patch_size, tower.merge_size, tower.temporal_patch_size, 1, 1 << 26, HALVES),
        limits,
    )


class Rig:
    """The fast path with its launcher and a pool of items with the rows that eager gives them."""

    def __init__(self, runner: GraphRunner) -> None:
        self.runner = runner
        self.tower = tower_of(runner)
        self.preprocessor = preprocessor_of(self.tower)
        self.generator = random.Random(fresh_seed())

    def launcher(self) -> TowerLauncher:
        return TowerLauncher(
            self.tower.plain,
            self.preprocessor,
            self.runner,
            clock=time.monotonic,  # type: ignore[arg-type]
        )

    def item(self, grid: Grid, *, frames: bool) -> TowerItem:
        """Random pixels in pinned memory, as ingest leaves them."""
        side, tower = self.tower.patch_size, self.tower
        item: TowerItem
        if frames:
            depth = grid.t * tower.temporal_patch_size if grid.t > 1 else 1
            shape = (depth, grid.h * side, grid.w * side, 3)
            item = FrameItem(torch.randint(0, 256, shape, dtype=torch.uint8), grid)
        else:
            item = PatchItem(torch.randn(grid.num_patches, tower.patch_dim), grid)
        return pinned(item, CUDA, tower.dtype)

    def batch(self, most: int = MAX_PATCHES) -> list[TowerItem]:
        grids = random_batch(self.generator, self.tower, most)
        return [self.item(grid, frames=self.generator.random() < 0.6) for grid in grids]

    def expected(self, items: Sequence[TowerItem]) -> torch.Tensor:
        """Rows of the batch from the fused tower, eager, with the preprocessor's own patches."""
        patches = [
            (
                self.preprocessor.patchify(item.frames_THWC.to(CUDA))
                if isinstance(item, FrameItem)
                else item.pixel_values.to(CUDA)
            ).to(torch.bfloat16)
            for item in items
        ]
        return eager_rows(self.tower, [item.grid for item in items], patches).cpu()


@pytest.fixture(scope="module", params=FAMILIES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    tower = fused_tower(request.param, "small", backends()[0])
    yield Rig(captured_runner(tower, default_ladder(MAX_PATCHES, max_frames=MAX_FRAMES)))
    torch.cuda.empty_cache()


def test_p14_p26_p28_p30_thousands_of_overlapping_batches_equal_eager(rig: Rig) -> None:
    """Two in flight all the time, frames and patches mixed, while another stream keeps the memory busy."""
    launcher = rig.launcher()
    batches = [rig.batch() for _ in range(64)]
    expected = [rig.expected(items) for items in batches]
    torch.cuda.synchronize()
    replays = rig.runner.counters.replays.total()
    in_flight: deque[tuple[int, LaunchedBatch]] = deque()
    noise = torch.cuda.Stream(CUDA)  # type: ignore[no-untyped-call]
    block = torch.empty(32 << 20, dtype=torch.uint8, device=CUDA)
    allocated = 0

    def finish() -> None:
        index, launched = in_flight.popleft()
        assert launched.wait() > 0
        rows = torch.cat(list(launched.collect()))
        assert torch.isfinite(rows).all(), index
        assert relative_error(rows, expected[index]) < RELATIVE, index

    for step in range(WARM_UP_BATCHES + NUM_BATCHES):
        if step == WARM_UP_BATCHES:
            allocated = torch.cuda.memory_allocated(CUDA)
        with torch.cuda.stream(noise):
            block[: 16 << 20].copy_(block[16 << 20 :])
        index = rig.generator.randrange(len(batches))
        in_flight.append((index, launcher.launch(batches[index])))
        if len(in_flight) == 2:
            finish()
    while in_flight:
        finish()
    torch.cuda.synchronize()
    assert rig.runner.counters.replays.total() - replays == WARM_UP_BATCHES + NUM_BATCHES
    assert torch.cuda.memory_allocated(CUDA) <= allocated + (1 << 20)


def test_p31_items_through_the_engine_get_their_own_rows_from_many_threads(rig: Rig) -> None:
    faults: list[Exception] = []
    engine = DeviceEngine(
        rig.tower.plain,  # type: ignore[arg-type]
        rig.preprocessor,
        Planner(MAX_PATCHES, 16),
        Metrics(),
        clock=time.monotonic,
        on_fault=faults.append,
        graphs=rig.runner,
    )
    grids = [Grid(1, 8, 8), Grid(1, 16, 12), Grid(2, 8, 6), Grid(1, 2, 2), Grid(1, 24, 20)]
    items = [rig.item(grid, frames=index % 2 == 0) for index, grid in enumerate(grids * 4)]
    expected = [rig.expected([item]) for item in items]
    engine.warm_up([Grid(1, 4, 4)])
    engine.start()
    wrong: list[float] = []

    def ask(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(40):
            chosen = [generator.randrange(len(items)) for _ in range(8)]
            futures: list[Future[TowerResult]] = [
                engine.submit(items[index], Ticket(items[index].grid.num_patches)) for index in chosen
            ]
            for index, future in zip(chosen, futures, strict=True):
                error = relative_error(future.result(60).rows, expected[index])
                if not error < RELATIVE:
                    wrong.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.stop(30)
    assert wrong == []
    assert faults == []
    assert engine.counters.items == 4 * 40 * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_on_the_host_is_rounding_on_the_device(dtype: torch.dtype) -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    values = values[values.isfinite()].view(1, -1)
    item = pinned(PatchItem(values, Grid(1, 1, 1)), CUDA, dtype)
    assert item.pixel_values.is_pinned()
    on_device = values.to(CUDA).to(dtype).cpu()
    assert torch.equal(item.pixel_values.view(torch.int16), on_device.view(torch.int16))


@pytest.mark.whole_device
@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_tower_is_kept_busy_and_a_step_costs_the_host_little(family: str) -> None:
    tower = fused_tower(family, "full", backends()[0])
    rig = Rig(captured_runner(tower, default_ladder(16_384, max_frames=MAX_FRAMES)))
    launcher = rig.launcher()
    items = [rig.item(Grid(1, 28, 28), frames=True) for _ in range(20)]
    host_s = host_seconds(launcher, items, 30)[10:]
    device_s = 0.0
    in_flight: deque[LaunchedBatch] = deque()
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(20):
        in_flight.append(launcher.launch(items))
        if len(in_flight) == 2:
            oldest = in_flight.popleft()
            device_s += oldest.wait()
            for _ in oldest.collect():
                pass
    while in_flight:
        oldest = in_flight.popleft()
        device_s += oldest.wait()
        for _ in oldest.collect():
            pass
    whole_s = time.perf_counter() - started_s
    num_patches = sum(item.grid.num_patches for item in items)
    print(
        f"{family}: a step of {num_patches} patches in {len(items)} items costs the host "
        f"{statistics.median(host_s) * 1e6:.0f} us (least {min(host_s) * 1e6:.0f}), the device is busy "
        f"{device_s / whole_s:.1%} of the time"
    )
    # A step that waited for the device would take tens of milliseconds.
    assert statistics.median(host_s) < 5e-3
    assert device_s / whole_s > 0.7
    torch.cuda.empty_cache()
