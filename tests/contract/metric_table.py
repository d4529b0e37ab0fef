"""Every metric of the service as data, and the table of docs/metrics.md made of it.

Owns a registry in which everything is registered, whatever this machine can do, and the form of the table.
Run as a program, it writes the table into the document.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import MagicMock, patch

import torch
from encoder_service.rpc.doors import export_gate, export_local
from encoder_service.store.tiers import TieredStore
from encoder_service.transport.shared_metrics import export_pixels, export_shared
from prometheus_client import Histogram

from encoder_service.config import parse_settings
from encoder_service.engine.graphs import GraphCounters
from encoder_service.engine.jobs import EngineCounters
from encoder_service.ingest.urls import open_urls
from encoder_service.ops.admin.gauges import register_gauges
from encoder_service.ops.admin.live import LiveView
from encoder_service.ops.metrics import Metrics
from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.store import shared_tier_start

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"

# What a name ends with (before a counter's _total), and what is counted then.
UNITS = {
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_patches": "patches",
    "_items": "items",
    "_calls": "calls",
    "_calls_busiest_host": "calls",
    "_ratio": "ratio",
    "_us": "microseconds",
    "_us_per_patch": "microseconds",
    "_us_per_square": "microseconds",
    "_us_per_slot_patch": "microseconds",
    "_error": "ratio",
    "_fragmentation": "ratio",
    "_batches": "batches",
    "_leases": "leases",
    "_flights": "encodes",
    "_slots": "slots",
    "_connections": "connections",
    "_held": "segments",
    "_breaker": "0 to 2",
    "_ready": "0 or 1",
    "_up": "0 or 1",
    "_choice": "0 or 1",
}
QUANTITIES = ("_seconds", "_bytes", "_patches", "_items", "_batches", "_calls")


class Row(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str
    text: str


def full_registry() -> Metrics:
    """All metrics, as a GPU service with a broker has them."""
    metrics = Metrics()
    graphs = SimpleNamespace(
        counters=GraphCounters(),
        captured_bytes=0,
        ladder=BucketLadder([Bucket(16, 2, 16)]),
        choices=[("attention", "16x16", "sdpa")],
    )
    graphs.counters.replays[Bucket(16, 2, 16)] += 1
    engine = MagicMock(graphs=graphs, counters=EngineCounters())
    pipeline = MagicMock()
    register_gauges(metrics, pipeline, engine)
    live = LiveView(metrics)
    live.sample = lambda: None  # type: ignore[method-assign]
    live.attach(pipeline, engine, None)
    live._sources = None
    export_pixels(metrics, MagicMock())
    parts = [(None, SimpleNamespace(arena=MagicMock())) for _ in range(2)]
    for (_, part), kind in zip(parts, ("host", "device"), strict=True):
        part.arena.geometry.kind = kind
    shared = MagicMock(store=MagicMock(spec=TieredStore, named_parts=lambda: iter(parts)))
    shared.store.tier_counters = MagicMock()
    export_shared(metrics, shared)
    register_shared_tier(metrics)
    gate = MagicMock(refused={"TOO_MANY_CALLS": 1})
    gate.permits.by_host = {}
    export_gate(metrics, gate)
    export_local(metrics, MagicMock())
    assert open_urls(parse_settings(model="m", url_allow="images.test"), metrics) is not None
    return metrics


def register_shared_tier(metrics: Metrics) -> None:
    """As a service with VE_SHARED_URL has it; nothing is connected to."""
    tier = MagicMock()
    tier.counters.looks = tier.counters.writes = {"hit": 1}
    with patch.multiple(shared_tier_start, ServerTier=lambda *_, **__: tier, ValkeyServer=MagicMock()):
        settings = MagicMock(isolated_namespaces=())
        settings.shared_secret.get_secret_value.return_value = "secret"
        shared_tier_start.open_shared_tier(settings, MagicMock(), MagicMock(), MagicMock(), metrics)


def rows_of(metrics: Metrics) -> list[Row]:
    """One row for each metric, by name, as queries name it: counters with their _total."""
    labels = {
        collector._name: tuple(collector._labelnames)  # type: ignore[attr-defined]
        for collector in metrics.registry._collector_to_names
        if hasattr(collector, "_labelnames")
    }
    rows = []
    for family in metrics.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        found = labels.get(family.name)
        if found is None:
            found = tuple(family.samples[0].labels) if family.samples else ()
        rows.append(Row(name, family.type, found, unit_of(name, family.type), family.documentation))
    return sorted(rows)


def unit_of(name: str, kind: str) -> str:
    """By the name's end; a counter of no quantity counts events. Empty where the name tells nothing."""
    stem = name.removesuffix("_total")
    units = {end: UNITS[end] for end in QUANTITIES} if kind == "counter" else UNITS
    found = max((end for end in units if stem.endswith(end)), key=len, default="")
    return units[found] if found else ("events" if kind == "counter" else "")


def table_of(rows: list[Row]) -> str:
    lines = ["| metric | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    for row in rows:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        text = row.text.replace("|", "\\|")
        lines.append(f"| `{row.name}` | {row.kind} | {labels} | {row.unit} | {text} |")
    return "\n".join(lines) + "\n"


def split_document(text: str) -> tuple[str, str, str]:
    """What stands before, in and after the table."""
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    return before + BEGIN, table, END + after


def names_with_series(rows: list[Row]) -> dict[str, tuple[str, ...]]:
    """Every name that a query may use, with its labels; a histogram has three."""
    names: dict[str, tuple[str, ...]] = {}
    for row in rows:
        if row.kind == Histogram._type:
            for end, more in (("_bucket", ("le",)), ("_sum", ()), ("_count", ())):
                names[row.name + end] = row.labels + more
        else:
            names[row.name] = row.labels
    return names


if __name__ == "__main__":
    before, _, after = split_document(DOCUMENT.read_text())
    DOCUMENT.write_text(before + table_of(rows_of(full_registry())) + after)
    print(f"wrote {DOCUMENT.name}", file=sys.stderr)
