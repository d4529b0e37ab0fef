"""The look at the bookkeeping while nothing else is to do: all of it, a slice at a time.

Owns when a check begins, how long the event loop is held by it at a time, and that it is given up as soon as
anything changes. What has to hold is the stores' and the leases' own. Used on the loop that made it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterator
from itertools import islice

import structlog

log = structlog.get_logger(__name__)

QUIET_BEATS = 5
"""Without any change, before a check begins."""
TURN_S = 0.001
"""That a turn of the loop may be held by it, but for the steps that are looked at together."""
STEPS_AT_ONCE = 16
"""Between two looks at the clock; one takes some ten microseconds at most."""
PAUSE_S = 0.015
"""Between two turns: a check of 65,536 items takes some half a minute."""


class IdleCheck:
    """``beat`` now and then; ``stop`` at the end."""

    def __init__(
        self,
        steps: Callable[[], Iterator[None]],
        stamp: Callable[[], Hashable],
        is_idle: Callable[[], bool],
        on_wrong: Callable[[Exception], None],
    ) -> None:
        """steps: a check from its beginning. stamp: another one after every change of what is checked.
        is_idle: whether there is time for it. on_wrong: called with what a check raised. Needs a running
        event loop."""
        self.num_finished = 0
        """Checks that came to their end, or found something."""
        self._make_steps = steps
        self._stamp = stamp
        self._is_idle = is_idle
        self._on_wrong = on_wrong
        self._loop = asyncio.get_running_loop()
        self._seen: Hashable = None
        self._began_at: Hashable = None
        self._quiet_beats = 0
        self._steps: Iterator[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def beat(self) -> None:
        """Begins a check when all has been quiet for a while: once after each time that something changed."""
        seen = self._stamp()
        self._quiet_beats = self._quiet_beats + 1 if seen == self._seen and self._is_idle() else 0
        self._seen = seen
        if self._quiet_beats == QUIET_BEATS:
            self._stop_timer()
            self._steps, self._began_at = self._make_steps(), seen
            self._turn()

    def stop(self) -> None:
        """Gives up what is under way. Twice is once."""
        self._stop_timer()
        self._steps = None

    def _turn(self) -> None:
        self._timer = None
        steps = self._steps
        if steps is None:
            return
        if self._stamp() != self._began_at or not self._is_idle():
            self._steps, self._quiet_beats = None, 0
            return
        try:
            has_ended = _has_ended(steps, time.perf_counter() + TURN_S)
        except Exception as error:
            has_ended = True
            self._on_wrong(error)
        if has_ended:
            self._steps = None
            self.num_finished += 1
        else:
            self._timer = self._loop.call_later(PAUSE_S, self._turn)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _has_ended(steps: Iterator[None], ends_s: float) -> bool:
    """Some steps more; whether those were the last. Raises what they raise."""
    while True:
        if sum(1 for _ in islice(steps, STEPS_AT_ONCE)) < STEPS_AT_ONCE:
            return True
        if time.perf_counter() >= ends_s:
            return False
