"""A bucket ladder from traffic: which launches image sizes lead to, and the sizes that waste least on them.

Owns the histogram of launches and the optimal choice of sizes. Reading traffic and showing the outcome is
``encoder_service.tune``'s.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from encoder_service.errors import ConfigurationError
from encoder_service.scheduler.buckets import (
    MIN_SLOTS,
    SEQLEN_BOUNDS,
    SMALL_STEP,
    BucketLadder,
    Waste,
    ladder_of_sizes,
    seqlen_bounds,
    sequence_slots,
)
from encoder_service.scheduler.cost import H200_COST, CostModel, Launch

# How many images wait when a batch is made: an idle service, some load, more than a batch takes.
LOADS = (1, 2, 4, 8, 16, 32, 64)
SAMPLES_PER_LOAD = 256
# Above this many different launch sizes they are rounded up to whole steps of 64 patches: the search takes
# time in proportion to them.
MAX_EXACT_SIZES = 2048


@dataclass(frozen=True)
class TunedLadder:
    """A ladder, and the waste predicted for it on the histogram it was made from."""

    ladder: BucketLadder
    waste: Waste


def launch_histogram(
    images: Mapping[int, float],
    max_patches: int,
    max_items: int,
    *,
    loads: Sequence[int] = LOADS,
    samples_per_load: int = SAMPLES_PER_LOAD,
    seed: int = 0,
) -> dict[Launch, float]:
    """Launches, weighted, of a service that sees stills of these sizes (patches to count).

    Each load stands for the same number of images. At load 1 every size is its own launch; at load n the
    n images drawn are cut into batches as the planner does: in order, under the budget in patches and
    items. An image above the budget is a launch of its own. Raises ConfigurationError for no images or for
    sizes and counts that are not positive.
    """
    total = sum(images.values())
    if not images or min(images) < 1 or min(images.values()) < 0 or total <= 0:
        raise ConfigurationError(
            f"traffic has {len(images)} sizes with a total count of {total}, needs positive numbers"
        )
    if not loads or min(loads) < 1:
        raise ConfigurationError(f"loads are {list(loads)}, need at least one, each at least 1")
    generator = random.Random(seed)  # noqa: S311 - a sample of traffic, no secret
    sizes, counts = list(images), list(images.values())
    histogram: defaultdict[Launch, float] = defaultdict(float)
    for load in loads:
        if load == 1:
            for size, count in images.items():
                histogram[Launch.of([size])] += count / total
            continue
        draws = max(1, samples_per_load)
        for _ in range(draws):
            waiting = generator.choices(sizes, counts, k=load)
            for batch in cut_batches(waiting, max_patches, max_items):
                histogram[Launch.of(batch)] += 1 / (draws * load)
    return dict(histogram)


def cut_batches(sizes: Sequence[int], max_patches: int, max_items: int) -> list[list[int]]:
    """Batches in order of arrival; what does not fit one waits for a later one."""
    batches = []
    waiting = list(sizes)
    while waiting:
        batch, later, room = [waiting[0]], [], max_patches - waiting[0]
        for size in waiting[1:]:
            if size <= room and len(batch) < max_items:
                batch.append(size)
                room -= size
            else:
                later.append(size)
        batches.append(batch)
        waiting = later
    return batches


def tune_ladder(
    histogram: Mapping[Launch, float],
    num_sizes: int,
    max_patches: int,
    *,
    cost: CostModel = H200_COST,
    max_frames: int = 1,
    unit: int = 4,
) -> TunedLadder:
    """The ladder of at most ``num_sizes`` sizes up to ``max_patches`` that wastes least on these launches.

    No choice of as many sizes, multiples of ``unit``, of which the largest is max_patches, wastes less by
    the cost model (launches above MAX_EXACT_SIZES different sizes are rounded up to 64 patches first). Each
    size offers the same bounds and slots as in the default ladder. Launches that nothing up to max_patches
    takes run eager in any ladder and do not count.

    Method: with sizes sorted, the time of launches i..j in one bucket of the size of j satisfies the
    quadrangle inequality, since it never falls with the size; so the best split of each prefix moves
    monotonically and each layer of the dynamic programme is solved by divide and conquer (Galil and Park,
    Dynamic programming with convexity, concavity and sparsity, 1992).
    """
    if num_sizes < 1:
        raise ConfigurationError(f"num_sizes is {num_sizes}, needs at least 1", found=num_sizes)
    demands = sized_demands(histogram, max_patches, max_frames, unit)
    if len({size for size, _, _ in demands}) > MAX_EXACT_SIZES:
        demands = [(min(max_patches, -(-size // SMALL_STEP) * SMALL_STEP), c, w) for size, c, w in demands]
    demands.append((max_patches, 0, 0.0))
    demands.sort()
    sizes = []
    weights: list[list[float]] = [[] for _ in range(len(SEQLEN_BOUNDS) + 1)]
    for size, group in groupby(demands, key=lambda demand: demand[0]):
        sizes.append(size)
        of_class = [0.0] * len(weights)
        for _, length_class, weight in group:
            of_class[length_class] += weight
        for length_class, weight in enumerate(of_class):
            weights[length_class].append(weight)
    ladder = ladder_of_sizes(best_sizes(sizes, weights, num_sizes, cost), cost=cost, max_frames=max_frames)
    return TunedLadder(ladder, ladder.waste(histogram))


def sized_demands(
    histogram: Mapping[Launch, float], max_patches: int, max_frames: int, unit: int
) -> list[tuple[int, int, float]]:
    """(smallest size that takes the launch, class of its longest sequence, weight) of each launch that
    some size up to max_patches takes."""
    demands = []
    for launch, weight in histogram.items():
        size = smallest_size(launch, unit)
        if size is not None and size <= max_patches and launch.num_frames <= max_frames and weight > 0:
            demands.append((size, length_class(launch.max_seqlen), weight))
    return demands


def length_class(max_seqlen: int) -> int:
    """Which of SEQLEN_BOUNDS holds a sequence; their number: none."""
    return sum(max_seqlen > bound for bound in SEQLEN_BOUNDS)


def smallest_size(launch: Launch, unit: int = 4) -> int | None:
    """The least size, a multiple of ``unit``, whose slots and bounds take the launch; None: no size does."""
    size = -(-max(launch.num_patches, launch.max_seqlen, 1) // unit) * unit
    if launch.num_sequences > MIN_SLOTS:
        per_slot = 128 if launch.max_seqlen <= SEQLEN_BOUNDS[0] else 256
        size = max(size, launch.num_sequences * per_slot)
    return size if launch.num_sequences <= sequence_slots(size, bound_at(size, launch.max_seqlen)) else None


def bound_at(size: int, max_seqlen: int) -> int:
    """The shortest bound that a size offers for a sequence."""
    return next(bound for bound in seqlen_bounds(size) if bound >= max_seqlen)


def shape_us_at(size: int, max_seqlen: int, cost: CostModel) -> float:
    """Time of the bucket at a size for a launch with such a sequence, cut to what the size holds."""
    bound = bound_at(size, min(size, max_seqlen))
    return cost.shape_us(size, sequence_slots(size, bound), bound)


def best_sizes(
    sizes: Sequence[int], weights: Sequence[Sequence[float]], num_sizes: int, cost: CostModel
) -> list[int]:
    """At most ``num_sizes`` of ``sizes`` (ascending, the last always among them) with the least time, when
    ``weights[c][i]`` launches of length class c need ``sizes[i]`` and take the next chosen size above."""
    count = len(sizes)
    if num_sizes >= count:
        return list(sizes)
    sums = [list(accumulate(of_class, initial=0.0)) for of_class in weights]
    times = [[shape_us_at(size, longest, cost) for size in sizes] for longest in (*SEQLEN_BOUNDS, sizes[-1])]

    def span_us(start: int, end: int) -> float:
        """Time of launches start..end-1, all in a bucket of the last one's size."""
        return sum(
            (of_class[end] - of_class[start]) * us[end - 1] for of_class, us in zip(sums, times, strict=True)
        )

    best = [0.0, *(span_us(0, end) for end in range(1, count + 1))]
    splits: list[list[int]] = []
    for _ in range(num_sizes - 1):
        layer, split = best.copy(), [0] * (count + 1)
        pending = [(1, count, 0, count - 1)]
        while pending:
            low, high, first, last = pending.pop()
            middle = (low + high) // 2
            least, where = float("inf"), first
            for start in range(first, min(last, middle - 1) + 1):
                us = best[start] + span_us(start, middle)
                if us < least:
                    least, where = us, start
            layer[middle], split[middle] = least, where
            if low < middle:
                pending.append((low, middle - 1, first, where))
            if middle < high:
                pending.append((middle + 1, high, where, last))
        best = layer
        splits.append(split)
    chosen, end = [], count
    for split in reversed(splits):
        chosen.append(sizes[end - 1])
        end = split[end]
        if end == 0:
            break
    if end:
        chosen.append(sizes[end - 1])
    return sorted(chosen)
