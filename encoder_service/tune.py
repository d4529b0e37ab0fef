"""``vision-encoder tune``: a bucket ladder for the image sizes that a service sees.

Owns reading the sizes and showing the outcome. The optimisation is ``scheduler.tuning``'s; the family's rule
from pixels to patches is passed in.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from encoder_service.errors import ConfigurationError, InvalidInput
from encoder_service.scheduler.buckets import BucketLadder, Waste, default_ladder
from encoder_service.scheduler.cost import H200_COST, CostModel, Launch
from encoder_service.scheduler.tuning import TunedLadder, launch_histogram, tune_ladder
from encoder_service.types import Grid

# height, width in pixels to the grid that an image of that size will have; raises InvalidInput.
TargetGrid: TypeAlias = Callable[[int, int], Grid]
REQUIRED_COLUMNS = ("width", "height")
# What the table of alternatives offers beside the default ladder's own number of sizes.
FEWER_SIZES = (8, 16, 32)


@dataclass(frozen=True)
class Traffic:
    """Image counts by (height, width) in pixels."""

    counts: Mapping[tuple[int, int], float]

    @property
    def num_images(self) -> float:
        return sum(self.counts.values())


@dataclass(frozen=True)
class TuneReport:
    """The proposal beside the default ladder, both on the same launches.

    alternatives: the proposal's waste by number of sizes. oversized: images above max_patches, which run
    eager. refused: images that the family's preprocessing refuses.
    """

    num_images: float
    oversized: float
    refused: float
    proposed: TunedLadder
    default: TunedLadder
    alternatives: Mapping[int, Waste] = field(default_factory=dict)


def read_traffic(path: Path) -> Traffic:
    """Sizes from a CSV file with the columns width, height in pixels and, if there, count.

    Raises ConfigurationError naming the line for anything else: missing columns, numbers that are no
    positive integers, no images at all, a file that cannot be read.
    """
    counts: defaultdict[tuple[int, int], float] = defaultdict(float)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            columns = [(name or "").strip().lower() for name in reader.fieldnames or ()]
            missing = [name for name in REQUIRED_COLUMNS if name not in columns]
            if missing:
                raise ConfigurationError(
                    f"{path}: columns are {columns}, needs {', '.join(missing)}", found=columns
                )
            reader.fieldnames = columns
            for row in reader:
                where = f"{path} line {reader.line_num}"
                size = positive(row["height"], "height", where), positive(row["width"], "width", where)
                counts[size] += positive(row["count"], "count", where) if "count" in columns else 1
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{path} cannot be read as CSV: {error}") from error
    if not counts:
        raise ConfigurationError(f"{path} has 0 images, needs at least 1", found=0)
    return Traffic(dict(counts))


def positive(text: str | None, name: str, where: str) -> int:
    """A positive integer. Raises ConfigurationError naming the place."""
    try:
        value = int(text or "")
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigurationError(f"{where}: {name} is {text!r}, needs a positive integer")
    return value


def tune(
    traffic: Path,
    target_grid: TargetGrid,
    *,
    max_patches: int,
    max_items: int,
    num_sizes: int | None = None,
    cost: CostModel = H200_COST,
    max_frames: int = 1,
    merge_size: int = 2,
    console: Console | None = None,
) -> TuneReport:
    """Proposes a ladder of ``num_sizes`` sizes (default: as many as the default ladder has) for the images
    of a CSV file, prints it to ``console`` when given, and returns what was printed.

    max_patches, max_items: the planner's budget of one batch. Raises ConfigurationError for a file without
    usable sizes.
    """
    sizes = read_traffic(traffic)
    patches: defaultdict[int, float] = defaultdict(float)
    refused = 0.0
    for (height, width), count in sizes.counts.items():
        try:
            patches[target_grid(height, width).num_patches] += count
        except InvalidInput:
            refused += count
    if not patches:
        raise ConfigurationError(
            f"{traffic} has {sizes.num_images:g} images, the model's preprocessing takes 0 of them"
        )
    histogram = launch_histogram(patches, max_patches, max_items)
    default = default_ladder(max_patches, cost=cost, max_frames=max_frames, merge_size=merge_size)

    def tuned(count: int) -> TunedLadder:
        return tune_ladder(
            histogram, count, max_patches, cost=cost, max_frames=max_frames, unit=merge_size**2
        )

    proposed = tuned(num_sizes or len(default.sizes))
    report = TuneReport(
        num_images=sizes.num_images,
        oversized=sum(count for size, count in patches.items() if size > max_patches),
        refused=refused,
        proposed=proposed,
        default=TunedLadder(default, default.waste(histogram)),
        alternatives={count: tuned(count).waste for count in FEWER_SIZES if count < len(default.sizes)},
    )
    if console is not None:
        show(report, histogram, console)
    return report


def show(report: TuneReport, histogram: Mapping[Launch, float], console: Console) -> None:
    """Prints the proposal: predicted waste against the default, alternatives, and the sizes to configure."""
    console.print(
        f"{report.num_images:g} images, {len(histogram)} different launches from idle to a full queue; "
        f"{report.oversized:g} images are above a batch's budget and run without a graph"
        + (f"; {report.refused:g} are refused by the preprocessing" if report.refused else "")
    )
    table = Table("ladder", "sizes", "graphs", "padding, share of time", "eager launches")
    for name, entry in (("default", report.default), ("proposed", report.proposed)):
        table.add_row(
            name,
            str(len(entry.ladder.sizes)),
            str(len(entry.ladder)),
            f"{entry.waste.share:.2%}",
            f"{eager_share(entry.waste):.2%}",
        )
    for count, waste in report.alternatives.items():
        table.add_row(
            f"with {count} sizes", str(count), "", f"{waste.share:.2%}", f"{eager_share(waste):.2%}"
        )
    console.print(table)
    console.print(f"proposed sizes in patches: {comma_list(report.proposed.ladder)}", soft_wrap=True)


def eager_share(waste: Waste) -> float:
    """Part of all launches that no bucket takes."""
    total = waste.launches + waste.eager_launches
    return waste.eager_launches / total if total else 0.0


def comma_list(ladder: BucketLadder) -> str:
    """The ladder's sizes as they are configured: ``64,128,784``."""
    return ",".join(str(size) for size in ladder.sizes)
