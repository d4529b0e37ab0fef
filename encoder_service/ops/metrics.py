"""Prometheus metrics of one service process.

Owns names, labels and buckets. Each ``Metrics`` has a registry of its own, with the process's CPU time,
memory and descriptors (``process_*``) beside those of the service. Counters have no ``_created`` series,
which would double their number.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from encoder_service.types import CacheTier, StageTimings

STAGE_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0
)  # fmt: skip
STAGES = (
    "identify", "admit", "decode", "resize", "queue", "tower", "store", "delivery", "total"
)  # fmt: skip
STEP_BUCKETS_S = (0.00005, 0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.001, 0.003, 0.01, 0.1, 1.0, 10.0)
CONTENT_TYPE = CONTENT_TYPE_LATEST
# Times of a stage that are kept as they were observed. At more of them in a second, percentiles are those of
# the last ones.
MAX_RECENT = 1024
PERCENTILES = (50, 90, 99)
BUILD = ("version", "model", "family", "device", "dtype", "attention", "gemm")

disable_created_metrics()  # type: ignore[no-untyped-call]  # of the whole process: there is no other way


class Metrics:
    """All instruments of the service, as attributes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter = functools.partial(Counter, registry=self.registry)
        gauge = functools.partial(Gauge, registry=self.registry)
        histogram = functools.partial(Histogram, registry=self.registry)
        self.requests = counter("ve_requests_total", "RPCs by method and status.", ["method", "status"])
        self.items = counter(
            "ve_items_total",
            "Items that were ready for calls, Prefetch included, by tier. Directory reads make no call.",
            ["tier"],
        )
        self.failures = counter("ve_item_failures_total", "Failed items by reason.", ["reason"])
        self.unknown_keys = counter(
            "ve_unknown_keys_total",
            "Items asked for by key or digest alone that are neither stored nor being encoded.",
        )
        self.rejections = counter(
            "ve_rejections_total",
            "Items and calls refused because the service was full or not ready, by reason.",
            ["reason"],
        )
        self.call_failures = counter(
            "ve_call_failures_total", "RPCs that failed as a whole, by reason.", ["reason"]
        )
        self.deliveries = counter(
            "ve_deliveries_total",
            "Items by how their rows were delivered: inline, or as a place in host or device memory.",
            ["transport"],
        )
        self.rows_bytes = counter(
            "ve_rows_bytes_total", "Bytes of rows that were ready for calls, Prefetch included."
        )
        self.directory_reads = counter(
            "ve_directory_reads_total",
            "Reads in shared memory that clients reported: at an announced place, or by the directory.",
        )
        self.reads_lost = counter("ve_reads_lost_total", "Reads in shared memory that an eviction overtook.")
        self.encodes_repeated = counter("ve_encodes_repeated_total", "Items encoded again after a lost read.")
        self.inline_fallbacks = counter(
            "ve_inline_fallbacks_total",
            "Items sent inline although their caller reads shared memory: large, losses or no_room.",
            ["reason"],
        )
        self.stage_seconds = histogram(
            "ve_stage_seconds",
            "Seconds of one item in one stage. Delivery ends when its caller has taken the rows.",
            ["stage"],
            buckets=STAGE_BUCKETS_S,
        )
        self._stages = {stage: self.stage_seconds.labels(stage) for stage in STAGES}
        self.recent = RecentTimes()
        self.batch_patches = histogram(
            "ve_batch_patches",
            "Patches in one forward.",
            buckets=(64, 256, 1024, 4096, 8192, 16384, 32768, 65536),
        )
        self.step_host_seconds = histogram(
            "ve_step_host_seconds",
            "Host time to launch one batch. On a CPU it includes the forward pass.",
            buckets=STEP_BUCKETS_S,
        )
        self.batch_time_ratio = histogram(
            "ve_batch_time_ratio",
            "Device time of a batch divided by its prediction.",
            buckets=(0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0),
        )
        self.kernel_choice = gauge(
            "ve_kernel_choice",
            "1 for the chosen kernel: attention by patches x longest sequence, matrix products by rows.",
            ["step", "shape", "library"],
        )
        self.build_info = gauge(
            "ve_build_info",
            "1, with what serves as labels. attention and gemm: the libraries in use, comma separated.",
            BUILD,
        )
        self.ready = gauge("ve_ready", "1 while the service takes work.")

    def count(self, counter: Counter, *labels: str) -> None:
        """Adds one to a counter's series with these labels. A label must have few values."""
        counter.labels(*labels).inc()

    def observe_encode(self, timings: StageTimings) -> None:
        """Observes an encode that has ended. Call it once per encode, not per caller."""
        self._observe(timings, "admit", "decode", "resize", "queue", "tower", "store")

    def observe_result(self, tier: CacheTier, num_bytes: int, timings: StageTimings) -> None:
        """Observes rows that are ready for one caller."""
        self.count(self.items, tier.value)
        self.rows_bytes.inc(num_bytes)
        self._observe(timings, "identify", "total")

    def observe_delivery(self, transport: str, seconds: float) -> None:
        """Observes rows that one caller has taken, ``seconds`` after they were ready."""
        self.count(self.deliveries, transport)
        self._observe_stage("delivery", seconds)

    def _observe(self, timings: StageTimings, *stages: str) -> None:
        for stage in stages:
            milliseconds: float = getattr(timings, f"{stage}_ms")
            if milliseconds:  # 0: the item did not pass this stage
                self._observe_stage(stage, milliseconds / 1e3)

    def _observe_stage(self, stage: str, seconds: float) -> None:
        self._stages[stage].observe(seconds)
        self.recent.add(stage, seconds)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Registers a gauge whose value is read at scrape time."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def gauge_by_labels(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        reads: Mapping[tuple[str, ...], Callable[[], float]],
    ) -> None:
        """Registers a gauge with one value for each combination of labels. Values are read at scrape time."""
        gauge = Gauge(name, text, labels, registry=self.registry)
        for values, read in reads.items():
            gauge.labels(*values).set_function(read)

    def counter_view(
        self,
        name: str,
        text: str,
        read: Callable[[], float] | Callable[[], Mapping[str, float]],
        label: str = "",
    ) -> None:
        """Registers a counter that another object keeps. Its value is read at scrape time. label: the name of
        the label, if ``read`` returns a value for each of the label's values."""
        self.registry.register(_CounterView(name, text, read, label))

    def exposition(self) -> bytes:
        """The metrics in the text format that Prometheus scrapes."""
        return generate_latest(self.registry)


