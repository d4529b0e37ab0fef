"""What a launch costs on the device, as far as shapes tell.

Owns the launch's shape and the cost curve fitted to measurements. Which shapes get a graph is buckets.py's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from encoder_service.errors import ConfigurationError


@dataclass(frozen=True)
class Launch:
    """The shape of one batch: patches, attention sequences, the longest of them, the sum of their squared
    lengths, and the most frames that are averaged into one row (1 where the family has no such thing)."""

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
class CostModel:
    """Microseconds of one forward: fixed_us, plus us_per_patch for products and norms, plus us_per_square
    for attention over each sequence's squared length, plus us_per_slot_patch times sequence slots times the
    baked max_seqlen: kernels that launch tiles for every slot up to the bound pay for the empty ones.
    """

    fixed_us: float
    us_per_patch: float
    us_per_square: float
    us_per_slot_patch: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"cost model: {name} is {value}, needs at least 0", found=value)

    def padded_us(self, launch: Launch, num_patches: int, num_sequences: int, max_seqlen: int) -> float:
        """Time of the launch in padded shapes. Padding patches are not attended."""
        return self.shape_us(num_patches, num_sequences, max_seqlen) + self.us_per_square * launch.sum_squares

    def exact_us(self, launch: Launch) -> float:
        """Time of the launch in a graph of exactly its shapes."""
        return self.padded_us(launch, launch.num_patches, launch.num_sequences, launch.max_seqlen)

    def shape_us(self, num_patches: int, num_sequences: int, max_seqlen: int) -> float:
        """The part of the time that the shapes decide, whatever is in them."""
        return (
            self.fixed_us
            + self.us_per_patch * num_patches
            + self.us_per_slot_patch * num_sequences * max_seqlen
        )

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, int, float]], *, us_per_slot_patch: float = 0.0) -> CostModel:
        """Least squares of the relative error over (patches, sum of squared sequence lengths, measured us);
        coefficients that would come out negative are zero. Measure with exact shapes.

        Raises ConfigurationError for fewer than three samples that tell the three unknowns apart, or for a
        time that is not positive.
        """
        if len(set(samples)) < 3:
            raise ConfigurationError(
                f"the cost model has 3 unknowns, {len(set(samples))} different samples are given",
                needed=3,
                found=len(set(samples)),
            )
        if min(us for _, _, us in samples) <= 0:
            raise ConfigurationError(
                f"a measured time is {min(us for _, _, us in samples)} us, needs more than 0"
            )
        # Columns are scaled to their largest entry: squares are a million times the constant.
        scales = (1.0, float(max(p for p, _, _ in samples)), float(max(s for _, s, _ in samples)))
        rows = [
            tuple(value / scale / us for value, scale in zip((1.0, p, s), scales, strict=True))
            for p, s, us in samples
        ]
        used = [0, 1, 2]
        while used:
            solution = solve_normal(rows, used)
            lowest = min(range(len(used)), key=solution.__getitem__)
            if solution[lowest] >= 0:
                break
            del used[lowest]
        found = [0.0, 0.0, 0.0]
        for column, value in zip(used, solution, strict=True):
            found[column] = value / scales[column]
        return cls(found[0], found[1], found[2], us_per_slot_patch)


def solve_normal(rows: Sequence[tuple[float, ...]], used: Sequence[int]) -> list[float]:
    """Least squares of rows[used] . x = 1, by Gaussian elimination with pivots on the normal equations.

    Raises ConfigurationError when the columns depend on each other.
    """
    size = len(used)
    matrix = [
        [math.fsum(row[i] * row[j] for row in rows) for j in used] + [math.fsum(row[i] for row in rows)]
        for i in used
    ]
    largest = max(abs(matrix[i][i]) for i in range(size))
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(matrix[index][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        if abs(matrix[column][column]) <= 1e-13 * largest:
            raise ConfigurationError(
                f"{len(rows)} samples do not tell {size} unknowns of the cost model apart", found=len(rows)
            )
        for index in range(size):
            if index != column:
                factor = matrix[index][column] / matrix[column][column]
                matrix[index] = [a - factor * b for a, b in zip(matrix[index], matrix[column], strict=True)]
    return [matrix[index][size] / matrix[index][index] for index in range(size)]


# Fitted to five exact-shape timings of the half-fused 27-block tower of width 1152 on an H200 in bfloat16
# (2.57 ms at 1 x 784 patches, 12.7 at 1 x 4096, 96.4 at 8 x 4096, 52.6 at 32 x 784, 79.7 at 36 mixed
# images), within 1.2 % of each; the last from 14.8 ms for 1 x 4096 in 64 slots of 5120.
H200_COST = CostModel(963.0, 1.848, 2.525e-4, 6.7e-4)
