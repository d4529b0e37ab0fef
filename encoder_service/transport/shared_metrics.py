"""What operators see of shared memory: arenas, leases, the broker, and how often rows went inline instead.

Owns names and texts of these metrics; the figures are counted where things happen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from encoder_service.metrics import Metrics
from encoder_service.store.arena import Arena
from encoder_service.store.tiers import TierCounters, TieredStore
from encoder_service.transport.pixel_input import PixelInput
from encoder_service.transport.shared_memory import SharedMemory


def export_shared(metrics: Metrics, shared: SharedMemory) -> None:
    """Registers everything; once per registry."""
    _export_arenas(metrics, shared)
    _export_leases(metrics, shared)
    _export_broker(metrics, shared)


def export_pixels(metrics: Metrics, pixels: PixelInput) -> None:
    """Pixels that came in shared memory; once per registry."""
    counters, counter = pixels.counters, metrics.counter_view
    counter("ve_pixels_published", "Segments that clients published.", lambda: counters.published)
    counter("ve_pixels_consumed", "Tensors copied out of segments.", lambda: counters.consumed)
    counter(
        "ve_pixels_consumed_bytes",
        "Bytes of tensors copied out of segments.",
        lambda: counters.consumed_bytes,
    )
    counter("ve_pixels_unlinked", "Names of segments removed.", lambda: counters.unlinked)
    counter("ve_pixels_already_gone", "Names that somebody else had removed.", lambda: counters.already_gone)
    counter("ve_pixels_not_unlinked", "Names that could not be removed.", lambda: counters.not_unlinked)
    counter("ve_pixels_swept", "Segments of dead publishers removed.", lambda: counters.swept)
    counter("ve_pixels_refused", "Segments refused.", lambda: counters.refused.total())
    book = pixels.book
    if book is not None:
        metrics.gauge("ve_pixels_held", "Published segments not consumed yet.", lambda: len(book))
        metrics.gauge(
            "ve_pixels_held_bytes", "Bytes of published segments not consumed yet.", lambda: book.num_bytes
        )


def _export_arenas(metrics: Metrics, shared: SharedMemory) -> None:
    """By the namespace that an arena is for; empty: all that are not isolated. Device arenas, where there are
    any, have names of their own."""
    figures: tuple[tuple[str, str, Callable[[Arena], float]], ...] = (
        ("bytes", "Size of an arena.", lambda arena: arena.capacity_bytes),
        ("free_bytes", "Bytes in no slot.", lambda arena: arena.free_bytes),
        ("largest_hole_bytes", "Largest free range.", lambda arena: arena.largest_hole_bytes),
        (
            "fragmentation",
            "Share of free bytes outside the largest free range.",
            lambda arena: arena.fragmentation,
        ),
        ("slots", "Slots in use.", len),
    )
    for prefix, kind in (("ve_arena", "host"), ("ve_device_arena", "device")):
        arenas = {
            namespace or "": part.arena
            for namespace, part in shared.store.named_parts()
            if part.arena.geometry.kind == kind
        }
        if not arenas:
            continue
        for name, text, read in figures:
            views = {label: partial(read, arena) for label, arena in arenas.items()}
            metrics.gauge_by(f"{prefix}_{name}", f"{text} In {kind} memory.", "namespace", views)
    metrics.counter_view(
        "ve_arena_integrity_failures",
        "Checks that found the bookkeeping wrong.",
        lambda: shared.num_integrity_failures,
    )
    directories = [part.arena.directory for part in shared.store.parts()]
    metrics.gauge(
        "ve_directory_items",
        "Items that the arenas' directories list.",
        lambda: sum(map(len, directories)),
    )
    metrics.counter_view(
        "ve_directory_unlisted",
        "Items that a directory had no place for; they are read by lease.",
        lambda: sum(directory.num_unlisted for directory in directories),
    )
    if isinstance(shared.store, TieredStore):
        _export_tiers(metrics, shared.store.tier_counters)


def _export_tiers(metrics: Metrics, counters: TierCounters) -> None:
    counter = metrics.counter_view
    counter("ve_tier_spilled", "Items copied to the host ahead of their eviction.", lambda: counters.spilled)
    counter("ve_tier_promoted", "Items copied back to the device.", lambda: counters.promoted)
    counter(
        "ve_tier_lowered",
        "Items copied to the host, spilled ones included.",
        lambda: counters.lowered,
    )
    counter(
        "ve_tier_lowered_unkept",
        "Items copied to the host for those who read them just then: the host arena had no room.",
        lambda: counters.lowered_unkept,
    )
    counter(
        "ve_tier_unplaced",
        "Items whose rows came through the host: the device arena had no room.",
        lambda: counters.unplaced,
    )


def _export_leases(metrics: Metrics, shared: SharedMemory) -> None:
    leases, counters, delivered = shared.leases, shared.leases.counters, shared.counters
    counter = metrics.counter_view
    metrics.gauge("ve_leases", "Leases that are out.", lambda: len(leases))
    metrics.gauge("ve_leased_bytes", "Bytes of slots under lease, each once.", lambda: leases.leased_bytes)
    counter("ve_leases_granted", "Leases granted.", lambda: counters.granted)
    counter("ve_leases_renewed", "Leases renewed.", lambda: counters.renewed)
    counter("ve_leases_released", "Leases given back by all readers.", lambda: counters.released)
    counter("ve_leases_expired", "Leases that ran out of time.", lambda: counters.expired)
    counter("ve_leases_revoked", "Leases whose owner's connection ended.", lambda: counters.revoked)
    counter("ve_shared_deliveries", "Items delivered by lease.", lambda: delivered.shared)
    counter(
        "ve_shared_not_held",
        "Items wanted by lease and delivered inline: the store had no room.",
        lambda: delivered.not_held,
    )
    counter(
        "ve_shared_too_many_leases",
        "Items wanted by lease and delivered inline: their caller has too many.",
        lambda: delivered.too_many,
    )
    counter("ve_shared_no_owner", "Items refused: their caller is not connected.", lambda: delivered.no_owner)


def _export_broker(metrics: Metrics, shared: SharedMemory) -> None:
    broker, counters = shared.broker, shared.broker.counters
    counter = metrics.counter_view
    metrics.gauge(
        "ve_broker_up", "1 while the broker's socket is served.", lambda: float(broker.is_serving())
    )
    metrics.gauge("ve_broker_connections", "Clients of the broker.", lambda: broker.num_connections)
    counter("ve_broker_accepted", "Connections accepted.", lambda: counters.accepted)
    counter(
        "ve_broker_accept_failures", "Connections that could not be taken.", lambda: counters.accept_failures
    )
    counter("ve_broker_attaches", "Arenas handed out.", lambda: counters.attaches)
    counter(
        "ve_broker_fetched", "Items delivered by lease over the broker's socket.", lambda: counters.fetched
    )
    counter(
        "ve_broker_fetch_misses",
        "Keys asked for over the broker's socket that were not resident.",
        lambda: counters.fetch_misses,
    )
    counter(
        "ve_directory_reads",
        "Items that clients read by a directory, without a lease, as they told.",
        lambda: counters.read_unasked,
    )
    counter(
        "ve_directory_stale",
        "Reads by a directory that found the rows gone and were thrown away, as their readers told.",
        lambda: counters.read_stale,
    )
    counter("ve_broker_refused", "Connections refused.", lambda: counters.refused.total())
    counter("ve_broker_failed", "Requests that failed.", lambda: counters.failed.total())
