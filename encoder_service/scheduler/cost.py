"""The device time of a launch, predicted from its shapes.

Owns the record of a launch's shape and the cost model that is fitted to measurements. ``buckets.py`` chooses
the graph shapes, ``engine/calibrate.py`` measures.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from encoder_service.errors import ConfigurationError

# A line over the number of patches is used if its largest relative error is at most this.
LINE_ERROR = 0.08
# Columns count as linearly dependent if their smallest singular value is below this share of the largest.
MIN_INDEPENDENCE = 1e-6


class Launch(NamedTuple):
    """The shape of one batch. num_sequences, max_seqlen: attention sequences and the longest of them.
    sum_squares: sum of their squared lengths. num_frames: the most frames averaged into one row (1 for
    families that do not average)."""

    num_patches: int
    num_sequences: int
    max_seqlen: int
    sum_squares: int
    num_frames: int = 1

    @classmethod
    def of(cls, seqlens: Iterable[int], num_frames: int = 1) -> Launch:
        """The launch of sequences of these lengths, in patches."""
        lengths = tuple(seqlens)
        return cls(
            sum(lengths),
            len(lengths),
            max(lengths, default=0),
            sum(length * length for length in lengths),
            num_frames,
        )


@dataclass(frozen=True)
class Timing:
    """One measurement: the launch, the padded shape that it ran in, and its time in microseconds."""

    launch: Launch
    num_patches: int
    num_sequences: int
    max_seqlen: int
    us: float

    @property
    def features(self) -> tuple[float, float, float, float]:
        """The values that a CostModel's coefficients are multiplied with."""
        return (
            1.0,
            float(self.num_patches),
            float(self.launch.sum_squares),
            float(self.num_sequences * self.max_seqlen),
        )


@dataclass(frozen=True)
class CostModel:
    """The time of one forward pass in microseconds:

    fixed_us + us_per_patch * num_patches + us_per_square * sum_squares
    + us_per_slot_patch * num_sequences * max_seqlen

    us_per_patch covers matrix products and norms, us_per_square attention. us_per_slot_patch covers kernels
    that launch tiles for every sequence slot up to the bucket's max_seqlen, even for empty slots.

    curve: (patches, us), ascending in both. Between its ends it replaces fixed_us + us_per_patch *
    num_patches, for a device that no line describes well enough. Above its end, time rises by us_per_patch.
    """

    fixed_us: float
    us_per_patch: float
    us_per_square: float
    us_per_slot_patch: float = 0.0
    curve: tuple[tuple[int, float], ...] = ()

    def padded_us(self, launch: Launch, num_patches: int, num_sequences: int, max_seqlen: int) -> float:
        """Time of the launch in padded shapes. Attention skips padding patches."""
        return self.shape_us(num_patches, num_sequences, max_seqlen) + self.us_per_square * launch.sum_squares

    def exact_us(self, launch: Launch) -> float:
        """Time of the launch in a graph of exactly its shapes."""
        return self.padded_us(launch, launch.num_patches, launch.num_sequences, launch.max_seqlen)

    def shape_us(self, num_patches: int, num_sequences: int, max_seqlen: int) -> float:
        """The part of the time that depends on the padded shapes alone."""
        return self.patches_us(num_patches) + self.us_per_slot_patch * num_sequences * max_seqlen

    def patches_us(self, num_patches: int) -> float:
        """The part of the time that depends on the number of patches. It never decreases."""
        if not self.curve:
            return self.fixed_us + self.us_per_patch * num_patches
        after = bisect_right(self.curve, num_patches, key=lambda point: point[0])
        if after == 0:
            return self.curve[0][1]
        low, low_us = self.curve[after - 1]
        if after == len(self.curve):
            return low_us + self.us_per_patch * (num_patches - low)
        high, high_us = self.curve[after]
        return low_us + (high_us - low_us) * (num_patches - low) / (high - low)

    def relative_error(self, timing: Timing) -> float:
        """Prediction divided by measurement, minus one."""
        predicted_us = self.padded_us(
            timing.launch, timing.num_patches, timing.num_sequences, timing.max_seqlen
        )
        return predicted_us / timing.us - 1.0

    @classmethod
    def fit(cls, timings: Sequence[Timing]) -> CostModel:
        """Least squares of the relative error over all four coefficients. Coefficients that would be negative
        are zero; so is us_per_slot_patch if the timings do not determine it.

        Raises ConfigurationError for fewer than three different timings, for timings that do not determine
        the other three coefficients, and for a time that is not positive.
        """
        if len(set(timings)) < 3:
            raise ConfigurationError(
                f"the cost model has 3 unknowns, {len(set(timings))} different timings were measured"
            )
        if min(timing.us for timing in timings) <= 0:
            raise ConfigurationError(
                f"a measured time is {min(timing.us for timing in timings)} us, needs more than 0"
            )
        fixed, patch, square, slot_patch = solve_relative([timing.features for timing in timings], timings)
        return cls(fixed, patch, square, slot_patch)

    def with_curve(self, timings: Sequence[Timing]) -> CostModel:
        """The same line with a curve through the timings' sizes. Curve, attention and slots are fitted
        together; the curve never decreases. Raises ConfigurationError as ``fit`` does."""
        sizes = sorted({timing.num_patches for timing in timings})
        *levels, square, slot_patch = solve_relative(
            [
                (*(float(timing.num_patches == size) for size in sizes), *timing.features[2:])
                for timing in timings
            ],
            timings,
        )
        curve = tuple(zip(sizes, accumulate(levels, max), strict=True))
        return CostModel(self.fixed_us, self.us_per_patch, square, slot_patch, curve)


