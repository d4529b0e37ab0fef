"""What the admin page shows of a running service, out of counters that are in memory.

Owns which figures are sampled every second, and the answer of ``/v1/live``. Never waits for the device and
takes no lock that a batch holds for long. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from prometheus_client import Counter as Counted

from encoder_service.broker import Broker
from encoder_service.engine.device import DeviceEngine
from encoder_service.load import saturation
from encoder_service.ops.admin.history import History, Window, percentile
from encoder_service.ops.metrics import STAGE_BUCKETS_S, Metrics
from encoder_service.pipeline import Pipeline
from encoder_service.store.arena import Arena
from encoder_service.types import CacheTier

SAMPLE_EVERY_S = 1.0
# Queued device work that counts as saturated.
FULL_QUEUE_S = 1.0
# Figures of now are of this long, stages of a minute; charts show the last two.
NOW_S, STAGES_S, CHARTS_S = 10.0, 60.0, 120.0
STAGES = (
    "identify", "admit", "decode", "resize", "queue", "tower", "store", "delivery", "total"
)  # fmt: skip
TRANSPORTS = ("inline", "host", "device")
NUM_BUCKETS = len(STAGE_BUCKETS_S) + 1
FIGURES = (
    "busy_s", "batches", "encoded", "patches", "real_patches", "padded_patches", "replays", "eager",
    "failures", "rejections", "rows_bytes", "queued_patches", "queued_s", "queued_bytes", "in_flight",
    "undelivered_bytes", "filled_share", "store_bytes", "evictions",
)  # fmt: skip


class LiveView:
    """``attach`` when the service is built; a view of nothing before. clock: seconds, steady."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started_s = clock()
        tiers = [f"tier_{tier.value}" for tier in CacheTier]
        sent = [f"sent_{name}" for name in TRANSPORTS]
        buckets = [f"{stage}_{index}" for stage in STAGES for index in range(NUM_BUCKETS)]
        self.history = History([*FIGURES, *tiers, *sent, *buckets])
        self._sources: tuple[Pipeline, DeviceEngine, Broker | None] | None = None
        self._task: asyncio.Task[None] | None = None

    def attach(self, pipeline: Pipeline, engine: DeviceEngine, broker: Broker | None) -> None:
        """What to look at from now on; with the gauges that follow from what was seen."""
        self._sources = (pipeline, engine, broker)
        self._metrics.gauge(
            "ve_saturation_ratio",
            "0 idle to 1 saturated: largest of busy share, queue and fill of limits. Scale on this.",
            self.saturation,
        )
        self.sample()

    def start(self) -> None:
        """Looks once a second, on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._sample_on())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _sample_on(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            self.sample()

    def sample(self) -> None:
        """Adds one row of figures as they are now."""
        if self._sources is None:
            return
        pipeline, engine, _ = self._sources
        graphs, store = engine.graphs, pipeline.store
        figures = None if graphs is None else graphs.counters
        failures = by_label(self._metrics.failures, "reason")
        rejections = by_label(self._metrics.rejections, "reason")
        tiers = by_label(self._metrics.items, "tier")
        sent = by_label(self._metrics.deliveries, "transport")
        values = [
            engine.counters.busy_s,
            engine.counters.batches,
            engine.counters.items,
            engine.counters.patches,
            0 if figures is None else figures.real_patches,
            0 if figures is None else figures.padded_patches,
            0 if figures is None else sum(dict(figures.replays).values()),
            0 if figures is None else figures.eager_runs,
            sum(failures.values()),
            sum(rejections.values()),
            only(self._metrics.rows_bytes),
            pipeline.admission.num_patches,
            pipeline.load.queued_s,
            pipeline.admission.num_bytes,
            len(pipeline.inflight),
            pipeline.unread.num_bytes,
            filled_share(pipeline),
            store.num_bytes,
            store.counters.evictions,
            *(tiers.get(tier.value, 0.0) for tier in CacheTier),
            *(sent.get(name, 0.0) for name in TRANSPORTS),
            *self._stage_counts(),
        ]
        self.history.add(self._clock(), values)

    def _stage_counts(self) -> list[float]:
        """Observations so far of each stage in each bucket, not summed up as Prometheus has them."""
        stages = self._metrics.stage_seconds
        return [float(count) for stage in STAGES for count in stages.counts(stage)]

    # -- figures of now --------------------------------------------------------------------------------

    def busy_share(self) -> float:
        """Of the last ten seconds; batches count when they end."""
        return min(1.0, self.history.last(NOW_S).rate("busy_s"))

    def saturation(self) -> float:
        """See ``load.saturation``; the queue and the limits as they are at this moment."""
        if self._sources is None:
            return 0.0
        pipeline = self._sources[0]
        queued_s, filled = pipeline.load.queued_s, filled_share(pipeline)
        return saturation(self.busy_share(), queued_s, FULL_QUEUE_S, filled)

    # -- the answer ------------------------------------------------------------------------------------

    def answer(self) -> dict[str, Any]:
        """Everything the page shows, ready for JSON; times in milliseconds where the name says so."""
        up_s = round(self._clock() - self._started_s, 1)
        if self._sources is None:
            return {"uptime_s": up_s, "attached": False}
        pipeline, engine, broker = self._sources
        window = self.history.last(NOW_S)
        stages = self.history.last(STAGES_S)
        model = pipeline.model
        return {
            "uptime_s": up_s,
            "attached": True,
            "model": {
                "name": model.name,
                "family": model.family,
                "device": str(model.tower.device),
                "dtype": str(model.tower.dtype).removeprefix("torch."),
            },
            "window_s": window.seconds,
            "now": self._now(window),
            "limits": {
                "queued_patches": pipeline.admission.max_patches,
                "queued_bytes": pipeline.admission.max_bytes,
                "undelivered_bytes": pipeline.unread.max_bytes,
                "queued_s": FULL_QUEUE_S,
            },
            "stages": [stage_row(stages, stage) for stage in STAGES],
            "series": series(self.history.last(CHARTS_S)),
            "buckets": self._buckets(engine),
            "cache": self._cache(pipeline, window),
            "reads": self._reads(broker),
            "transports": {name: int(window.now(f"sent_{name}")) for name in TRANSPORTS},
            "failures": by_label(self._metrics.failures, "reason"),
            "rejections": by_label(self._metrics.rejections, "reason"),
        }

    def _now(self, window: Window) -> dict[str, float]:
        asked = sum(window.gained(f"tier_{tier.value}") for tier in CacheTier)
        missed = window.gained("tier_miss")
        return {
            "items_per_s": asked / window.seconds if window.seconds else 0.0,
            "encoded_per_s": window.rate("encoded"),
            "patches_per_s": window.rate("patches"),
            "rows_bytes_per_s": window.rate("rows_bytes"),
            "failures_per_s": window.rate("failures"),
            "rejections_per_s": window.rate("rejections"),
            "hit_share": 1.0 - missed / asked if asked else 0.0,
            "busy_share": self.busy_share(),
            "saturation": self.saturation(),
            **{name: window.now(name) for name in (
                "queued_patches", "queued_s", "queued_bytes", "in_flight", "undelivered_bytes"
            )},
        }  # fmt: skip

    def _buckets(self, engine: DeviceEngine) -> dict[str, Any]:
        if engine.graphs is None:
            return {"graphs": False, "batches": engine.counters.batches}
        figures = engine.graphs.counters
        real, padded = figures.real_patches, figures.padded_patches
        runs = runs_by_size(figures.replays, figures.padded_runs)
        return {
            "graphs": True,
            "batches": engine.counters.batches,
            "eager_runs": figures.eager_runs,
            "waste_share": padded / (real + padded) if real + padded else 0.0,
            "runs": [{"patches": size, "runs": runs[size]} for size in sorted(runs)],
        }

    def _cache(self, pipeline: Pipeline, window: Window) -> dict[str, Any]:
        store = pipeline.store
        return {
            "tiers": {tier.value: int(window.now(f"tier_{tier.value}")) for tier in CacheTier},
            "items": {"device": store.num_items("device"), "host": store.num_items("host")},
            "bytes": store.num_bytes,
            "max_bytes": store.max_bytes,
            "evictions": store.counters.evictions,
            "refused": store.counters.refused,
            "arenas": [arena_row(namespace, arena) for namespace, arena in store.arenas()],
        }

    def _reads(self, broker: Broker | None) -> dict[str, Any]:
        """Reads in shared memory since the start."""
        if broker is None:
            return {}
        return {
            "connections": broker.num_connections,
            "reported": int(only(self._metrics.directory_reads)),
            "lost": int(only(self._metrics.reads_lost)),
            "repeated": int(only(self._metrics.encodes_repeated)),
            "inline": by_label(self._metrics.inline_fallbacks, "reason"),
        }


def by_label(counter: Counted, label: str) -> dict[str, float]:
    """A counter's figures by the values of its label."""
    (family,) = counter.collect()
    return {sample.labels[label]: sample.value for sample in family.samples if sample.name.endswith("_total")}


