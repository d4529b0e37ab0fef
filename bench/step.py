"""What handing over one batch costs the host: TowerLauncher.launch, in Python and in the driver's calls.

    python bench/step.py                                    # full-size tower in bfloat16 on cuda:0
    python bench/step.py --quick                            # twelve launches of each case
    python bench/step.py --device cpu --size tiny --quick   # the Python of it alone

Owns the cases, the two ends of rows (host memory, reserved places on the device), the two states of the
device in which a launch is timed, and the result file. Each is timed twice: as it is, which gives
``launch_us``, and with a clock around each call of the driver or its runtime (graph launches, copies, events
recorded and waited for), whose sum is ``driver_us``. ``python_us`` is the difference of the medians: clocks
would add to it.

On a CPU stand-ins take the place of the tower, the graphs and the copies, none of which a launch waits for on
a GPU: what is left is the Python of a step.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cases import SIDES
from checkpoints import random_checkpoint
from driver_clock import DriverClock
from measurement import RESULTS, describe_environment, synchronise, write_result

from encoder_service.engine.copies import CopyList, DriverCopies, HostCopies, Memory
from encoder_service.engine.fast_path import build_graph_runner, ladder_of
from encoder_service.engine.graphs import Captured, GraphRunner
from encoder_service.engine.launch import LaunchedBatch, TowerLauncher
from encoder_service.engine.patches import looked_through
from encoder_service.engine.rows import Destination
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.pinned import pinned
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.settings import MoonViTSettings, Normalisation, QwenVLSettings
from encoder_service.scheduler.buckets import BucketLadder
from encoder_service.scheduler.cost import Launch
from encoder_service.towers import Tower, load_tower
from encoder_service.towers.fused_inputs import (
    BatchShape,
    BucketShape,
    FusedInputBuilder,
    FusedInputs,
    ShapeRows,
)
from encoder_service.towers.synthetic import FAMILIES, SIZES
from encoder_service.types import FrameItem, Grid, TowerItem

MAX_PATCHES = 32_768
# Images of so many pixels a side, in patches of 16 pixels: the last two fill their buckets with many items.
CASES = ("1x448", "8x1024", "32x448", "64x224")
SIDE_OF = SIDES | {224: 14}
HALVES = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)
WARM_UP = 5
# The device has nothing to do, or has one batch before this one, as in a service under load.
IDLE, BUSY = "idle", "busy"
# Rows go to pinned memory, or to places that the caller reserved, as the device arena does.
ENDS = HOST, PLACES = "host", "places"


class StandIn:
    """A tower whose rows cost nothing, with the real one's host work."""

    def __init__(self, tower: Tower) -> None:
        self.patch_dim, self.merge_size = tower.patch_dim, tower.merge_size
        self.width, self.dtype = tower.width, tower.dtype
        self._inputs = FusedInputBuilder(
            tower.check_grid, merge_size=tower.merge_size, merges_time=tower.merges_time
        )
        self.rows = torch.zeros(MAX_PATCHES // tower.merge_size**2, tower.width, dtype=tower.dtype)

    def prepare(self, grids: Sequence[Grid]) -> FusedInputs:
        return self._inputs.prepare(grids)

    def pad(self, inputs: FusedInputs, bucket: BucketShape) -> FusedInputs:
        return self._inputs.pad(inputs, bucket)

    def shape_of(self, shapes: ShapeRows) -> BatchShape:
        return self._inputs.shape_of(shapes)

    def __call__(self, inputs: FusedInputs) -> torch.Tensor:
        return self.rows[: inputs.num_rows]


class NoGraph:
    """Stands in for a captured graph."""

    def replay(self) -> None:
        pass


class NoCopies(HostCopies):
    """Stands in for the driver."""

    def one(self, destination: Memory, source: Memory, num_bytes: int, stream: int) -> None:
        pass

    def many(self, copies: CopyList, count: int, stream: int) -> None:
        pass


def main() -> None:
    arguments = parse_arguments()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    device: torch.device = arguments.device
    records: list[dict[str, Any]] = []
    with random_checkpoint(arguments.family, arguments.size, 0, device) as path:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        tower = load_tower(path, device=device, dtype=dtype).tower
    runner = runner_of(tower, arguments.cases)
    launcher = launcher_of(tower, runner)
    copies = runner.copies
    way = (
        "one by one" if isinstance(copies, DriverCopies) and not copies.takes_many else type(copies).__name__
    )
    for case, end, state in itertools.product(arguments.cases, ENDS, (IDLE, BUSY)):
        items = items_of(case, tower)
        destinations = places_for(items, tower) if end == PLACES else []
        record = {"case": case, "rows_go_to": end, "device_is": state, "num_items": len(items)}
        figures = measure(launcher, runner, items, destinations, arguments.repeats, state)
        records.append(record | figures)
        print_record(records[-1])
    result = describe_environment(device, arguments.commit) | {
        "settings": {
            "family": arguments.family,
            "size": arguments.size,
            "dtype": str(dtype),
            "repeats": arguments.repeats,
            "copies": way,
            "stand_in": device.type == "cpu",
        },
        "records": records,
    }
    print(write_result(arguments.out, "step", result))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="twelve launches of each case")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    if arguments.device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("no CUDA device here; --device cpu --size tiny shows that the bench runs")
        torch.cuda.set_device(arguments.device)
    arguments.repeats = 12 if arguments.quick else 100
    return arguments


