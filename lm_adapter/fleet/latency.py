"""How long items take of late: the percentile after which one is late, and the median of one replica.

Owns the windows. No clock of its own. Of a call that was given up only a bound is known; percentiles are
those of Kaplan and Meier's estimate (1958), which such calls enter by how long they were waited for: a
replica whose slow calls are ended by hedges is as slow as those few that nobody ended.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Latencies"]

MIN_SAMPLES = 16
"""Fewer say nothing."""


class Latencies:
    """The last ``size`` latencies, in seconds."""

    def __init__(self, size: int = 256) -> None:
        self._samples: deque[tuple[float, bool]] = deque(maxlen=size)
        self._sorted: list[tuple[float, bool]] | None = None
        self._have_bounds = False

    def add(self, seconds: float, *, at_least: bool = False) -> None:
        """at_least: of a call that was given up then."""
        self._samples.append((seconds, at_least))
        self._sorted = None

    def clear(self) -> None:
        self._samples.clear()
        self._sorted = None

    def percentile(self, share: float) -> float | None:
        """The smallest sample that ``share`` of all are not above; None while there are too few. The largest,
        where too many calls were given up to tell."""
        if len(self._samples) < MIN_SAMPLES:
            return None
        if self._sorted is None:
            self._sorted = sorted(self._samples)
            self._have_bounds = any(at_least for _, at_least in self._sorted)
        if not self._have_bounds:
            # 0.55 of 100 is 55.00000000000001 in floating point.
            return self._sorted[max(0, math.ceil(share * len(self._sorted) - 1e-9) - 1)][0]
        above = 1.0  # share of all calls, also of those given up, that take longer
        for num_left, (seconds, at_least) in zip(range(len(self._sorted), 0, -1), self._sorted, strict=True):
            if not at_least:
                above *= (num_left - 1) / num_left
                if above <= 1 - share + 1e-9:
                    return seconds
        return self._sorted[-1][0]
