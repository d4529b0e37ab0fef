"""A step on a GPU: rows in their destinations, patches to the bit, pinned memory. Its cost: test_overlap."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from encoder_service.engine.launch import LaunchedBatch, TowerLauncher
from encoder_service.scheduler.buckets import default_ladder
from encoder_service.types import FrameItem, TowerItem
from tests.gpu.test_graphs import (
    CUDA,
    FAMILIES,
    MAX_PATCHES,
    RELATIVE,
    backends,
    captured_runner,
    fused_tower,
    relative_error,
)
from tests.gpu.test_overlap import Rig

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=FAMILIES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    tower = fused_tower(request.param, "small", backends()[0])
    yield Rig(captured_runner(tower, default_ladder(MAX_PATCHES, max_frames=tower.max_frames)))
    torch.cuda.empty_cache()


def rows_of(launcher: TowerLauncher, items: list[TowerItem]) -> torch.Tensor:
    launched = launcher.launch(items)
    launched.wait()
    return torch.cat(list(launched.collect()))


def pixels_of(item: TowerItem) -> torch.Tensor:
    return item.frames_THWC if isinstance(item, FrameItem) else item.pixel_values


def destinations_for(rig: Rig, items: list[TowerItem], *, apart: bool) -> list[torch.Tensor]:
    """On the device, next to each other or one row apart."""
    plain = rig.tower.plain
    counts = [plain.num_rows(item.grid) for item in items]
    shape = (sum(counts) + len(counts) * apart, plain.width)
    rest = torch.full(shape, torch.nan, dtype=plain.dtype, device=CUDA)
    found = []
    for count in counts:
        found.append(rest[:count])
        rest = rest[count + apart :]
    return found


def on_host(destinations: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same in pinned memory."""
    return [torch.full(one.shape, torch.nan, dtype=one.dtype, pin_memory=True) for one in destinations]


def test_p20_p21_p30_rows_are_right_in_every_kind_of_destination(rig: Rig) -> None:
    """Two batches in flight, another stream beside them. Each item's rows go to the device, to pinned memory
    or to a tensor of their own, while the next batch overwrites the graphs' memory."""
    launcher, generator = rig.launcher(), random.Random(time.time_ns())
    batches = [rig.batch() for _ in range(16)]
    expected = [rig.expected(items) for items in batches]
    noise, block = torch.cuda.Stream(CUDA), torch.empty(64 << 20, dtype=torch.uint8, device=CUDA)
    in_flight: deque[tuple[int, LaunchedBatch, list[torch.Tensor | None]]] = deque()

    def finish() -> None:
        index, launched, destinations = in_flight.popleft()
        launched.wait()
        found = list(launched.collect())
        assert all(
            destination is None or rows is destination
            for rows, destination in zip(found, destinations, strict=True)
        )
        rows = torch.cat([one.cpu() for one in found])
        assert relative_error(rows, expected[index]) < RELATIVE, index

    replays = rig.runner.counters.replays.total()
    for _ in range(1000):
        index = generator.randrange(len(batches))
        on_device = destinations_for(rig, batches[index], apart=generator.random() < 0.5)
        kinds = generator.choice(("d", "h", "n", "dh", "dhn"))
        choices: dict[str, list[Any]] = {
            "d": on_device,
            "h": on_host(on_device),
            "n": [None] * len(on_device),
        }
        destinations = [choices[generator.choice(kinds)][number] for number in range(len(on_device))]
        torch.cuda.current_stream().synchronize()  # destinations are free once they are reserved
        with torch.cuda.stream(noise):
            block[: 32 << 20].copy_(block[32 << 20 :])
        in_flight.append((index, launcher.launch(batches[index], destinations), destinations))
        if len(in_flight) == 2:
            finish()
    while in_flight:
        finish()
    assert rig.runner.counters.replays.total() - replays == 1000


def test_p29_uploaded_pixels_become_the_preprocessors_bits_and_padding_is_zero(rig: Rig) -> None:
    launcher = rig.launcher()
    for _ in range(100):
        items = rig.batch()
        staged = rig.runner.stage(rig.runner.prepare([item.grid for item in items]))
        assert staged.bucket is not None
        pixels = staged.inputs.pixel_values  # the static buffer that the launch writes
        assert pixels is not None
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
    Its items are dropped meanwhile, and other users of pinned memory write over what they are given."""
    launcher = rig.launcher()
    generator = random.Random(rig.generator.random())
    for _ in range(5):
        first, second, third = (rig.batch() for _ in range(3))
        expected = rig.expected(third)
        sizes = [pixels_of(item).nbytes for item in third]
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
