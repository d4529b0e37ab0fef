"""Metrics of the pipeline, the engine, the store and the broker, read at scrape time.

Owns the names and help texts of these metrics. The objects that they describe keep the counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from encoder_service import __version__
from encoder_service.broker import Broker
from encoder_service.engine.device import DeviceEngine
from encoder_service.engine.graphs import GraphRunner
from encoder_service.ingest.pixel_segments import PixelSegments
from encoder_service.ops.metrics import Metrics
from encoder_service.pipeline import Pipeline, ServedModel
from encoder_service.scheduler.buckets import Bucket
from encoder_service.store.embedding_store import EmbeddingStore
from encoder_service.towers.attention import SdpaAttention
from encoder_service.towers.attention.cases import ATTENTION
from encoder_service.towers.gemm import TORCH_GEMM


def register_gauges(metrics: Metrics, pipeline: Pipeline, engine: DeviceEngine) -> None:
    """Registers the metrics that every service has. Call once per registry."""
    gauge, counter = metrics.gauge, metrics.counter_view
    gauge(
        "ve_queued_patches", "Patches admitted and not yet encoded.", lambda: pipeline.admission.num_patches
    )
    gauge(
        "ve_queued_device_seconds",
        "Seconds that the device will need for items admitted and not yet encoded.",
        lambda: pipeline.load.queued_s,
    )
    gauge(
        "ve_queued_bytes",
        "Bytes of content of calls in progress and their items.",
        lambda: pipeline.admission.num_bytes,
    )
    gauge(
        "ve_undelivered_bytes",
        "Rows encoded and not yet read by their callers.",
        lambda: pipeline.undelivered.num_bytes,
    )
    gauge("ve_encodes_in_flight", "Encodes in progress.", lambda: len(pipeline.inflight))
    counter(
        "ve_encodes_joined",
        "Callers that joined an encode in progress.",
        lambda: pipeline.inflight.num_joined,
    )
    counter("ve_batches", "Forward passes.", lambda: engine.counters.batches)
    counter("ve_encoded_items", "Items through the tower.", lambda: engine.counters.items)
    counter("ve_encoded_patches", "Patches through the tower.", lambda: engine.counters.patches)
    counter("ve_dropped_items", "Items dropped before the device.", lambda: engine.counters.dropped_items)
    counter(
        "ve_retried_batches",
        "Batches that failed and were split, so that innocent items succeed.",
        lambda: engine.counters.retried_batches,
    )
    counter("ve_device_busy_seconds", "Seconds in forward passes.", lambda: engine.counters.busy_s)
    if engine.graphs is not None:
        register_graphs(metrics, engine.graphs)
    register_store(metrics, pipeline.store)
    register_build(metrics, pipeline.model, [] if engine.graphs is None else engine.graphs.choices)


def register_build(metrics: Metrics, model: ServedModel, choices: Sequence[tuple[str, str, str]]) -> None:
    """Sets what serves. choices: of kernels, as in ``GraphRunner``; empty for the plain tower."""
    attention = {name for operation, _, name in choices if operation == ATTENTION}
    gemms = {name for operation, _, name in choices if operation != ATTENTION}
    facts = {
        "version": __version__,
        "model": model.name,
        "family": model.family,
        "device": str(model.tower.device),
        "dtype": str(model.tower.dtype).removeprefix("torch."),
        "attention": ",".join(sorted(attention)) or SdpaAttention.name,
        "gemm": ",".join(sorted(gemms)) or TORCH_GEMM.name,
    }
    metrics.build_info.labels(**facts).set(1)


def register_graphs(metrics: Metrics, graphs: GraphRunner) -> None:
    """Registers the metrics of CUDA graphs. Call once per registry."""
    figures, counter = graphs.counters, metrics.counter_view
    counter("ve_graph_replays", "Batches run as a CUDA graph.", lambda: figures.replays.total())
    counter("ve_eager_runs", "Batches that no bucket took.", lambda: figures.eager_runs)
    counter("ve_padded_patches", "Padding added to buckets.", lambda: figures.padded_patches)
    metrics.counter_view(
        "ve_bucket_runs",
        "Batches by the patches of the bucket that took them.",
        lambda: runs_by_size(figures.replays, figures.padded_runs),
        "patches",
    )
    metrics.gauge("ve_graph_bytes", "Device memory of captured graphs.", lambda: graphs.captured_bytes)
    for step, shape, name in graphs.choices:
        metrics.kernel_choice.labels(step, shape, name).set(1)


def runs_by_size(*counters: Mapping[Bucket, int]) -> Mapping[str, float]:
    """Number of batches by the bucket's size in patches."""
    runs: Counter[int] = Counter()
    for counter in counters:
        for bucket, count in dict(counter).items():  # copied in one step: the engine's thread adds to it
            runs[bucket.num_patches] += count
    return {str(size): runs[size] for size in sorted(runs)}


def register_store(metrics: Metrics, store: EmbeddingStore) -> None:
    counter = metrics.counter_view
    metrics.gauge("ve_store_bytes", "Bytes of rows held.", lambda: store.num_bytes)
    metrics.gauge_by_labels(
        "ve_store_items",
        "Items held by a tier; one that is held in both counts in each.",
        ("tier",),
        {("device",): lambda: store.num_items("device"), ("host",): lambda: store.num_items("host")},
    )
    counter("ve_store_evictions", "Items evicted from a tier.", lambda: store.num_evictions)
    counter("ve_store_refused", "Items for which there was no room.", lambda: store.counters.refused)
    counter(
        "ve_announced_rows_evicted_unread",
        "Rows evicted before the reader of their place reported them as read.",
        lambda: store.num_unread_evictions,
    )
    metrics.counter_view(
        "ve_tier_copies",
        "Items copied between the device and the host tier.",
        lambda: {
            "to_host": store.counters.copies_to_host,
            "to_device": store.counters.copies_to_device,
        },
        "direction",
    )


def register_broker(metrics: Metrics, broker: Broker, store: EmbeddingStore) -> None:
    """Registers the metrics of a service with a broker. Call once per registry."""
    arenas = [((arena.kind, namespace or ""), arena) for namespace, arena in store.arenas()]
    for name, text, attribute in (
        ("ve_arena_bytes", "Size of an arena.", "capacity_bytes"),
        ("ve_arena_free_bytes", "Bytes in no slot of an arena.", "free_bytes"),
        ("ve_arena_largest_free_bytes", "Largest free range of an arena.", "largest_free_bytes"),
    ):
        metrics.gauge_by_labels(
            name,
            text,
            ("memory", "namespace"),
            {
                labels: lambda arena=arena, attribute=attribute: getattr(arena, attribute)  # type: ignore[misc]
                for labels, arena in arenas
            },
        )
    metrics.gauge(
        "ve_directory_items",
        "Items that the arenas' directories list.",
        lambda: sum(len(arena.directory) for _, arena in arenas),
    )
    metrics.gauge(
        "ve_broker_up", "1 while the broker's socket is served.", lambda: float(broker.is_serving())
    )
    metrics.gauge("ve_broker_connections", "Clients of the broker.", lambda: broker.num_connections)
    metrics.counter_view(
        "ve_broker_refused",
        "Hellos and attaches that were refused.",
        lambda: dict(broker.refused),
        "reason",
    )


def register_segments(metrics: Metrics, segments: PixelSegments) -> None:
    """Registers the metrics of pixels in shared memory. Call once per registry."""
    metrics.counter_view(
        "ve_pixel_segments",
        "Named segments of pixels: copied, or the cause of the refusal.",
        lambda: dict(segments.outcomes),
        "outcome",
    )
