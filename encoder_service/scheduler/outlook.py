"""How much longer the device is busy with what it was given.

Owns the arithmetic only: the engine tells when batches are handed over and when they end, in its own clock,
and asks before it makes the next one, for the planner and for itself. Used under the engine's lock.
"""

from __future__ import annotations

from collections import deque

from encoder_service.scheduler.planner import SURE

# The part of a predicted time that a batch will hardly take less than, and what the next one has to be handed
# over before its end: launch and upload take the host of an H200 up to 1.3 ms for a full batch.
LIKELY = 0.9
LEAD_S = 0.002


class Outlook:
    """Batches on the device, oldest first; the device works on one after the other."""

    def __init__(self) -> None:
        self._predicted_s: deque[float] = deque()
        self._began_s = 0.0  # the oldest: no earlier than its handing over or the end of the one before

    def launched(self, now_s: float, predicted_us: float) -> None:
        """A batch was handed over at ``now_s``."""
        if not self._predicted_s:
            self._began_s = now_s
        self._predicted_s.append(predicted_us / 1e6)

    def finished(self, now_s: float) -> None:
        """The oldest batch has ended."""
        self._predicted_s.popleft()
        self._began_s = now_s

    def busy_s(self, now_s: float) -> float:
        """Seconds from now until the device has surely not ended yet: SURE of what is predicted."""
        if not self._predicted_s:
            return 0.0
        oldest_s, *others_s = self._predicted_s
        return max(0.0, SURE * oldest_s - (now_s - self._began_s)) + SURE * sum(others_s)

    def hold_s(self, now_s: float) -> float:
        """For how long the next batch is better not made yet: the device would not begin with it, and items
        that come meanwhile could ride. 0 where nothing is predicted."""
        if not self._predicted_s:
            return 0.0
        return max(0.0, LIKELY * sum(self._predicted_s) - (now_s - self._began_s) - LEAD_S)
