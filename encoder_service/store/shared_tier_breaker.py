"""When the shared tier is left alone: a circuit breaker.

Owns the decision whether a call may be made, from how the last ones ended. What a call is, how long it may
take and which of its ends count against the server are ``shared_tier``'s. Pure Python, no clock of its own.

Closed, every call is made. Open, none is, for ``first_open_s``, then half-open: one call is made, and how it
ends decides; each time that it fails the wait doubles, up to ``max_open_s``. It opens when a run of calls
has failed, or a good part of the last ones: a server that answers every other time is no use either.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

# Failures in a row that open it, and failures among the last calls that do.
MAX_RUN = 3
WINDOW = 20
MAX_IN_WINDOW = 8


class BreakerState(enum.Enum):
    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Call:
    """One call that may be made. Ends once, with the first of its ends."""

    def __init__(self, breaker: CircuitBreaker, era: int) -> None:
        self._breaker: CircuitBreaker | None = breaker
        self._era = era

    def succeeded(self) -> None:
        self._end(True)

    def failed(self) -> None:
        self._end(False)

    def abandoned(self) -> None:
        """It says nothing of the server: its caller left."""
        self._end(None)

    def _end(self, good: bool | None) -> None:
        breaker, self._breaker = self._breaker, None
        if breaker is not None:
            breaker._ended(self._era, good)


class CircuitBreaker:
    """clock: monotonic seconds."""

    def __init__(
        self, clock: Callable[[], float], *, first_open_s: float = 1.0, max_open_s: float = 30.0
    ) -> None:
        self._clock = clock
        self._first_open_s, self._max_open_s = first_open_s, max_open_s
        self._open_s = first_open_s
        self._retry_at_s: float | None = None
        self._probing = False
        # Counts changes of state: how a call ends says nothing about a later one than its own.
        self._era = 0
        self._ends: deque[bool] = deque(maxlen=WINDOW)
        self.num_opened = 0

    @property
    def state(self) -> BreakerState:
        if self._retry_at_s is None:
            return BreakerState.CLOSED
        waits = not self._probing and self._clock() < self._retry_at_s
        return BreakerState.OPEN if waits else BreakerState.HALF_OPEN

    def enter(self) -> Call | None:
        """A call that may be made now, which has to end; None when none may."""
        if self._retry_at_s is not None:
            if self._probing or self._clock() < self._retry_at_s:
                return None
            self._probing = True
        return Call(self, self._era)

    def _ended(self, era: int, good: bool | None) -> None:
        if era != self._era:
            return
        if self._retry_at_s is not None:
            self._probing = False
            if good:
                self._close()
            elif good is False:
                self._open_s = min(2 * self._open_s, self._max_open_s)
                self._open()
            return
        if good is None:
            return
        self._ends.append(good)
        run = len(self._ends) >= MAX_RUN and not any(list(self._ends)[-MAX_RUN:])
        if run or self._ends.count(False) >= MAX_IN_WINDOW:
            self._open()
            self.num_opened += 1

    def _open(self) -> None:
        self._retry_at_s = self._clock() + self._open_s
        self._era += 1

    def _close(self) -> None:
        self._retry_at_s = None
        self._open_s = self._first_open_s
        self._ends.clear()
        self._era += 1
