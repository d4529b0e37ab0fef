"""The progress of long work before the service is ready, as lines of the log: the same in a terminal and in a
container, and bounded in number.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)

# After the first line: at most so many, and none sooner than EVERY_S after the one before.
MAX_LINES = 10
EVERY_S = 2.0


class Progress:
    """Counts the steps of one piece of work. Logs ``event`` at once, then with the number of steps done."""

    def __init__(self, event: str, num_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, monotonic."""
        self._event, self._num_steps, self._clock = event, num_steps, clock
        self._num_done = self._num_lines = 0
        self._started_s = self._logged_s = clock()
        log.info(event, done=0, of=num_steps)

    def step(self) -> None:
        """One more step is done. The last one is not logged: what comes next says so."""
        self._num_done += 1
        now_s, lines = self._clock(), self._num_lines + 1
        is_due = self._num_done * (MAX_LINES + 1) >= lines * self._num_steps
        if is_due and now_s - self._logged_s >= EVERY_S and self._num_done < self._num_steps:
            self._num_lines, self._logged_s = lines, now_s
            seconds = round(now_s - self._started_s, 1)
            log.info(self._event, done=self._num_done, of=self._num_steps, seconds=seconds)
