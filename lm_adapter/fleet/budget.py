"""How many retries and hedges a client may make: a share of what it is asked to do, and a small reserve.

Owns the counting over a window of ten seconds. A fleet in which everything fails sees at most (1 + share)
times the load that its callers mean, and not max_attempts times. No clock of its own."""

from __future__ import annotations

from collections import deque

__all__ = ["RetryBudget"]

WINDOW_S = 10.0
BUCKET_S = 1.0


class RetryBudget:
    """A bucket of tokens: each item puts in ``share`` of one, each extra attempt takes one out. Tokens are
    forgotten after ten seconds, and so are attempts; the reserve is what is there at any time."""

    def __init__(self, share: float, reserve_per_s: float) -> None:
        self._share = share
        self._reserve = reserve_per_s * WINDOW_S
        self._balance = 0.0
        self._buckets: deque[tuple[float, float]] = deque()
        """Start in seconds, and what was put in since, less what was taken out."""
        self.num_refused = 0

    def left(self, now_s: float) -> float:
        """Extra attempts that may be made now."""
        while self._buckets and now_s - self._buckets[0][0] >= WINDOW_S:
            self._balance -= self._buckets.popleft()[1]
        return self._reserve + self._balance

    def has_spare(self, now_s: float) -> bool:
        """Whether one more leaves half of the reserve, for those that will not wait."""
        return self.left(now_s) >= 1 + self._reserve / 2

    def asked(self, num_items: int, now_s: float) -> None:
        """Items that a caller asked for."""
        self.left(now_s)  # forgets what is old, though nobody ever asks for a retry
        self._add(num_items * self._share, now_s)

    def take(self, now_s: float, num_attempts: int = 1) -> bool:
        """Whether so many more attempts may be made, all of them; counts them when they may."""
        if self.left(now_s) < num_attempts:
            self.num_refused += num_attempts
            return False
        self._add(-float(num_attempts), now_s)
        return True

    def _add(self, tokens: float, now_s: float) -> None:
        if not self._buckets or now_s - self._buckets[-1][0] >= BUCKET_S:
            self._buckets.append((now_s, 0.0))
        start_s, total = self._buckets[-1]
        self._buckets[-1] = (start_s, total + tokens)
        self._balance += tokens
