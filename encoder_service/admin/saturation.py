"""The saturation that autoscalers follow, as a metric. Used on the event loop only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from encoder_service.engine.device import DeviceEngine
from encoder_service.load import saturation
from encoder_service.ops.metrics import Metrics
from encoder_service.pipeline import Pipeline

# The window over which the device's busy share is measured.
BUSY_WINDOW_S = 10.0
# Queued device work that counts as saturated.
FULL_QUEUE_S = 1.0


class Saturation:
    """Call ``sample`` once a second. clock: seconds, monotonic."""

    def __init__(
        self,
        metrics: Metrics,
        pipeline: Pipeline,
        engine: DeviceEngine,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Registers the metric. Create once per registry."""
        self._pipeline, self._engine, self._clock = pipeline, engine, clock
        self._busy: deque[tuple[float, float]] = deque()  # (time, seconds in forward passes since the start)
        metrics.gauge(
            "ve_saturation_ratio",
            "0 idle to 1 saturated: largest of busy share, queue and fill of limits. Scale on this.",
            self.value,
        )
        self.sample()

    def sample(self) -> None:
        """Records the device's busy time. Keeps one sample that is at least BUSY_WINDOW_S old."""
        now_s = self._clock()
        self._busy.append((now_s, self._engine.counters.busy_s))
        while len(self._busy) > 1 and self._busy[1][0] <= now_s - BUSY_WINDOW_S:
            self._busy.popleft()

    def busy_share(self) -> float:
        """The share of the window in which the device computed. A batch counts when it ends."""
        (from_s, from_busy_s), (to_s, to_busy_s) = self._busy[0], self._busy[-1]
        return min(1.0, (to_busy_s - from_busy_s) / (to_s - from_s)) if to_s > from_s else 0.0

    def value(self) -> float:
        """See ``load.saturation``. The queue and the limits are read at the time of the call."""
        queued_s, filled = self._pipeline.load.queued_s, filled_share(self._pipeline)
        return saturation(self.busy_share(), queued_s, FULL_QUEUE_S, filled)


def filled_share(pipeline: Pipeline) -> float:
    """The largest used share among the limits above which work is refused, some caller's share included."""
    return max(pipeline.admission.fill(), pipeline.undelivered.fill())
