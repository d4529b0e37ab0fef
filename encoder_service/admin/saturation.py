"""How close the service is to its limits, as metrics: the saturation that autoscalers follow, and the host's
shares of time. Used on the event loop only.

Four things can limit a service: the device; the event loop, with many small images; the threads that decode,
with large files; and memory. The saturation is the largest of their shares, so that it rises whichever it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from encoder_service.engine.device import DeviceEngine
from encoder_service.ops.metrics import Metrics
from encoder_service.pipeline import Pipeline

# The window over which shares of time are measured.
BUSY_WINDOW_S = 10.0
# Queued device work that counts as saturated.
FULL_QUEUE_S = 1.0


class BusyShares:
    """Shares of the last BUSY_WINDOW_S, of counters of seconds. Values: one of each counter."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Sequence[float]]] = deque()

    def add(self, now_s: float, values: Sequence[float]) -> None:
        """Keeps one sample that is at least BUSY_WINDOW_S old."""
        self._samples.append((now_s, values))
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - BUSY_WINDOW_S:
            self._samples.popleft()

    def values(self) -> list[float]:
        """From 0 to 1 each; 0 before the second sample."""
        (from_s, before), (to_s, now) = self._samples[0], self._samples[-1]
        window_s = to_s - from_s
        return [
            min(1.0, max(0.0, (end - start) / window_s)) if window_s > 0 else 0.0
            for start, end in zip(before, now, strict=True)
        ]


class Saturation:
    """Call ``sample`` once a second."""

    def __init__(
        self,
        metrics: Metrics,
        pipeline: Pipeline,
        engine: DeviceEngine,
        loop_idle_s: Callable[[], float] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Registers the metrics. Create once per registry. loop_idle_s: seconds in which the event loop had
        no work, since any time; None for a loop that does not measure them, which counts as idle. clock:
        seconds, monotonic."""
        self._pipeline, self._engine, self._clock = pipeline, engine, clock
        self._loop_idle_s = clock if loop_idle_s is None else loop_idle_s
        self._busy = BusyShares()
        self.sample()
        metrics.gauge(
            "ve_saturation_ratio",
            "0 idle to 1 saturated: largest of the busy shares of device, event loop and decoding threads, "
            "queue and fill of limits. Scale on this.",
            self.value,
        )
        metrics.gauge(
            "ve_loop_busy_ratio",
            "Share of the last 10 s in which the event loop had work.",
            lambda: self.busy_shares()[1],
        )
        metrics.gauge(
            "ve_decode_busy_ratio",
            "Share of the last 10 s in which decoding threads worked, of images or of clips, the larger one.",
            lambda: max(self.busy_shares()[2:]),
        )

    def sample(self) -> None:
        """Records the counters."""
        now_s = self._clock()
        loop_busy_s = now_s - self._loop_idle_s()
        device_busy_s = self._engine.counters.busy_s
        self._busy.add(now_s, (device_busy_s, loop_busy_s, *self._pipeline.workers.busy_s))

    def busy_shares(self) -> list[float]:
        """Of the device, the event loop, the threads that decode images, and those of clips. The device's
        batches count when they end."""
        return self._busy.values()

    def value(self) -> float:
        """From 0 (idle) to 1 (more work only waits or is refused): the largest of

        - the busy shares of device, event loop and decoding threads,
        - the queued device work in seconds, divided by FULL_QUEUE_S,
        - the share of the limits on memory and patches that is in use.

        The queue and the limits are read at the time of the call.
        """
        queue = self._pipeline.load.queued_s / FULL_QUEUE_S
        return min(1.0, max(*self.busy_shares(), queue, filled_share(self._pipeline)))


def filled_share(pipeline: Pipeline) -> float:
    """The largest used share among the limits above which work is refused or waits, some caller's share
    included."""
    return max(pipeline.admission.fill(), pipeline.undelivered.fill(), pipeline.workers.memory.fill())
