"""Traffic for the scheduling simulation: sizes from CSV files, and streams of arrivals made from them.

    python bench/scheduling_traffic.py     # draws the files of bench/traffic anew, from the seed below

Owns which streams there are. The files have the columns of ``vision-encoder tune --traffic`` (width, height
in pixels, count), and beside them what an item becomes: patches, sequences (of a clip, one for each pair of
frames). No live service stands behind them: they were drawn once from the mix of formats in padding.py and
are kept, so that runs compare; files of one's own take their place with ``--traffic``.
"""

from __future__ import annotations

import csv
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from encoder_service.scheduler.cost import CostModel, Launch

TRAFFIC = Path(__file__).parent / "traffic"
MIN_PIXELS, MAX_PIXELS = 65_536, 2_097_152
PATCH_SIZE, FACTOR = 16, 32
DRAWN, SEED = 400, 20
CLIP_SIDES = ((448, 448), (640, 352), (352, 640), (320, 320))
CLIP_FRAMES = (8, 16, 16, 32)
# Beyond what the processor's limits let through by default; the item of a service that raised them.
HUGE = (2560, 1504)
COLUMNS = ("width", "height", "count", "patches", "sequences")


@dataclass(frozen=True)
class Shape:
    """What an item is to the device."""

    num_patches: int
    num_sequences: int = 1

    @property
    def launch(self) -> Launch:
        return Launch.of([self.num_patches // self.num_sequences] * self.num_sequences)


@dataclass(frozen=True)
class Arrival:
    """deadline_us: after its arrival; None: none."""

    at_us: float
    shape: Shape
    stream: str
    namespace: str = ""
    priority: int = 0
    deadline_us: float | None = None


@dataclass(frozen=True)
class Stream:
    """Items of one kind. load: the share of the device that their useful work alone takes; 0: they do not
    come at random but ``backlog`` patches of them are kept waiting. burst: items that come at once. stop_s:
    when it ends. namespace: the tenant that they belong to."""

    name: str
    files: tuple[tuple[str, float], ...]
    load: float = 0.0
    backlog: int = 0
    burst: int = 1
    priority: int = 0
    deadline_ms: float | None = None
    stop_s: float = math.inf
    namespace: str = ""


@dataclass(frozen=True)
class Scenario:
    """measured: the streams that latencies are told of, else all. seconds: of arrivals."""

    name: str
    streams: tuple[Stream, ...]
    seconds: float = 60.0
    weights: dict[str, float] = field(default_factory=dict)


PHOTOGRAPHS = (("photographs", 1.0),)
SCENARIOS = (
    Scenario("photographs, load 0.7", (Stream("all", PHOTOGRAPHS, load=0.7),)),
    Scenario("photographs, load 0.95", (Stream("all", PHOTOGRAPHS, load=0.95),)),
    Scenario("bursts", (Stream("all", PHOTOGRAPHS, load=0.7, burst=64),)),
    Scenario(
        "huge among small",
        (Stream("small", (("thumbnails", 1.0),), load=0.6), Stream("huge", (("huge", 1.0),), load=0.3)),
    ),
    Scenario(
        "flood",
        (
            Stream("flood", PHOTOGRAPHS, backlog=400_000, namespace="a"),
            Stream("small", PHOTOGRAPHS, load=0.1, namespace="b"),
        ),
    ),
    Scenario("clips", (Stream("all", (("photographs", 0.8), ("clips", 0.2)), load=0.8),)),
    Scenario(
        "priorities",
        (
            Stream("high", PHOTOGRAPHS, load=1.1, priority=1, stop_s=30.0),
            Stream("low", PHOTOGRAPHS, load=0.1, stop_s=30.0),
        ),
        seconds=30.0,
    ),
    Scenario("deadlines", (Stream("all", PHOTOGRAPHS, load=1.3, deadline_ms=500.0),), seconds=30.0),
)


class Sizes:
    """Shapes of the files of a folder, drawn by their counts."""

    def __init__(self, folder: Path = TRAFFIC) -> None:
        self._folder = folder
        self._read: dict[str, tuple[list[Shape], list[float]]] = {}

    def shapes(self, name: str) -> tuple[list[Shape], list[float]]:
        if name not in self._read:
            self._read[name] = read_sizes(self._folder / f"{name}.csv")
        return self._read[name]

    def draw(self, files: Sequence[tuple[str, float]], generator: random.Random) -> Shape:
        name = files[0][0]
        if len(files) > 1:
            (name,) = generator.choices([one for one, _ in files], [share for _, share in files])
        (shape,) = generator.choices(*self.shapes(name))
        return shape

    def mean_us(self, files: Sequence[tuple[str, float]], cost: CostModel) -> float:
        """Useful device time of one item of the mix."""
        mean_us = total_share = 0.0
        for name, share in files:
            shapes, counts = self.shapes(name)
            added = [cost.added_us(shape.launch) for shape in shapes]
            mean_us += share * sum(us * n for us, n in zip(added, counts, strict=True)) / sum(counts)
            total_share += share
        return mean_us / total_share


def read_sizes(path: Path) -> tuple[list[Shape], list[float]]:
    """Shapes and how often each comes. A file without the columns of ours has its pixels rounded as the
    processor does. Raises ValueError for a file without sizes."""
    shapes, counts = [], []
    with path.open(newline="", encoding="utf-8-sig") as file:
        for row in csv.DictReader(file, skipinitialspace=True):
            patches = int(row.get("patches") or 0) or patches_of(int(row["width"]), int(row["height"]))
            shapes.append(Shape(patches, int(row.get("sequences") or 1)))
            counts.append(float(row.get("count") or 1))
    if not shapes:
        raise ValueError(f"{path} has 0 sizes, needs at least 1")
    return shapes, counts


def patches_of(width: float, height: float) -> int:
    """By the processor's rounding under its default limits of the area. Needs torch, which it imports."""
    from encoder_service.ingest.qwen_vl import AreaLimits, rounded_size

    rounded = rounded_size(round(height), round(width), FACTOR, AreaLimits(MIN_PIXELS, MAX_PIXELS))
    return math.prod(rounded) // PATCH_SIZE**2


def arrivals_of(stream: Stream, seconds: float, sizes: Sizes, cost: CostModel, seed: int) -> list[Arrival]:
    """A stream's items by time: bursts at exponential distances. The same for every policy."""
    generator = random.Random(f"{seed} {stream.name}")
    arrivals: list[Arrival] = []
    if not stream.load:
        return arrivals
    gap_us = stream.burst * sizes.mean_us(stream.files, cost) / stream.load
    at_us, end_us = generator.expovariate(1 / gap_us), min(seconds, stream.stop_s) * 1e6
    while at_us < end_us:
        arrivals += [item_of(stream, at_us, sizes, generator) for _ in range(stream.burst)]
        at_us += generator.expovariate(1 / gap_us)
    return arrivals


def item_of(stream: Stream, at_us: float, sizes: Sizes, generator: random.Random) -> Arrival:
    deadline_us = None if stream.deadline_ms is None else stream.deadline_ms * 1e3
    return Arrival(
        at_us,
        sizes.draw(stream.files, generator),
        stream.name,
        stream.namespace,
        stream.priority,
        deadline_us,
    )


# -- the files -----------------------------------------------------------------------------------------


def drawn_sizes() -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """The rows of each file."""
    from padding import MIX, thumbnail

    generator = random.Random(SEED)

    def rows(draw: Callable[[], tuple[float, float, int]], number: int) -> list[tuple[int, ...]]:
        counted: Counter[tuple[int, ...]] = Counter()
        for _ in range(number):
            width, height, sequences = draw()
            width, height = round(width), round(height)
            patches = patches_of(width, height) if sequences else math.prod(HUGE) // PATCH_SIZE**2
            counted[width, height, patches * max(1, sequences), max(1, sequences)] += 1
        return [(w, h, n, patches, sequences) for (w, h, patches, sequences), n in sorted(counted.items())]

    def photograph() -> tuple[float, float, int]:
        (kind,) = generator.choices(list(MIX), [share for share, _ in MIX.values()])
        return (*MIX[kind][1](generator), 1)

    yield "photographs", rows(photograph, DRAWN)
    yield "thumbnails", rows(lambda: (*thumbnail(generator), 1), DRAWN)
    yield "huge", rows(lambda: (*HUGE, 0), 1)
    yield (
        "clips",
        rows(lambda: (*generator.choice(CLIP_SIDES), generator.choice(CLIP_FRAMES) // 2), DRAWN // 4),
    )


def main() -> None:
    TRAFFIC.mkdir(exist_ok=True)
    for name, rows in drawn_sizes():
        with (TRAFFIC / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(rows)


if __name__ == "__main__":
    main()