def runner_of(tower: Tower, cases: Sequence[str]) -> GraphRunner:
    """The graphs of the buckets that the cases run in; on a CPU the stand-in."""
    ladder = ladder_of(tower, MAX_PATCHES, ())
    buckets = [ladder.choose_for(Launch.of([grid.num_patches for grid in grids_of(case)])) for case in cases]
    sizes = sorted({bucket.num_patches for bucket in buckets if bucket is not None})
    if tower.device.type == "cpu":
        few = BucketLadder([bucket for bucket in ladder.buckets if bucket.num_patches in sizes])
        stand_in = StandIn(tower)
        runner = GraphRunner(
            stand_in, few, tower.device, capture=False, clock=time.perf_counter, copies=NoCopies()
        )
        rows = stand_in.rows
        runner._graphs = {
            bucket: Captured(NoGraph(), rows, Memory(rows))  # type: ignore[arg-type]
            for bucket in few.buckets
        }
        return runner
    captured = build_graph_runner(
        tower,
        attention="auto",
        deterministic=True,
        max_patches=MAX_PATCHES,
        bucket_sizes=sizes,
        clock=time.perf_counter,
    )
    if captured is None:
        raise SystemExit("the fast path is not possible here")
    return captured


def launcher_of(tower: Tower, runner: GraphRunner) -> TowerLauncher:
    launcher = TowerLauncher(tower, preprocessor_of(tower), runner, clock=time.perf_counter)
    if tower.device.type == "cpu":
        assert launcher._cuts is not None
        launcher._cuts._graphs = {bucket: NoGraph() for bucket in runner.ladder.buckets}  # type: ignore[misc]
    return launcher


def preprocessor_of(tower: Tower) -> QwenVLPreprocessor | MoonViTPreprocessor:
    limits = DecodeLimits(max_encoded_bytes=1 << 20, max_image_pixels=1 << 26)
    if tower.merges_time:
        return MoonViTPreprocessor(
            MoonViTSettings(tower.patch_size, tower.merge_size, 1 << 20, 512, HALVES), limits
        )
    settings = QwenVLSettings(
        tower.patch_size, tower.merge_size, tower.temporal_patch_size, 1, 1 << 26, HALVES
    )
    return QwenVLPreprocessor(settings, limits)


def grids_of(case: str) -> list[Grid]:
    count, side = (int(part) for part in case.split("x"))
    return [Grid(1, SIDE_OF[side], SIDE_OF[side])] * count