def only(counter: Counted) -> float:
    """The figure of a counter without labels."""
    (family,) = counter.collect()
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


def filled_share(pipeline: Pipeline) -> float:
    """Of the limits beyond which new work is refused, how full the fullest is."""
    admission, unread = pipeline.admission, pipeline.unread
    return max(
        admission.num_patches / admission.max_patches,
        admission.num_bytes / admission.max_bytes,
        unread.num_bytes / unread.max_bytes,
    )


def runs_by_size(*counters: Mapping[Any, int]) -> Counter[int]:
    """Batches by the patches of the bucket that they ran in."""
    runs: Counter[int] = Counter()
    for counter in counters:
        for bucket, count in dict(counter).items():  # a copy in one step: the engine's thread adds to it
            runs[bucket.num_patches] += count
    return runs


def stage_row(window: Window, stage: str) -> dict[str, Any]:
    """A stage's count and percentiles over a window, in milliseconds; None where it was not passed."""
    counts = window.gained_by([f"{stage}_{index}" for index in range(NUM_BUCKETS)]).tolist()
    row: dict[str, Any] = {"stage": stage, "count": int(sum(counts))}
    for name, share in (("p50_ms", 0.5), ("p90_ms", 0.9), ("p99_ms", 0.99)):
        found_s = percentile(STAGE_BUCKETS_S, counts, share)
        row[name] = None if found_s is None else round(found_s * 1e3, 3)
    return row


