"""How long items take of late: the percentile after which one is late, and the median of one replica.

Owns the windows. No clock of its own.
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
        self._samples: deque[float] = deque(maxlen=size)
        self._sorted: list[float] | None = None

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)
        self._sorted = None

    def clear(self) -> None:
        self._samples.clear()
        self._sorted = None

    def percentile(self, share: float) -> float | None:
        """The smallest sample that ``share`` of all are not above; None while there are too few."""
        if len(self._samples) < MIN_SAMPLES:
            return None
        if self._sorted is None:
            self._sorted = sorted(self._samples)
        # 0.55 of 100 is 55.00000000000001 in floating point.
        return self._sorted[max(0, math.ceil(share * len(self._sorted) - 1e-9) - 1)]
