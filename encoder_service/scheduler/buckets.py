"""Buckets: the batch shapes that have a captured graph.

Owns which shapes exist and which one a batch uses. ``engine/graphs.py`` captures and replays them.

A bucket fixes four numbers: patches, sequence slots, the longest sequence, frames per row. The longest
sequence matters because varlen attention kernels launch tiles for every slot up to it. So each size has a few
bounds on the sequence length, and fewer slots where the bound is high.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from encoder_service.errors import ConfigurationError
from encoder_service.scheduler.cost import H200_COST, Calibration, CostModel, Launch

# Bounds on the sequence length that a size offers besides the size itself: images of 512 x 512, 1024 x 1024
# and 1920 x 1080 pixels, at 16 pixels per patch side.
SEQLEN_BOUNDS = (1024, 4096, 8192)
MIN_SLOTS = 8
# Common image sizes in patches: 448, 512 and 768 pixels square. A batch of equal images has a multiple of one
# of them.
COMMON_SIZES = (784, 1024, 2304)
SMALLEST_SIZE = 64
# Sizes are multiples of the rows of one matrix-product tile, since sizes between tiles take as long.
SMALL_STEP = 64
LARGE_STEP = 128
LARGE_SIZE = 4096
# Largest time difference between neighbouring sizes, as a share of the larger size's time.
MAX_STEP_SHARE = 0.06
# Minimum time of an eager forward pass of any size, since the host launches its kernels one by one (7.2 ms at
# 784 patches, 27 fused blocks, H200).
EAGER_US = 7000.0


@dataclass(frozen=True)
class Bucket:
    """The static shapes of one graph.

    num_patches: rows of the patch tensors. num_sequences: sequence slots. max_seqlen: the longest sequence
    that it takes, in patches. num_frames: the most frames averaged into one row.
    """

    num_patches: int
    num_sequences: int
    max_seqlen: int
    num_frames: int = 1


class Priced(NamedTuple):
    """A bucket and the part of its time that depends on its shape (CostModel.shape_us)."""

    bucket: Bucket
    shape_us: float


class BucketLadder:
    """All buckets of one tower. Immutable.

    buckets: cheapest first. sizes: their distinct sizes in patches, ascending.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        cost: CostModel = H200_COST,
    ) -> None:
        """buckets: different ones."""
        self.cost = cost
        self.buckets = tuple(sorted(buckets, key=self._order))
        self.sizes = tuple(sorted({bucket.num_patches for bucket in self.buckets}))
        # For each size, the buckets that are large enough, cheapest first. A choice then costs a bisection
        # and usually one comparison. The planner makes hundreds of choices per batch.
        priced = [Priced(bucket, self._order(bucket)[0]) for bucket in self.buckets]
        self._candidates = [
            tuple(candidate for candidate in priced if candidate.bucket.num_patches >= size)
            for size in self.sizes
        ]

    def __len__(self) -> int:
        return len(self.buckets)

    @property
    def max_patches(self) -> int:
        return self.sizes[-1]

    @property
    def largest_first(self) -> tuple[Bucket, ...]:
        """The order of capture. Later graphs then find the shared memory pool large enough."""
        return tuple(
            sorted(self.buckets, key=lambda b: (b.num_patches, b.num_sequences * b.max_seqlen), reverse=True)
        )

    def choose(self, launch: Launch) -> Bucket | None:
        """The cheapest bucket that takes the launch; None to run it eagerly."""
        priced = self.price(launch)
        return None if priced is None else priced.bucket

    def price(self, launch: Launch) -> Priced | None:
        """Like ``choose``, with the bucket's cost."""
        num_patches, num_sequences, max_seqlen, _, num_frames = launch
        first = bisect_left(self.sizes, num_patches)
        if first == len(self.sizes):
            return None
        for priced in self._candidates[first]:
            bucket = priced.bucket
            if (
                num_sequences <= bucket.num_sequences
                and max_seqlen <= bucket.max_seqlen
                and num_frames <= bucket.num_frames
            ):
                return priced
        return None

    def predicted_us(self, launch: Launch) -> float:
        """Predicted device time of the launch, in its bucket or else run eagerly."""
        priced = self.price(launch)
        if priced is None:
            return max(EAGER_US, self.cost.exact_us(launch))
        return priced.shape_us + self.cost.us_per_square * launch.sum_squares

    def calibrated(self, calibration: Calibration) -> BucketLadder:
        """The same buckets, chosen by a measured cost model."""
        return BucketLadder(self.buckets, calibration.cost)

    def _order(self, bucket: Bucket) -> tuple[float, ...]:
        """Sort key: cost first. Ties go to the smallest bucket with the fewest tiles that kernels could
        launch, which take some time even where the model has no term for them."""
        return (
            self.cost.shape_us(bucket.num_patches, bucket.num_sequences, bucket.max_seqlen),
            bucket.num_patches,
            bucket.num_sequences * bucket.max_seqlen,
            bucket.max_seqlen,
            bucket.num_frames,
        )