@dataclass(frozen=True)
class Calibration:
    """A cost model fitted on the serving device, with its largest and mean relative error over the timings.
    seconds: duration of the measurement."""

    cost: CostModel
    max_error: float
    mean_error: float
    seconds: float = 0.0

    @classmethod
    def fit(cls, timings: Sequence[Timing], seconds: float = 0.0) -> Calibration:
        """Fits a line, or a curve if the line's largest error is above LINE_ERROR and the curve's mean error
        is smaller. Raises ConfigurationError as CostModel.fit does."""
        line = CostModel.fit(timings)
        straight = cls._of(line, timings, seconds)
        if straight.max_error <= LINE_ERROR:
            return straight
        curve = cls._of(line.with_curve(timings), timings, seconds)
        return curve if curve.mean_error < straight.mean_error else straight

    @classmethod
    def _of(cls, cost: CostModel, timings: Sequence[Timing], seconds: float) -> Calibration:
        errors = [abs(cost.relative_error(timing)) for timing in timings]
        return cls(cost, max(errors), math.fsum(errors) / len(errors), seconds)


def solve_relative(features: Sequence[Sequence[float]], timings: Sequence[Timing]) -> list[float]:
    """Non-negative coefficients of the columns that minimise the sum of squared relative errors. The last is
    zero if its column depends on the others. Raises ConfigurationError if another column does."""
    rows = np.array(features) / np.array([[timing.us] for timing in timings])
    # Columns are scaled to their largest entry, since squares are a million times the constant.
    scales = rows.max(axis=0)
    scales[scales == 0.0] = 1.0
    coefficients = np.zeros(len(scales))
    last = len(scales) - 1
    used = list(range(len(scales)))
    while used:
        solution, _, rank, _ = np.linalg.lstsq((rows / scales)[:, used], np.ones(len(rows)), MIN_INDEPENDENCE)
        if rank < len(used):
            if used[-1] != last:
                raise ConfigurationError(
                    f"{len(rows)} samples do not determine {len(used)} unknowns of the cost model"
                )
            del used[-1]
        elif solution.min() >= 0:
            coefficients[used] = solution / scales[used]
            break
        else:
            del used[int(solution.argmin())]
    return [float(value) for value in coefficients]


# The default without a measurement. Fitted to five exact-shape timings of the half-fused 27-block tower
# of width 1152 on an H200 in bfloat16 (2.57 ms at 1 x 784 patches, 12.7 at 1 x 4096, 96.4 at 8 x 4096, 52.6
# at 32 x 784, 79.7 at 36 mixed images), within 1.2 % of each. The last coefficient comes from 14.8 ms for 1 x
# 4096 in 64 slots of 5120.
H200_COST = CostModel(963.0, 1.848, 2.525e-4, 6.7e-4)
