"""How long the next batch should wait for the launched ones.

Owns the arithmetic only. The engine reports when a batch is launched and when it ends, in its own clock, and
asks before it forms the next batch. Used under the engine's lock.
"""

from __future__ import annotations

from collections import deque

# The share of a predicted time that a batch likely takes.
LIKELY = 0.9
# How long before the device becomes idle the next batch is formed. A step takes the host 0.2 to 1.1 ms (H200,
# while other threads decode), plus the wake-up of a thread and the transfer of the pixels.
LEAD_S = 0.002


class DeviceTimeline:
    """Batches on the device, oldest first. The device runs them one after the other."""

    def __init__(self) -> None:
        self._predicted_s: deque[float] = deque()
        # When the device began the oldest batch: at its launch, or at the end of the batch before it.
        self._began_s = 0.0

    def launched(self, now_s: float, predicted_us: float) -> None:
        """Records a batch that was launched at ``now_s``."""
        if not self._predicted_s:
            self._began_s = now_s
        self._predicted_s.append(predicted_us / 1e6)

    def finished(self, now_s: float) -> None:
        """Records the end of the oldest batch."""
        self._predicted_s.popleft()
        self._began_s = now_s

    def batch_delay_s(self, now_s: float) -> float:
        """Seconds that the next batch should wait for more items. A batch that is formed LEAD_S before the
        device likely becomes idle still reaches it in time. 0 if the device has no batch."""
        if not self._predicted_s:
            return 0.0
        return max(0.0, LIKELY * sum(self._predicted_s) - (now_s - self._began_s) - LEAD_S)