class RecentTimes:
    """The newest times of each stage, as they were observed: a histogram knows only buckets. clock:
    seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[str, deque[tuple[float, float]]] = {
            stage: deque(maxlen=MAX_RECENT) for stage in STAGES
        }
        self.num_total = 0
        """Times of the stage ``total`` since the start."""

    def add(self, stage: str, seconds: float) -> None:
        self._times[stage].append((self._clock(), seconds))
        self.num_total += stage == "total"

    def within(self, seconds: float) -> dict[str, dict[str, float]]:
        """``percentiles_ms`` by stage, of the last ``seconds``."""
        since_s = self._clock() - seconds
        found = {
            stage: [took_s for at_s, took_s in times if at_s >= since_s]
            for stage, times in self._times.items()
        }
        return {stage: percentiles_ms(times) for stage, times in found.items() if times}

    def total_after(self, number: int) -> dict[str, float] | None:
        """``percentiles_ms`` of ``total``, of the times after the first ``number``; None without any."""
        num_new = min(max(0, self.num_total - number), MAX_RECENT)
        times = [took_s for _, took_s in self._times["total"]]
        return percentiles_ms(times[-num_new:]) if num_new else None


def percentiles_ms(times_s: Sequence[float]) -> dict[str, float]:
    """How many times there are (``passed``), and ``p50``, ``p90``, ``p99`` in milliseconds, each of them an
    observed time (nearest rank)."""
    ordered = sorted(times_s)
    return {"passed": len(ordered)} | {
        f"p{percent}": ordered[math.ceil(percent / 100 * len(ordered)) - 1] * 1e3 for percent in PERCENTILES
    }


class _CounterView:
    """A collector of one value, or of one value for each value of a label."""

    def __init__(
        self,
        name: str,
        text: str,
        read: Callable[[], float] | Callable[[], Mapping[str, float]],
        label: str,
    ) -> None:
        self._name, self._text, self._read, self._label = name, text, read, label

    def collect(self) -> Iterator[CounterMetricFamily]:
        figure = self._read()
        if not isinstance(figure, Mapping):
            yield CounterMetricFamily(self._name, self._text, value=figure)
            return
        family = CounterMetricFamily(self._name, self._text, labels=[self._label])
        for value, number in figure.items():
            family.add_metric([value], number)
        yield family
