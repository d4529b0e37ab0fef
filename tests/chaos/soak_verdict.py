"""The rule by which a figure counts as flat.

The drift is the median of the slopes between all pairs of samples after the warm-up (Theil and Sen), times
the measured time; bursts and dips do not move it. A drift up to the bound is flat, and so is any fall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MIB = 1 << 20
MIN_SAMPLES = 8


@dataclass(frozen=True)
class Bound:
    """The largest gain within the measured time: an amount or a share of the median, the larger of both."""

    amount: float
    share: float = 0.0

    def at(self, level: float) -> float:
        return max(self.amount, self.share * level)


# Room for the allocator under varying load. A leak of 1 KiB a call at 100 calls a second exceeds it within
# ten minutes.
BOUNDS: Mapping[str, Bound] = {
    "rss_bytes": Bound(16 * MIB, 0.04),
    "pss_bytes": Bound(16 * MIB, 0.04),
    "descriptors": Bound(4),
    "threads": Bound(2),
    "client_sockets": Bound(4),
}


@dataclass(frozen=True)
class Drift:
    """level: the median; drift: the gain within measured_s; per_hour: at the same pace."""

    level: float
    drift: float
    per_hour: float
    allowed: float
    measured_s: float

    @property
    def is_flat(self) -> bool:
        return self.drift <= self.allowed


def drift_of(points: Sequence[tuple[float, float]], bound: Bound, warm_up_s: float) -> Drift:
    """points: (seconds, figure), in order. Raises ValueError for too few after the warm-up."""
    kept = np.array([point for point in points if point[0] >= warm_up_s], dtype=np.float64).reshape(-1, 2)
    if len(kept) < MIN_SAMPLES:
        raise ValueError(f"{len(kept)} samples after {warm_up_s:.0f} s of warm-up, needs {MIN_SAMPLES}")
    times_s, figures = kept.T
    first, second = np.triu_indices(len(kept), k=1)
    slopes = (figures[second] - figures[first]) / (times_s[second] - times_s[first])
    slope, level = float(np.median(slopes)), float(np.median(figures))
    measured_s = float(times_s[-1] - times_s[0])
    return Drift(level, slope * measured_s, slope * 3600, bound.at(level), measured_s)


def judge(
    series: Mapping[str, Sequence[tuple[float, float]]],
    warm_up_s: float,
    bounds: Mapping[str, Bound] = BOUNDS,
) -> tuple[dict[str, Drift], list[str]]:
    """The drift of each figure that has a bound, and a complaint for each that is not flat."""
    drifts = {name: drift_of(series[name], bound, warm_up_s) for name, bound in bounds.items()}
    complaints = [
        f"{name} gained {found.drift:.0f} in {found.measured_s:.0f} s after the warm-up, at most "
        f"{found.allowed:.0f} at a level of {found.level:.0f} ({found.per_hour:.0f} an hour)"
        for name, found in drifts.items()
        if not found.is_flat
    ]
    return drifts, complaints


def judge_rests(rests: Sequence[Mapping[str, float]], held: Sequence[str]) -> list[str]:
    """Complaints about figures without callers. rests: figures of each pause, the first right after the
    warm-up; held: names that have to be 0 in all of them."""
    complaints = [
        f"{name} is {rest[name]:.0f} at rest {number}"
        for number, rest in enumerate(rests)
        for name in held
        if rest[name]
    ]
    for name in ("descriptors", "threads"):
        most = rests[0][name] + BOUNDS[name].amount
        if rests[-1][name] > most:
            complaints.append(
                f"{name} at rest went from {rests[0][name]:.0f} to {rests[-1][name]:.0f}, at most {most:.0f}"
            )
    return complaints
