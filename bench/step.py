"""What handing over one batch costs the host: TowerLauncher.launch, with the graph's launch apart.

    python bench/step.py                                    # full-size tower in bfloat16 on cuda:0
    python bench/step.py --quick                            # thirty launches of each case
    python bench/step.py --device cpu --size tiny --quick   # the Python of it alone

Owns the cases, the two states of the device in which a launch is timed, and the result file. On a CPU a
stand-in takes the place of tower, patches and transfers, none of which a launch waits for on a GPU: what is
left is the Python of a step but for its sink's.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cases import SIDES
from checkpoints import random_checkpoint
from measurement import RESULTS, describe_environment, synchronise, write_result

from encoder_service.engine.copies import BatchCopies, CopyList
from encoder_service.engine.fast_path import build_graph_runner, ladder_of
from encoder_service.engine.graphs import GraphRunner
from encoder_service.engine.launch import LaunchedBatch, TowerLauncher
from encoder_service.engine.patches import StagedBatch, looked_through
from encoder_service.engine.streams import Event
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
WARM_UP = 10
# The device has nothing to do, or has one batch before this one, as in a service under load.
IDLE, BUSY = "idle", "busy"


class StandIn:
    """A tower whose rows cost nothing, with the real one's host work."""

    def __init__(self, tower: Tower) -> None:
        self.patch_dim, self.merge_size = tower.patch_dim, tower.merge_size
        self.width, self.dtype = tower.width, tower.dtype
        self._inputs = FusedInputBuilder(
            tower.check_grid, merge_size=tower.merge_size, merges_time=tower.merges_time
        )
        self._rows = torch.zeros(MAX_PATCHES // tower.merge_size**2, tower.width, dtype=tower.dtype)

    def prepare(self, grids: Sequence[Grid]) -> FusedInputs:
        return self._inputs.prepare(grids)

    def pad(self, inputs: FusedInputs, bucket: BucketShape) -> FusedInputs:
        return self._inputs.pad(inputs, bucket)

    def shape_of(self, shapes: ShapeRows) -> BatchShape:
        return self._inputs.shape_of(shapes)

    def __call__(self, inputs: FusedInputs) -> torch.Tensor:
        return self._rows[: inputs.num_rows]


class NoRows:
    """A sink and its target in one, which takes rows nowhere: on a GPU both copies only start."""

    def open(self, *_: object) -> NoRows:
        return self

    def write(self, rows: torch.Tensor) -> None:
        pass

    def send(self, written: Event) -> None:
        pass

    def abandon(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def collect(self) -> Iterator[torch.Tensor]:
        return iter(())


class NoCopies:
    """Stands in for the driver."""

    def copy(self, copies: CopyList, count: int, stream: int) -> None:
        pass


class NoCuts:
    """Stands in for the replay that cuts patches."""

    def cut(self, frames_THWC: torch.Tensor, out: torch.Tensor) -> None:
        pass

    def cut_staged(self, batch: StagedBatch, out: torch.Tensor) -> None:
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
    assert launcher._pixels is not None
    batched = launcher._pixels._copies
    ways: dict[str, BatchCopies | None] = {"each": None}
    if batched is not None:
        ways = {"batched": batched} if device.type == "cpu" else {"batched": batched, "each": None}
    for case, (way, copies) in itertools.product(arguments.cases, ways.items()):
        launcher._pixels._copies = copies
        items = items_of(case, tower)
        for state in (IDLE, BUSY):
            record = {"case": case, "copies": way, "device_is": state, "num_items": len(items)}
            records.append(record | measure(launcher, runner, items, arguments.repeats, state))
            print_record(records[-1])
    result = describe_environment(device, arguments.commit) | {
        "settings": {
            "family": arguments.family,
            "size": arguments.size,
            "dtype": str(dtype),
            "repeats": arguments.repeats,
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
    parser.add_argument("--quick", action="store_true", help="thirty launches of each case")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    if arguments.device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("no CUDA device here; --device cpu --size tiny shows that the bench runs")
        torch.cuda.set_device(arguments.device)
    arguments.repeats = 30 if arguments.quick else 300
    return arguments


def runner_of(tower: Tower, cases: Sequence[str]) -> GraphRunner:
    """The graphs of the buckets that the cases run in; on a CPU the stand-in."""
    ladder = ladder_of(tower, MAX_PATCHES, ())
    buckets = [ladder.choose_for(Launch.of([grid.num_patches for grid in grids_of(case)])) for case in cases]
    sizes = sorted({bucket.num_patches for bucket in buckets if bucket is not None})
    if tower.device.type == "cpu":
        few = BucketLadder([bucket for bucket in ladder.buckets if bucket.num_patches in sizes])
        stand_in = StandIn(tower)
        return GraphRunner(stand_in, few, tower.device, capture=False, clock=time.perf_counter)
    runner = build_graph_runner(
        tower,
        attention="auto",
        deterministic=True,
        max_patches=MAX_PATCHES,
        bucket_sizes=sizes,
        clock=time.perf_counter,
    )
    if runner is None:
        raise SystemExit("the fast path is not possible here")
    return runner


def launcher_of(tower: Tower, runner: GraphRunner) -> TowerLauncher:
    on_cpu = tower.device.type == "cpu"
    launcher = TowerLauncher(
        tower, preprocessor_of(tower), runner, clock=time.perf_counter, sink=NoRows() if on_cpu else None
    )
    if on_cpu:
        assert launcher._pixels is not None
        assert launcher._cuts is not None
        launcher._pixels._copies = NoCopies()
        launcher._cuts._cutter = NoCuts()
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


def measure(
    launcher: TowerLauncher, runner: GraphRunner, items: Sequence[TowerItem], repeats: int, state: str
) -> dict[str, Any]:
    """Microseconds of ``repeats`` launches, of the graph's launch within each, and of the rest."""
    launches, replays = [], []
    in_flight: deque[LaunchedBatch] = deque()
    for turn in range(WARM_UP + repeats):
        if state == IDLE:
            finish_all(in_flight, 0)
            synchronise(runner_device(runner))
        else:
            finish_all(in_flight, 1)
        counters = runner.counters
        before_s, begun_s = counters.replay_host_s, time.perf_counter()
        in_flight.append(launcher.launch(items))
        took_s = time.perf_counter() - begun_s
        if turn >= WARM_UP:
            launches.append(took_s * 1e6)
            replays.append((counters.replay_host_s - before_s) * 1e6)
    finish_all(in_flight, 0)
    rest = [launch - replay for launch, replay in zip(launches, replays, strict=True)]
    return {"launches": repeats} | described(launch_us=launches, graph_launch_us=replays, python_us=rest)


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
        f"{record['case']:>7} {record['copies']:>8} {record['device_is']:>5}: launch "
        f"{record['launch_us']:7.1f} us (p99 {record['launch_us_p99']:7.1f}), graph "
        f"{record['graph_launch_us']:6.1f}, the rest {record['python_us']:6.1f} "
        f"(p99 {record['python_us_p99']:6.1f})"
    )


if __name__ == "__main__":
    main()
