"""What operators see of the pipeline and its engine, read at scrape time.

Owns names and texts of these metrics; the figures are counted where things happen.
"""

from __future__ import annotations

import functools

from encoder_service.admin.live import runs_by_size, store_tiers
from encoder_service.engine.calibrate import export_cost
from encoder_service.engine.device import DeviceEngine
from encoder_service.logs import lost_lines
from encoder_service.metrics import Metrics
from encoder_service.pipeline import Pipeline
from encoder_service.store.shared_tier import ServerTier
from encoder_service.store.tiers import TieredStore


def register_gauges(metrics: Metrics, pipeline: Pipeline, engine: DeviceEngine) -> None:
    """Registers everything; once per registry."""
    gauge, counter = metrics.gauge, metrics.counter_view
    gauge(
        "ve_queued_patches",
        "Patches admitted and not yet encoded.",
        lambda: pipeline.admission.num_patches,
    )
    gauge(
        "ve_queued_device_seconds",
        "Seconds that the device will need for items admitted and not yet encoded.",
        lambda: pipeline.load.queued_s,
    )
    gauge("ve_queued_bytes", "Content bytes of admitted items.", lambda: pipeline.admission.num_bytes)
    gauge(
        "ve_undelivered_bytes",
        "Rows encoded and not yet read by their callers.",
        lambda: pipeline.undelivered.num_bytes,
    )
    gauge("ve_flights", "Encodes in progress.", lambda: len(pipeline.flights))
    gauge("ve_store_bytes", "Bytes of rows held.", lambda: pipeline.store.num_bytes)
    metrics.gauge_by(
        "ve_store_items",
        "Items held by a tier; one that is held in both counts in each.",
        "tier",
        {name: functools.partial(len, part) for name, part in store_tiers(pipeline.store).items()},
    )
    counter("ve_store_hits", "Lookups that found rows.", lambda: pipeline.store.counters.hits)
    counter("ve_store_misses", "Lookups that found none.", lambda: pipeline.store.counters.misses)
    counter("ve_store_evictions", "Items evicted.", lambda: pipeline.store.counters.evictions)
    counter("ve_store_refused", "Items that found no room.", lambda: pipeline.store.counters.refused)
    by = metrics.counter_view_by
    by(
        "ve_log_lines_lost",
        "Log lines lost: full, nobody takes them; failed, they could not be written.",
        "reason",
        lost_lines,
    )
    by("ve_tier_lookups", "Lookups that came to a tier.", "tier", lambda: _tier_figures(pipeline)[0])
    by("ve_tier_hits", "Lookups that a tier answered.", "tier", lambda: _tier_figures(pipeline)[1])
    counter(
        "ve_flights_joined",
        "Callers that joined an encode under way.",
        lambda: pipeline.flights.counters.joined,
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
    if (decoding := pipeline.model.preprocessor.decoding) is not None:
        by(
            "ve_decoded_items",
            "Images by where they are decoded: the device, or the host for their format or damage, for their "
            "size, for want of memory on the device, or because it refused or failed.",
            "place",
            lambda: dict(decoding.counts),
        )
    if (graphs := engine.graphs) is not None:
        figures = graphs.counters
        counter("ve_graph_replays", "Batches run as a CUDA graph.", lambda: figures.replays.total())
        counter("ve_eager_runs", "Batches that no bucket took.", lambda: figures.eager_runs)
        counter("ve_padded_patches", "Padding added to buckets.", lambda: figures.padded_patches)
        counter("ve_bucketed_patches", "Patches of batches that a bucket took.", lambda: figures.real_patches)
        metrics.counter_view_by(
            "ve_bucket_runs",
            "Batches by the patches of the bucket that took them.",
            "patches",
            lambda: {
                str(size): runs for size, runs in runs_by_size(figures.replays, figures.padded_runs).items()
            },
        )
        gauge("ve_graph_bytes", "Device memory of captured graphs.", lambda: graphs.captured_bytes)
        export_cost(metrics, graphs.ladder)
        for step, shape, name in graphs.choices:
            metrics.kernel_choice.labels(step, shape, name).set(1)
    counter("ve_device_busy_seconds", "Seconds in forward passes.", lambda: engine.counters.busy_s)


def _tier_figures(pipeline: Pipeline) -> tuple[dict[str, float], dict[str, float]]:
    """Lookups and hits by tier, the fastest first: what one tier does not answer comes to the next."""
    store, shared = pipeline.store, pipeline.shared_tier
    asked = float(store.counters.hits) + float(store.counters.misses)
    hits = {"host": float(store.counters.hits)}
    if isinstance(store, TieredStore):
        hits = {"device": float(store.device.counters.hits), "host": float(store.host.counters.hits)}
    lookups = {"device": asked, "host": asked - hits.get("device", 0.0)}
    if isinstance(shared, ServerTier):
        hits["shared"] = shared.counters.looks["hit"]
        lookups["shared"] = sum(shared.counters.looks.values())
    return {tier: lookups[tier] for tier in hits}, hits
