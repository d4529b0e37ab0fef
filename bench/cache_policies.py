"""Hit rates of cache policies on mixes of requests, against the size of the cache. Needs no GPU.

    python bench/cache_policies.py          # a table, bench/results/cache-policies-<date>.json and a picture
    python bench/cache_policies.py --requests 20000 --repeats 1 --seed 7

Owns the comparison. A hit rate is the share of the *patches* asked for that need not be encoded, which is
what a miss costs; the share of requests is beside it. The first fifth of a mix fills the cache and is not
counted. Sizes of the cache are shares of the footprint: patches of all items of the mix, each once. Mixes are
``cache_traces``', policies ``cache_policy_models``'.
"""

from __future__ import annotations

import argparse
import datetime
import json
import secrets
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from cache_policy_models import BOUND, POLICIES, Farthest, Policy
from cache_traces import PATTERNS, Trace, make_trace
from measurement import RESULTS, describe_environment
from rich.console import Console
from rich.table import Table

SHARES = (0.02, 0.05, 0.1, 0.2)
WARM_UP = 0.2


def hit_rates(policy: Policy, trace: Trace) -> tuple[float, float]:
    """By patches and by requests."""
    hits = hit_patches = patches = 0
    first = int(WARM_UP * len(trace.keys))
    for at, key in enumerate(trace.keys):
        size = trace.sizes[key]
        hit = policy.request(key, size)
        if at >= first:
            patches += size
            if hit:
                hits += 1
                hit_patches += size
    return hit_patches / patches, hits / (len(trace.keys) - first)


def compare(num_requests: int, repeats: int, seed: int) -> list[dict[str, Any]]:
    """A record for each mix, size and policy: means over ``repeats`` draws, and by how much they differ."""
    records = []
    for name in PATTERNS:
        traces = [make_trace(name, num_requests, seed + repeat) for repeat in range(repeats)]
        for share in SHARES:
            for policy in (*POLICIES, BOUND):
                rates = []
                started_s = time.perf_counter()
                for trace in traces:
                    capacity = int(share * trace.footprint)
                    made = Farthest(capacity, trace.keys) if policy == BOUND else POLICIES[policy](capacity)
                    rates.append(hit_rates(made, trace))
                records.append(
                    {
                        "mix": name,
                        "cache_share": share,
                        "policy": policy,
                        "patch_hit_rate": statistics.fmean(rate for rate, _ in rates),
                        "patch_hit_rate_spread": max(rates)[0] - min(rates)[0],
                        "request_hit_rate": statistics.fmean(rate for _, rate in rates),
                        "us_per_request": (time.perf_counter() - started_s) * 1e6 / (repeats * num_requests),
                    }
                )
    return records


def table_of(records: list[dict[str, Any]]) -> Table:
    table = Table(title="Hit rates by patches, per cent")
    for column in ("mix", "cache", *POLICIES, BOUND):
        table.add_column(column)
    for mix in PATTERNS:
        for share in SHARES:
            rates = [
                one["patch_hit_rate"]
                for policy in (*POLICIES, BOUND)
                for one in records
                if (one["mix"], one["cache_share"], one["policy"]) == (mix, share, policy)
            ]
            table.add_row(mix, f"{share:.0%}", *(f"{100 * rate:.1f}" for rate in rates))
    return table


def draw(result: dict[str, Any], path: Path) -> None:
    """Hit rate over cache size, a panel for each mix. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), layout="constrained")
    panels = figure.subplots(2, (len(PATTERNS) + 1) // 2, squeeze=False).flatten()
    styles = {"lru": ("#33485f", 2.2), "service": ("#d1570d", 2.8), BOUND: ("#bbbbbb", 1.2)}
    for panel, mix in zip(panels, PATTERNS, strict=False):
        for policy in (*POLICIES, BOUND):
            rates = [
                100 * one["patch_hit_rate"]
                for one in result["records"]
                if (one["mix"], one["policy"]) == (mix, policy)
            ]
            colour, width = styles.get(policy, (None, 1.0))
            panel.plot([100 * share for share in SHARES], rates, label=policy, color=colour, linewidth=width)
        panel.set_title(mix)
        panel.set_xlabel("cache, % of the footprint")
        panel.set_ylabel("patches hit, %")
        panel.grid(color="#e4e4e4")
    handles, labels = panels[0].get_legend_handles_labels()
    for panel in panels[len(PATTERNS) :]:
        panel.set_axis_off()
    panels[-1].legend(handles, labels, loc="center", fontsize=8)
    figure.savefig(path, dpi=110)


def free_path(stem: str) -> Path:
    """Where no result is yet."""
    for number in range(1, 1000):
        path = RESULTS / f"{stem}{'' if number == 1 else f'-{number}'}.json"
        if not path.exists():
            return path
    raise FileExistsError(stem)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--out", type=Path, default=None, help="result file; default: bench/results")
    arguments = parser.parse_args()
    seed = secrets.randbelow(1 << 30) if arguments.seed is None else arguments.seed
    console = Console(width=200)
    records = compare(arguments.requests, arguments.repeats, seed)
    console.print(table_of(records))
    result = {
        **describe_environment(torch.device("cpu"), None),
        "settings": {"requests": arguments.requests, "repeats": arguments.repeats, "seed": seed},
        "mixes": {name: make_trace(name, 1, 0).text for name in PATTERNS},
        "records": records,
    }
    path = arguments.out or free_path(f"cache-policies-{datetime.datetime.now(datetime.UTC).date()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, path.with_suffix(".png"))
    console.print(f"wrote {path} and its picture, seed {seed}")


if __name__ == "__main__":
    main()