def items_of(case: str, tower: Tower) -> list[TowerItem]:
    """Frames of random pixels, as ingest hands them to the engine."""
    items: list[TowerItem] = []
    for grid in grids_of(case):
        shape = (1, grid.h * tower.patch_size, grid.w * tower.patch_size, 3)
        frames = FrameItem(torch.randint(0, 256, shape, dtype=torch.uint8), grid)
        items.append(looked_through(pinned(frames, tower.device, tower.dtype), tower))
    return items


def places_for(items: Sequence[TowerItem], tower: Tower) -> list[Destination]:
    """A place for each item's rows, none next to another: an arena in use has no such runs."""
    counts = [tower.num_rows(item.grid) for item in items]
    return [
        torch.empty(count + 1, tower.width, dtype=tower.dtype, device=tower.device)[:count]
        for count in counts
    ]


def measure(
    launcher: TowerLauncher,
    runner: GraphRunner,
    items: Sequence[TowerItem],
    destinations: Sequence[Destination],
    repeats: int,
    state: str,
) -> dict[str, Any]:
    """Microseconds of ``repeats`` launches, then of the driver's calls within as many others."""
    clock = DriverClock()
    launches = timed_launches(launcher, runner, items, destinations, repeats, state, clock)[0]
    clock.wrap_launch(launcher, runner)
    try:
        _, drivers, replays = timed_launches(launcher, runner, items, destinations, repeats, state, clock)
    finally:
        clock.unwrap()
    found = described(launch_us=launches, driver_us=drivers, graph_launch_us=replays)
    found["python_us"] = max(0.0, found["launch_us"] - found["driver_us"])
    return {"launches": repeats} | found


def timed_launches(
    launcher: TowerLauncher,
    runner: GraphRunner,
    items: Sequence[TowerItem],
    destinations: Sequence[Destination],
    repeats: int,
    state: str,
    clock: DriverClock,
) -> tuple[list[float], list[float], list[float]]:
    """Microseconds of each launch, of the driver's calls that ``clock`` saw, and of the tower's replay."""
    launches, drivers, replays = [], [], []
    in_flight: deque[LaunchedBatch] = deque()
    for turn in range(WARM_UP + repeats):
        if state == IDLE:
            finish_all(in_flight, 0)
            synchronise(runner_device(runner))
        else:
            finish_all(in_flight, 1)
        counters = runner.counters
        replay_s, driver_s, begun_s = counters.replay_host_s, clock.seconds, time.perf_counter()
        in_flight.append(launcher.launch(items, destinations))
        took_s = time.perf_counter() - begun_s
        if turn >= WARM_UP:
            launches.append(took_s * 1e6)
            drivers.append((clock.seconds - driver_s) * 1e6)
            replays.append((counters.replay_host_s - replay_s) * 1e6)
    finish_all(in_flight, 0)
    return launches, drivers, replays


def runner_device(runner: GraphRunner) -> torch.device:
    return runner.static(runner.ladder.buckets[0]).pixels.device


def finish_all(in_flight: deque[LaunchedBatch], but: int) -> None:
    while len(in_flight) > but:
        oldest = in_flight.popleft()
        oldest.wait()
        for _ in oldest.collect():
            pass


def described(**samples: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile of each."""
    found = {}
    for name, values in samples.items():
        found[name] = statistics.median(values)
        found[f"{name}_p99"] = statistics.quantiles(values, n=100, method="inclusive")[98]
    return found


def print_record(record: dict[str, Any], write: Callable[[str], object] = print) -> None:
    write(
        f"{record['case']:>7} to {record['rows_go_to']:>6}, device {record['device_is']}: launch "
        f"{record['launch_us']:7.1f} us (p99 {record['launch_us_p99']:7.1f}), driver "
        f"{record['driver_us']:6.1f} (graph {record['graph_launch_us']:6.1f}), Python "
        f"{record['python_us']:6.1f}"
    )


if __name__ == "__main__":
    main()
