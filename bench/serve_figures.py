"""What a cell of the serving bench comes to: figures of one load, and the goals that they meet or miss.

Owns the arithmetic alone, over the rows that clients send back and what was seen of the service before and
after.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
STAGES = (
    "identify_ms", "admit_ms", "decode_ms", "resize_ms", "queue_ms", "tower_ms", "store_ms", "total_ms",
    "delivery_ms",
)  # fmt: skip
# What the project set itself.
GOAL_TOWER_SHARE = 0.9
GOAL_OVERHEAD_MS = 1.5
OK = "ok"
# Tiers of rows that were encoded for the request itself.
MISS = "miss"


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that so large a share of them does not exceed; NaN of none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p99; None of no values, since a result has no NaN."""
    if not values:
        return None
    return {name: percentile(values, share) for name, share in PERCENTILES.items()}


def requests_of(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all clients, by column."""
    return [dict(zip(answer["columns"], row, strict=True)) for answer in answers for row in answer["rows"]]


def client_figures(
    requests: Sequence[Mapping[str, Any]], *, warm_s: float, duration_s: float, bound_ms: float
) -> dict[str, Any]:
    """Figures of the part of a load after ``warm_s``. Rates are of what ended within it, latencies of what
    was due within it."""
    span_s = duration_s - warm_s
    due = [one for one in requests if one["at_s"] >= warm_s]
    fine = [one for one in due if one["status"] == OK]
    ended = [
        one
        for one in requests
        if one["status"] == OK and warm_s <= one["at_s"] + one["latency_ms"] / 1e3 < duration_s
    ]
    misses = [one for one in fine if one["tier"] == MISS]
    in_time = sum(one["latency_ms"] <= bound_ms for one in fine)
    tiers = Counter(one["tier"] for one in fine)
    return {
        "offered_images_per_s": len(due) / span_s,
        "images_per_s": len(ended) / span_s,
        "patches_per_s": sum(one["patches"] for one in ended) / span_s,
        "encoded_images_per_s": sum(one["tier"] == MISS for one in ended) / span_s,
        "encoded_patches_per_s": sum(one["patches"] for one in ended if one["tier"] == MISS) / span_s,
        "delivered_mib_per_s": sum(one["bytes"] for one in ended) / span_s / (1 << 20),
        "goodput_images_per_s": in_time / span_s,
        "bound_ms": bound_ms,
        "num_requests": len(due),
        "failures": dict(Counter(one["status"] for one in due if one["status"] != OK)),
        "tiers": {tier: count / len(fine) for tier, count in sorted(tiers.items())} if fine else {},
        "latency_ms": percentiles([one["latency_ms"] for one in fine]),
        "miss_latency_ms": percentiles([one["latency_ms"] for one in misses]),
        "hit_latency_ms": percentiles(
            [one["latency_ms"] for one in fine if one["tier"] not in (MISS, "in_flight")]
        ),
        "lag_ms": percentiles([one["lag_ms"] for one in fine]),
        "stages": {stage: percentiles([one[stage] for one in misses]) for stage in STAGES if misses},
        # Of each request its own, and then the percentile: not a difference of percentiles.
        "overhead_ms": percentiles([overhead_ms(one) for one in misses]),
        "overhead_unqueued_ms": percentiles([overhead_ms(one) - one["queue_ms"] for one in misses]),
        "service_overhead_ms": percentiles([service_overhead_ms(one) for one in misses]),
        # What is left of it outside: the caller's process, its lag, and the way there and back.
        "caller_overhead_ms": percentiles([overhead_ms(one) - service_overhead_ms(one) for one in misses]),
    }


def overhead_ms(request: Mapping[str, Any]) -> float:
    """From when a request was due to its rows, beyond making pixels of the file and the tower's forward."""
    spent = request["decode_ms"] + request["resize_ms"] + request["tower_ms"]
    return float(request["latency_ms"] - spent)


def service_overhead_ms(request: Mapping[str, Any]) -> float:
    """The same of the service alone, by its own clock: without the caller's process and the way between."""
    spent = request["decode_ms"] + request["resize_ms"] + request["tower_ms"]
    return float(request["total_ms"] + request["delivery_ms"] - spent)


def service_figures(
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    seconds: float,
    cpu_s: float,
    loop_cpu_s: float,
) -> dict[str, Any]:
    """Figures of what the service counted between two moments. Shares of the whole time; ``cores``: kept busy
    by all its threads; ``loop_share``: of the one that runs the event loop. ``without_call``: shares of the
    items delivered that their callers found by themselves, read or leased without a call of the service."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    items, batches = grown("ve_encoded_items_total"), grown("ve_batches_total")
    patches, padded = grown("ve_encoded_patches_total"), grown("ve_padded_patches_total")
    delivered = sum(grown(name) for name in after if name.startswith("ve_items_total"))
    return {
        "device_busy_share": grown("ve_device_busy_seconds_total") / seconds,
        "tower_images_per_s": items / seconds,
        "tower_patches_per_s": patches / seconds,
        "batches": batches,
        "images_per_batch": items / batches if batches else None,
        "padding_share": padded / (padded + patches) if patches else None,
        "cores": cpu_s / seconds,
        "loop_share": loop_cpu_s / seconds,
        "cpu_ms_per_item": cpu_s * 1e3 / delivered if delivered else None,
        "loop_ms_per_item": loop_cpu_s * 1e3 / delivered if delivered else None,
        "evictions": grown("ve_store_evictions_total"),
        "without_call": {
            "directory": grown("ve_directory_reads_total") / delivered,
            "leased": grown("ve_broker_fetched_total") / delivered,
        }
        if delivered
        else None,
    }


def goals_of(
    records: Sequence[Mapping[str, Any]], towers: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Each goal by mix: the best share of the tower's own throughput in any load, and the overhead in the
    lightest one."""
    goals = []
    for mix, tower in towers.items():
        own = [one for one in records if one["mix"] == mix and one["server"] == "service"]
        if not own:
            continue
        best = max(own, key=lambda one: one["encoded_patches_per_s"])
        share = best["encoded_patches_per_s"] / tower["patches_per_s"]
        # Less was offered than the goal asks for: nothing can be said.
        judged = max(one["load"] for one in own) >= 0.95
        goals.append(
            {
                "mix": mix,
                "goal": "share of the tower's own throughput",
                "wanted": GOAL_TOWER_SHARE,
                "found": share,
                "load": best["load"],
                "met": share >= GOAL_TOWER_SHARE if judged or share >= GOAL_TOWER_SHARE else None,
            }
        )
        lightest = min(own, key=lambda one: one["load"])
        overhead = lightest["overhead_ms"]
        if overhead is not None and lightest["load"] < 0.5:
            goals.append(
                {
                    "mix": mix,
                    "goal": "p50 beyond decode and tower, ms",
                    "wanted": GOAL_OVERHEAD_MS,
                    "found": overhead["p50"],
                    "without_queue": lightest["overhead_unqueued_ms"]["p50"],
                    "load": lightest["load"],
                    "met": overhead["p50"] < GOAL_OVERHEAD_MS,
                }
            )
    return goals


def summary_of(
    records: Sequence[Mapping[str, Any]], towers: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What a mix comes to, in a line: the service's throughput over the tower's own and the plain loop's,
    each at its best, and what an image takes beyond decode and tower at the lightest load. None: not
    measured."""
    lines = []
    for mix, tower in towers.items():
        best = {
            server: max(
                (
                    one["encoded_patches_per_s"]
                    for one in records
                    if one["mix"] == mix and one["server"] == server
                ),
                default=None,
            )
            for server in ("service", "baseline")
        }
        steady = [
            one for one in records if one["mix"] == mix and one["server"] == "service" and not one["bursty"]
        ]
        if best["service"] is None or not steady:
            continue
        lightest = min(steady, key=lambda one: one["load"])
        lines.append(
            {
                "mix": mix,
                "tower_images_per_s": tower["images_per_s"],
                "service_over_tower": best["service"] / tower["patches_per_s"],
                "service_over_baseline": best["service"] / best["baseline"] if best["baseline"] else None,
                "baseline_over_tower": (
                    best["baseline"] / tower["patches_per_s"] if best["baseline"] is not None else None
                ),
                "overhead_load": lightest["load"],
                **{
                    f"{name}_p50_ms": lightest[f"{name}_ms"] and lightest[f"{name}_ms"]["p50"]
                    for name in ("overhead", "overhead_unqueued", "service_overhead")
                },
            }
        )
    return lines