def seqlen_bounds(num_patches: int) -> tuple[int, ...]:
    """The bounds on the sequence length that a size offers, ascending."""
    return (*(bound for bound in SEQLEN_BOUNDS if bound < num_patches), num_patches)


def sequence_slots(num_patches: int, max_seqlen: int) -> int:
    """Number of sequence slots of a bucket: one per 128 patches for short sequences, one per 256 for longer
    ones, at least MIN_SLOTS. Slots times bound grow with the size and, at one size, with the bound, so the
    cheapest bucket is the one with the smallest size and the shortest bound that fit."""
    if max_seqlen <= 1024:
        return max(MIN_SLOTS, min(num_patches // 128, 256))
    return max(MIN_SLOTS, min(num_patches // 256, 128 if max_seqlen <= 4096 else 64))


def ladder_of_sizes(sizes: Iterable[int], *, max_frames: int = 1) -> BucketLadder:
    """A ladder of these sizes in patches, each with its bounds and slots."""
    return BucketLadder(
        Bucket(size, sequence_slots(size, bound), bound, max_frames)
        for size in sorted(set(sizes))
        for bound in seqlen_bounds(size)
    )


def default_ladder(
    max_patches: int, *, max_frames: int = 1, merge_size: int = 2, longest: int = 0
) -> BucketLadder:
    """A ladder up to ``max_patches`` for unknown traffic.

    longest: patches of the largest single item that attends over all its patches. If this is above
    max_patches, sizes continue up to it with one bucket each, because only such an item, alone in its batch,
    is that large.

    Common image sizes and their multiples by powers of two have their own buckets. Between them, sizes are
    spaced so that one step adds about MAX_STEP_SHARE of the next size's time on the cost curve without
    attention, rounded to 64 patches (128 from 4096 on). Sizes are multiples of merge_size squared. Raises
    ConfigurationError if max_patches is not.
    """
    unit = merge_size * merge_size
    if max_patches < unit or max_patches % unit:
        raise ConfigurationError(f"max_patches is {max_patches}, needs a positive multiple of {unit}")
    anchors = sorted(
        {size for size in anchor_sizes(max_patches) if size % unit == 0 and size < max_patches}
        | {max_patches}
    )
    sizes = {anchors[0]}
    for low, high in pairwise(anchors):
        sizes |= set(between(low, high, unit))
        sizes.add(high)
    ladder = ladder_of_sizes(sizes, max_frames=max_frames)
    grain = math.lcm(LARGE_STEP, unit)
    top = -(-longest // grain) * grain
    if longest <= max_patches:
        return ladder
    above = (*between(max_patches, top, unit), top)
    alone = (Bucket(size, sequence_slots(size, size), size, max_frames) for size in above)
    return BucketLadder((*ladder.buckets, *alone))


def anchor_sizes(max_patches: int) -> list[int]:
    """Sizes that get their own bucket: the smallest, and common image sizes times powers of two."""
    doublings = range(max(1, max_patches).bit_length())
    return [SMALLEST_SIZE, *(size << doubling for size in COMMON_SIZES for doubling in doublings)]


def between(low: int, high: int, unit: int) -> list[int]:
    """Sizes strictly between ``low`` and ``high``, at equal ratios of time, rounded to whole tiles."""
    cost = H200_COST
    low_us, high_us = cost.patches_us(low), cost.patches_us(high)
    steps = math.ceil(math.log(high_us / low_us) / -math.log1p(-MAX_STEP_SHARE))
    grain = math.lcm(SMALL_STEP if high <= LARGE_SIZE else LARGE_STEP, unit)
    steps = min(steps, max(1, (high - low) // grain))
    sizes = []
    for step in range(1, steps):
        us = low_us * (high_us / low_us) ** (step / steps)
        size = round((us - cost.fixed_us) / cost.us_per_patch / grain) * grain
        if low < size < high:
            sizes.append(size)
    return sizes
