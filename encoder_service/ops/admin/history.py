"""The last minutes of a service in memory: one row of numbers a second, in a ring of fixed size.

Owns the ring, rates over it, and percentiles out of histogram counts. What the numbers are is ``live``'s.
Shape legend: N samples held, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

MAX_BYTES = 1 << 20
MAX_SAMPLES = 600


class History:
    """A ring of samples of ``columns``, at most ``max_bytes`` large. Times: seconds of any steady clock."""

    def __init__(self, columns: Sequence[str], max_bytes: int = MAX_BYTES) -> None:
        """Raises ValueError where not even two samples fit: nothing could be told from fewer."""
        self.columns = tuple(columns)
        self._index = {name: index for index, name in enumerate(self.columns)}
        row_bytes = 8 * (1 + len(self.columns))
        self.capacity = min(MAX_SAMPLES, max_bytes // row_bytes)
        if self.capacity < 2:
            raise ValueError(f"{max_bytes} bytes hold {self.capacity} samples of {row_bytes} bytes, need 2")
        self._ring: Numbers = np.zeros((self.capacity, 1 + len(self.columns)))
        self._num_added = 0

    def __len__(self) -> int:
        return min(self._num_added, self.capacity)

    @property
    def num_bytes(self) -> int:
        return self._ring.nbytes

    def add(self, now_s: float, values: Sequence[float]) -> None:
        """One sample, in the order of the columns; the oldest makes room."""
        row = self._ring[self._num_added % self.capacity]
        row[0] = now_s
        row[1:] = values
        self._num_added += 1

    def last(self, window_s: float) -> Window:
        """The newest sample and those before it, as far back as the first that is window_s older or more."""
        places = np.arange(self._num_added - len(self), self._num_added) % self.capacity
        if len(places):
            times_s = self._ring[places, 0]
            first = int(np.searchsorted(times_s, times_s[-1] - window_s, side="right")) - 1
            places = places[max(first, 0) :]
        return Window(self._ring[places], self._index)


class Window:
    """Samples in order of time. rows: [N, 1 + C], the time first."""

    def __init__(self, rows: Numbers, index: dict[str, int]) -> None:
        self._rows, self._index = rows, index

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def times_s(self) -> Numbers:
        """[N]"""
        return self._rows[:, 0]

    def values(self, name: str) -> Numbers:
        """[N]"""
        return self._rows[:, 1 + self._index[name]]

    def now(self, name: str) -> float:
        """The newest value; 0 where there is none."""
        return float(self.values(name)[-1]) if len(self) else 0.0

    def gained(self, name: str) -> float:
        """By how much a monotonic column grew."""
        values = self.values(name)
        return float(values[-1] - values[0]) if len(self) > 1 else 0.0

    def gained_by(self, names: Sequence[str]) -> Numbers:
        """[len(names)]: ``gained`` of each."""
        columns = [1 + self._index[name] for name in names]
        if len(self) < 2:
            return np.zeros(len(columns))
        gained: Numbers = self._rows[-1, columns] - self._rows[0, columns]
        return gained

    def rate(self, name: str) -> float:
        """``gained`` a second."""
        return self.gained(name) / self.seconds if self.seconds else 0.0

    @property
    def seconds(self) -> float:
        return float(self.times_s[-1] - self.times_s[0]) if len(self) > 1 else 0.0

    def rates(self, name: str) -> Numbers:
        """[N - 1]: a monotonic column's growth a second from each sample to the next."""
        return np.diff(self.values(name)) / np.maximum(np.diff(self.times_s), 1e-9)


def percentile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` of the observations lie, linear within its bucket; None without any.

    bounds: upper ends of the buckets, ascending, without the last, open one; counts: of each bucket, the open
    one included, whose values are told as its lower end.
    """
    total = sum(counts)
    if total <= 0:
        return None
    rank, below = share * total, 0.0
    for index, upper in enumerate(bounds):
        lower = bounds[index - 1] if index else 0.0
        count = counts[index]
        if count and below + count >= rank:
            return lower + (upper - lower) * (rank - below) / count
        below += count
    return bounds[-1]
