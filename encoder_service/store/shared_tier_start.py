"""The shared tier as the settings want it, and what operators see of it.

Owns how settings become a tier, and names and texts of its metrics; the figures are counted in
``shared_tier``.
"""

from __future__ import annotations

from concurrent.futures import Executor

from prometheus_client import Histogram

from encoder_service.config import Settings
from encoder_service.metrics import Metrics
from encoder_service.store.embedding_store import RowStore
from encoder_service.store.shared_tier import MAX_LOOKS, ServerTier, SharedTierLimits
from encoder_service.store.shared_tier_entry import Layout, Seal
from encoder_service.store.shared_tier_server import ValkeyServer

# A write has one of its own beside the looks'.
MAX_CONNECTIONS = MAX_LOOKS + 2
LOOK_BUCKETS_S = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


def open_shared_tier(
    settings: Settings, layout: Layout, store: RowStore, workers: Executor, metrics: Metrics
) -> ServerTier | None:
    """The tier, its metrics registered, or None without ``shared_url``. Connects to nothing yet: a server
    that is down keeps no service from starting. Raises ConfigurationError."""
    if settings.shared_url is None or settings.shared_secret is None:
        return None
    limits = SharedTierLimits(
        timeout_s=settings.shared_timeout_ms / 1e3,
        ttl_s=settings.shared_ttl_s,
        max_value_bytes=settings.shared_max_value_bytes,
        max_read_bytes=4 * settings.shared_max_value_bytes,
        max_queued_bytes=settings.shared_queue_bytes,
        excluded=frozenset(settings.isolated_namespaces),
    )
    seconds = Histogram(
        "ve_shared_tier_look_seconds",
        "Seconds of a look into the shared tier, by how it ended.",
        ["outcome"],
        buckets=LOOK_BUCKETS_S,
        registry=metrics.registry,
    )
    tier = ServerTier(
        ValkeyServer(settings.shared_url, prefix=settings.shared_prefix, max_connections=MAX_CONNECTIONS),
        Seal(settings.shared_secret.get_secret_value().encode()),
        layout,
        store,
        workers,
        limits,
        look_ended=lambda elapsed_s, outcome: seconds.labels(outcome).observe(elapsed_s),
    )
    export_shared_tier(metrics, tier)
    return tier


def export_shared_tier(metrics: Metrics, tier: ServerTier) -> None:
    """Registers everything but the look's seconds; once per registry."""
    counters = tier.counters
    by, counter = metrics.counter_view_by, metrics.counter_view
    by("ve_shared_tier_looks", "Looks into the shared tier, made or not.", "outcome", lambda: counters.looks)
    by("ve_shared_tier_writes", "Items written to it or given up.", "outcome", lambda: counters.writes)
    counter("ve_shared_tier_read_bytes", "Bytes of rows read from it.", lambda: counters.read_bytes)
    counter("ve_shared_tier_written_bytes", "Bytes of rows written to it.", lambda: counters.written_bytes)
    metrics.gauge("ve_shared_tier_queued_bytes", "Rows that wait to be written.", lambda: tier.queued_bytes)
    metrics.gauge_by(
        "ve_shared_tier_breaker",
        "Whether it is left alone: 0 no, 1 one call is let through to try it, 2 yes.",
        "calls",
        {"looks": lambda: tier.looks.state.value, "writes": lambda: tier.writes.state.value},
    )
    counter(
        "ve_shared_tier_opened",
        "Times that it was found slow or gone and left alone from then on.",
        lambda: tier.looks.num_opened + tier.writes.num_opened,
    )
