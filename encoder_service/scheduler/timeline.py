"""How much longer the device is busy with the batches that were launched, and how long the next one waits.

Owns the arithmetic only. The engine reports when a batch is launched and when it ends, in its own clock, and
asks before it makes the next batch. Used under the engine's lock.
"""

from __future__ import annotations

from collections import deque

from encoder_service.scheduler.planner import SURE

# The part of a predicted time that a batch is likely to take.
LIKELY = 0.9
# How long before that time is over the next batch is made. A step takes the host 0.2 to 1.1 ms (H200, with
# decoding beside it), a thread's wake-up and the transfer of the pixels come on top.
LEAD_S = 0.002


class DeviceTimeline:
    """Batches on the device, oldest first; the device works on one after the other."""

    def __init__(self) -> None:
        self._predicted_s: deque[float] = deque()
        # When the device turned to the oldest: at its launch, or at the end of the batch before.
        self._began_s = 0.0

    def launched(self, now_s: float, predicted_us: float) -> None:
        """A batch was launched at ``now_s``."""
        if not self._predicted_s:
            self._began_s = now_s
        self._predicted_s.append(predicted_us / 1e6)

    def finished(self, now_s: float) -> None:
        """The oldest batch has ended."""
        self._predicted_s.popleft()
        self._began_s = now_s

    def busy_s(self, now_s: float) -> float:
        """Seconds from now for which the device is certainly busy: SURE of the prediction."""
        if not self._predicted_s:
            return 0.0
        oldest_s, *others_s = self._predicted_s
        return max(0.0, SURE * oldest_s - (now_s - self._began_s)) + SURE * sum(others_s)

    def batch_delay_s(self, now_s: float) -> float:
        """How long the next batch should wait for more items: made LEAD_S before the device has likely ended
        those that it has, it reaches the device in time. 0 where nothing is predicted."""
        if not self._predicted_s:
            return 0.0
        return max(0.0, LIKELY * sum(self._predicted_s) - (now_s - self._began_s) - LEAD_S)
