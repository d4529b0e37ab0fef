"""Padding waste of the service's batches on a realistic mix of image sizes, against load. Needs no GPU.

    python bench/padding.py         # prints a table, writes bench/results/padding-<date>.json
    python bench/padding.py --max-patches 34816 --seed 7 --images 20000

Owns the mix of sizes and a simulation of one device: images arrive at random, the planner makes batches of
what waits whenever the device is free, the device takes what the cost model says, times an error of its own
for each bucket, which the planner does not know. Waste is the share of the device's time that graphs of
exactly the batches' shapes would not have taken.

Load 1 is the arrival rate at which useful work alone would fill the device. ``backlog``: all images wait
from the start. Policies: the planner with what batches cost, or by first-come fill alone; each on the default
ladder and on a coarse one of powers of two.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import secrets
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measurement import RESULTS, describe_environment
from rich.console import Console
from rich.table import Table

from encoder_service.ingest.qwen_vl import AreaLimits, rounded_size
from encoder_service.scheduler.buckets import Bucket, BucketLadder, default_ladder, ladder_of_sizes
from encoder_service.scheduler.cost import H200_COST, CostModel, Launch
from encoder_service.scheduler.planner import Planner, Ticket

PATCH_SIZE, MERGE_SIZE = 16, 2
LOADS = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95)
BACKLOG = math.inf

# A plausible mix for a chat service with images, put together from common formats, not measured anywhere.
# Widths and heights in pixels before the processor's rounding and its limits of the area.
PHONE_PHOTOS = ((4032, 3024), (3024, 4032), (4000, 3000), (3000, 4000), (4080, 3072), (1920, 1080))
SCREENSHOTS = ((1920, 1080), (2560, 1440), (1440, 900), (1366, 768), (1170, 2532), (1080, 2400))
DOCUMENT_PAGES = ((827, 1169), (1240, 1754), (1654, 2339), (850, 1100), (1275, 1650))
WEB_RATIOS = (4 / 3, 3 / 2, 16 / 9, 1.0, 3 / 4, 2 / 3)


def web_image(generator: random.Random) -> tuple[float, float]:
    """Around 800 x 600, most between a quarter and four times that area, in the usual ratios."""
    area = 480_000 * math.exp(generator.gauss(0.0, 0.7))
    ratio = generator.choice(WEB_RATIOS)
    return math.sqrt(area * ratio), math.sqrt(area / ratio)


def thumbnail(generator: random.Random) -> tuple[float, float]:
    """96 to 320 pixels a side."""
    return generator.uniform(96, 320), generator.uniform(96, 320)


def screenshot(generator: random.Random) -> tuple[float, float]:
    """A whole screen, or, as often, a part of one cut out by hand."""
    width, height = generator.choice(SCREENSHOTS)
    if generator.random() < 0.5:
        return width, height
    return width * generator.uniform(0.2, 1.0), height * generator.uniform(0.2, 1.0)


MIX: Mapping[str, tuple[float, Callable[[random.Random], tuple[float, float]]]] = {
    "phone photo": (0.30, lambda generator: generator.choice(PHONE_PHOTOS)),
    "web image": (0.30, web_image),
    "thumbnail": (0.15, thumbnail),
    "screenshot": (0.15, screenshot),
    "document page": (0.10, lambda generator: generator.choice(DOCUMENT_PAGES)),
}


@dataclass(frozen=True)
class Arrival:
    at_us: float
    num_patches: int


@dataclass
class Outcome:
    """One policy under one load. Times in microseconds until ``record``."""

    policy: str
    load: float
    exact_us: float = 0.0
    padded_us: float = 0.0
    useful_patches: int = 0
    bucket_patches: int = 0
    batches: int = 0
    eager_batches: int = 0
    most_passes: int = 0
    waits_us: list[float] = field(default_factory=list)

    def record(self) -> dict[str, float | str | None]:
        waits_ms = sorted(wait / 1e3 for wait in self.waits_us)
        return {
            "policy": self.policy,
            "load": None if self.load == BACKLOG else self.load,
            "waste_share": 1 - self.exact_us / self.padded_us,
            "padding_share": 1 - self.useful_patches / self.bucket_patches,
            "us_per_useful_patch": self.padded_us / self.useful_patches,
            "batches": self.batches,
            "eager_batches": self.eager_batches,
            "items_per_batch": len(waits_ms) / self.batches,
            "median_latency_ms": statistics.median(waits_ms),
            "p99_latency_ms": waits_ms[int(0.99 * (len(waits_ms) - 1))],
            "most_passes": self.most_passes,
        }


class Device:
    """Runs launches in virtual time. Its true time differs from the cost model by a factor of its own for
    each bucket."""

    def __init__(self, ladder: BucketLadder, model_error: float, seed: int) -> None:
        self._ladder = ladder
        self._model_error = model_error
        self._seed = seed

    def factor(self, bucket: Bucket | None) -> float:
        generator = random.Random(f"{self._seed} {bucket}")
        return math.exp(generator.gauss(0.0, self._model_error))


def image_patches(generator: random.Random, area: AreaLimits) -> int:
    """Patches of one image of the mix."""
    kind = generator.choices(list(MIX), [share for share, _ in MIX.values()])[0]
    width, height = MIX[kind][1](generator)
    height, width = rounded_size(round(height), round(width), PATCH_SIZE * MERGE_SIZE, area)
    return height * width // PATCH_SIZE**2


def arrivals_of(
    sizes: Sequence[int], load: float, cost: CostModel, generator: random.Random
) -> list[Arrival]:
    """The images in order, at exponential distances for the load."""
    useful_us = statistics.fmean(cost.added_us(Launch.of([size])) for size in sizes)
    at_us, arrivals = 0.0, []
    for size in sizes:
        arrivals.append(Arrival(at_us, size))
        if load != BACKLOG:
            at_us += generator.expovariate(load / useful_us)
    return arrivals


def simulate(
    policy: str,
    planner: Planner,
    device: Device,
    ladder: BucketLadder,
    load: float,
    arrivals: Sequence[Arrival],
) -> Outcome:
    """Every image through the planner and the device, one batch after another."""
    outcome = Outcome(policy, load)
    arrived: dict[Ticket, float] = {}
    now_us, following = 0.0, 0
    while following < len(arrivals) or len(planner):
        if not len(planner):
            now_us = max(now_us, arrivals[following].at_us)
        while following < len(arrivals) and arrivals[following].at_us <= now_us:
            ticket = Ticket(arrivals[following].num_patches)
            arrived[ticket] = arrivals[following].at_us
            planner.add(ticket)
            following += 1
        batch = planner.next_batch(now_us / 1e6).batch
        launch = Launch.of(ticket.num_patches for ticket in batch)
        bucket = ladder.choose_for(launch)
        factor = device.factor(bucket)
        padded_us = ladder.predicted_us(launch) * factor
        now_us += padded_us
        outcome.padded_us += padded_us
        outcome.exact_us += min(padded_us, ladder.cost.exact_us(launch) * factor)
        outcome.useful_patches += launch.num_patches
        outcome.bucket_patches += bucket.num_patches if bucket else launch.num_patches
        outcome.batches += 1
        outcome.eager_batches += bucket is None
        for ticket in batch:
            outcome.waits_us.append(now_us - arrived.pop(ticket))
            outcome.most_passes = max(outcome.most_passes, ticket.passes)
    return outcome


def powers_of_two(max_patches: int) -> BucketLadder:
    """A coarse ladder: a few sizes, each twice the one before."""
    return ladder_of_sizes({*(1 << power for power in range(6, max_patches.bit_length())), max_patches})


def run(arguments: argparse.Namespace, console: Console) -> dict[str, object]:
    area = AreaLimits(arguments.min_pixels, arguments.max_pixels)
    generator = random.Random(arguments.seed)
    sizes = [image_patches(generator, area) for _ in range(arguments.images)]
    ladder, doubling = default_ladder(arguments.max_patches), powers_of_two(arguments.max_patches)
    policies = {
        "planner": (ladder, ladder),
        "first come": (ladder, None),
        "planner, coarse": (doubling, doubling),
        "first come, coarse": (doubling, None),
    }
    table = Table(
        "load", "policy", "waste", "padding", "us/patch", "items/batch", "median ms", "p99 ms", "passes"
    )
    records = []
    for load in (*LOADS, BACKLOG):
        arrivals = arrivals_of(sizes, load, H200_COST, random.Random(arguments.seed + 1))
        for policy, (buckets, planned) in policies.items():
            planner = Planner(arguments.max_patches, arguments.max_items, planned)
            device = Device(buckets, arguments.model_error, arguments.seed)
            record = simulate(policy, planner, device, buckets, load, arrivals).record()
            records.append(record)
            table.add_row(
                "backlog" if load == BACKLOG else f"{load:.2f}",
                policy,
                f"{record['waste_share']:.1%}",
                f"{record['padding_share']:.1%}",
                f"{record['us_per_useful_patch']:.3f}",
                f"{record['items_per_batch']:.1f}",
                f"{record['median_latency_ms']:.1f}",
                f"{record['p99_latency_ms']:.1f}",
                str(record["most_passes"]),
            )
    console.print(table)
    console.print(
        f"seed {arguments.seed}; {len(sizes)} images of {min(sizes)} to {max(sizes)} patches, median "
        f"{statistics.median(sizes):g}; default ladder of {len(ladder)} buckets, coarse of {len(doubling)}"
    )
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    return {
        **describe_environment(torch.device("cpu"), None),
        "settings": settings,
        "mix": {kind: share for kind, (share, _) in MIX.items()},
        "patches": {
            f"p{part}": value
            for part, value in zip(range(10, 100, 10), statistics.quantiles(sizes, n=10), strict=True)
        },
        "cost": asdict(H200_COST),
        "num_buckets": {"default": len(ladder), "coarse": len(doubling)},
        "records": records,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--max-patches", type=int, default=16_384, help="budget of one batch")
    parser.add_argument("--max-items", type=int, default=64)
    parser.add_argument("--min-pixels", type=int, default=65_536)
    parser.add_argument("--max-pixels", type=int, default=2_097_152)
    parser.add_argument(
        "--model-error", type=float, default=0.05, help="spread of the device about the model"
    )
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is recorded")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = secrets.randbelow(2**31)
    console = Console()
    result = run(arguments, console)
    path = write_new(arguments.out, str(result["date"])[:10], result)
    console.print(f"wrote {path}")


def write_new(folder: Path, date: str, result: Mapping[str, object]) -> Path:
    """Writes ``padding-<date>.json``; a second result of a day gets a number, none is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = folder / (f"padding-{date}.json" if number == 1 else f"padding-{date}-{number}.json")
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(result, file, indent=1)
                file.write("\n")
        except FileExistsError:
            number += 1
        else:
            return path


if __name__ == "__main__":
    main()
