"""Two batches in flight on a GPU: the device does not idle. Their rows: test_step_cost."""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
import torch

from encoder_service.engine.graphs import GraphRunner
from encoder_service.engine.launch import LaunchedBatch, TowerLauncher
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.pinned import pinned
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.settings import MoonViTSettings, Normalisation, QwenVLSettings
from encoder_service.scheduler.buckets import default_ladder
from encoder_service.towers.fused import FusedTower
from encoder_service.types import FrameItem, Grid, PatchItem, TowerItem
from tests.gpu.test_graphs import (
    CUDA,
    FAMILIES,
    MAX_PATCHES,
    backends,
    captured_runner,
    eager_rows,
    fused_tower,
    random_batch,
    tower_of,
)
from tests.parity.tower_cases import fresh_seed

pytestmark = pytest.mark.gpu

HALVES = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)


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
    yield Rig(captured_runner(tower, default_ladder(MAX_PATCHES, max_frames=tower.max_frames)))
    torch.cuda.empty_cache()


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
    rig = Rig(captured_runner(tower, default_ladder(16_384, max_frames=tower.max_frames)))
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
