"""The figures of a running service that the admin page shows, and the saturation that autoscalers follow.

Owns the answer of ``/v1/live``: counters since the start and current values, all from memory. The page
computes rates and percentiles from successive answers. Never waits for the device. Used on the event loop
only.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import Counter as PrometheusCounter

from encoder_service.broker import Broker
from encoder_service.engine.device import DeviceEngine
from encoder_service.load import saturation
from encoder_service.ops.metrics import STAGE_BUCKETS_S, Metrics
from encoder_service.pipeline import Pipeline
from encoder_service.types import CacheTier

# The window over which the device's busy share is measured.
BUSY_WINDOW_S = 10.0
# Queued device work that counts as saturated.
FULL_QUEUE_S = 1.0
TRANSPORTS = ("inline", "host", "device")


class LiveView:
    """The figures of one service. Call ``sample`` once a second. clock: seconds, monotonic."""

    def __init__(
        self,
        metrics: Metrics,
        pipeline: Pipeline,
        engine: DeviceEngine,
        broker: Broker | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Registers the saturation metric. Create once per registry."""
        self._metrics, self._pipeline, self._engine, self._broker = metrics, pipeline, engine, broker
        self._clock = clock
        self._started_s = clock()
        self._busy: deque[tuple[float, float]] = deque()  # (time, seconds in forward passes since the start)
        metrics.gauge(
            "ve_saturation_ratio",
            "0 idle to 1 saturated: largest of busy share, queue and fill of limits. Scale on this.",
            self.saturation,
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

    def saturation(self) -> float:
        """See ``load.saturation``. The queue and the limits are read at the time of the call."""
        queued_s, filled = self._pipeline.load.queued_s, filled_share(self._pipeline)
        return saturation(self.busy_share(), queued_s, FULL_QUEUE_S, filled)

    def answer(self) -> dict[str, Any]:
        """Everything the page shows, ready for JSON. Stage counts are per bucket, not cumulative."""
        pipeline, engine, metrics = self._pipeline, self._engine, self._metrics
        model = pipeline.model
        tiers, transports = by_label(metrics.items, "tier"), by_label(metrics.deliveries, "transport")
        return {
            "uptime_s": round(self._clock() - self._started_s, 3),
            "attached": True,
            "model": {
                "name": model.name,
                "family": model.family,
                "device": str(model.tower.device),
                "dtype": str(model.tower.dtype).removeprefix("torch."),
            },
            "now": {
                "busy_share": self.busy_share(),
                "saturation": self.saturation(),
                "queued_patches": pipeline.admission.num_patches,
                "queued_s": pipeline.load.queued_s,
            },
            "busy_s": engine.counters.busy_s,
            "encoded": engine.counters.items,
            "tiers": {tier.value: tiers.get(tier.value, 0.0) for tier in CacheTier},
            "transports": {name: transports.get(name, 0.0) for name in TRANSPORTS},
            "failures": by_label(metrics.failures, "reason"),
            "rejections": by_label(metrics.rejections, "reason"),
            "bucket_bounds_s": STAGE_BUCKETS_S,
            "stages": metrics.stage_counts(),
            "buckets": self._buckets(),
            "cache": self._cache(),
            "reads": self._reads(),
        }

    def _buckets(self) -> dict[str, Any]:
        batches = self._engine.counters.batches
        if self._engine.graphs is None:
            return {"graphs": False, "batches": batches}
        figures = self._engine.graphs.counters
        real, padded = figures.real_patches, figures.padded_patches
        runs = runs_by_size(figures.replays, figures.padded_runs)
        return {
            "graphs": True,
            "batches": batches,
            "eager_runs": figures.eager_runs,
            "waste_share": padded / (real + padded) if real + padded else 0.0,
            "runs": [{"patches": size, "runs": runs[size]} for size in sorted(runs)],
        }

    def _cache(self) -> dict[str, Any]:
        store = self._pipeline.store
        return {
            "items": {"device": store.num_items("device"), "host": store.num_items("host")},
            "bytes": store.num_bytes,
            "max_bytes": store.max_bytes,
            "evictions": store.num_evictions,
            "refused": store.counters.refused,
            "arenas": [
                {
                    "namespace": namespace or "",
                    "kind": arena.kind,
                    "bytes": arena.capacity_bytes,
                    "free_bytes": arena.free_bytes,
                }
                for namespace, arena in store.arenas()
            ],
        }

    def _reads(self) -> dict[str, Any]:
        """Clients' reads in shared memory; empty without a broker."""
        if self._broker is None:
            return {}
        return {
            "connections": self._broker.num_connections,
            "reported": value_of(self._metrics.directory_reads),
            "lost": value_of(self._metrics.reads_lost),
            "repeated": value_of(self._metrics.encodes_repeated),
        }


def by_label(counter: PrometheusCounter, label: str) -> dict[str, float]:
    """A counter's values by the values of its label."""
    (family,) = counter.collect()
    return {sample.labels[label]: sample.value for sample in family.samples if sample.name.endswith("_total")}


def value_of(counter: PrometheusCounter) -> float:
    """The value of a counter without labels."""
    (family,) = counter.collect()
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


def filled_share(pipeline: Pipeline) -> float:
    """The largest used share among the limits above which work is refused."""
    admission, unread = pipeline.admission, pipeline.unread
    return max(
        admission.num_patches / admission.max_patches,
        admission.num_bytes / admission.max_bytes,
        unread.num_bytes / unread.max_bytes,
    )


def runs_by_size(*counters: Mapping[Any, int]) -> Counter[int]:
    """Number of batches by the bucket's size in patches."""
    runs: Counter[int] = Counter()
    for counter in counters:
        for bucket, count in dict(counter).items():  # copied in one step: the engine's thread adds to it
            runs[bucket.num_patches] += count
    return runs
