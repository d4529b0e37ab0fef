"""One call to one replica for some of a caller's items, and when these are asked for elsewhere as well."""

from __future__ import annotations

from dataclasses import dataclass, field

from lm_adapter.fleet.replica import Replica

__all__ = ["Attempt"]

MAX_DOUBLINGS = 5
"""Of the pause before a hedge that was refused is looked at again."""
LEAST_PAUSE_S = 0.01


@dataclass(eq=False)
class Attempt:
    """Items that go to one replica in one call; left: those without an outcome yet."""

    number: int
    replica: Replica
    indices: list[int]
    started_s: float
    is_hedge: bool
    left: set[int] = field(default_factory=set)
    may_hedge: set[int] = field(default_factory=set)
    """Of those, what may be asked for elsewhere as well once it is late."""
    hedge_not_before_s: float = 0.0
    num_refused: int = 0
    """Looks that found no place or no token for a hedge."""

    def __post_init__(self) -> None:
        self.left = set(self.indices)

    def hedge_later(self, now_s: float, backoff_s: float) -> None:
        """The replica may never answer: what it has is looked at again, ever more rarely."""
        pause_s = max(LEAST_PAUSE_S, backoff_s) * 2.0 ** min(self.num_refused, MAX_DOUBLINGS)
        self.hedge_not_before_s = now_s + pause_s
        self.num_refused += 1

    def hedge_anew(self, index: int) -> None:
        """An item whose hedge failed is late already, and waits for nothing that others were refused."""
        self.may_hedge.add(index)
        self.hedge_not_before_s, self.num_refused = 0.0, 0