def series(window: Window) -> dict[str, list[float | None]]:
    """One point for each pair of neighbouring samples; time in seconds before the last one."""
    if len(window) < 2:
        return {"t_s": []}
    names = [f"total_{index}" for index in range(NUM_BUCKETS)]
    totals = np.stack([np.diff(window.values(name)) for name in names], axis=1).tolist()
    points: dict[str, list[float | None]] = {
        "t_s": rounded(window.times_s[1:] - window.times_s[-1]),
        "items_per_s": rounded(sum(window.rates(f"tier_{tier.value}") for tier in CacheTier)),
        "encoded_per_s": rounded(window.rates("encoded")),
        "busy_share": rounded(np.clip(window.rates("busy_s"), 0.0, 1.0)),
        "queued_patches": rounded(window.values("queued_patches")[1:]),
        "queued_ms": rounded(window.values("queued_s")[1:] * 1e3),
    }
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
        found = [percentile(STAGE_BUCKETS_S, counts, share) for counts in totals]
        points[name] = [None if value is None else round(value * 1e3, 3) for value in found]
    return points


def rounded(values: Any) -> list[float | None]:
    found: list[float | None] = np.round(values, 4).tolist()
    return found


def arena_row(namespace: str | None, arena: Arena) -> dict[str, Any]:
    return {
        "namespace": namespace or "",
        "kind": arena.kind,
        "bytes": arena.capacity_bytes,
        "free_bytes": arena.free_bytes,
        "largest_free_bytes": arena.largest_free_bytes,
    }
