"""Draws a result of the scheduling simulation for docs/scheduling.md.

    python bench/scheduling_chart.py bench/results/scheduling-2026-11-22.json

Owns the pictures, and reads the result alone: docs/scheduling-latency.png has each scenario's latencies by
policy, docs/scheduling-sharing.png what tenants, priorities and deadlines come to.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
COLOURS = {
    "planner": "#d1570d",
    "first come, patch budget": "#64788f",
    "16 items": "#98a4b3",
    "one at a time": "#c3c9d1",
}
INK = "#333333"
SHARING = (("flood", "small"), ("priorities", "low"), ("priorities", "high"))


def draw_latency(result: dict[str, Any], path: Path) -> None:
    """Bars from the median to the 99th percentile."""
    from matplotlib.figure import Figure

    scenarios = list(dict.fromkeys(one["scenario"] for one in result["records"]))
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for offset, (policy, colour) in enumerate(COLOURS.items()):
        records = [one for one in result["records"] if one["policy"] == policy]
        places = [scenarios.index(one["scenario"]) + 0.2 * (offset - 1.5) for one in records]
        low, high = ([one[name] for one in records] for name in ("p50_ms", "p99_ms"))
        axes.bar(
            places,
            [top - bottom for top, bottom in zip(high, low, strict=True)],
            0.17,
            bottom=low,
            color=colour,
            label=policy,
        )
    axes.set_yscale("log")
    axes.set_ylim(bottom=20)
    axes.set_ylabel("latency, ms: median to 99th percentile")
    axes.set_xticks(range(len(scenarios)), [name.replace(", ", "\n") for name in scenarios], fontsize=8)
    axes.legend(frameon=False, fontsize=8)
    finish(figure, axes, path)


def draw_sharing(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    for offset, (policy, colour) in enumerate(COLOURS.items()):
        found = {one["scenario"]: one for one in result["records"] if one["policy"] == policy}
        values = [found[scenario]["streams"][stream]["p99_ms"] for scenario, stream in SHARING]
        left.bar(
            [place + 0.2 * (offset - 1.5) for place in range(3)], values, 0.17, color=colour, label=policy
        )
        right.bar([offset], [found["deadlines"]["streams"]["all"]["in_time_share"]], 0.8, color=colour)
    left.set_yscale("log")
    left.set_ylim(bottom=50)
    left.set_ylabel("99th percentile, ms")
    labels = [
        "the small tenant\nbeside a flood",
        "low priority\nunder overload",
        "high priority\nunder overload",
    ]
    left.set_xticks(range(3), labels, fontsize=8)
    left.legend(frameon=False, fontsize=8)
    right.set_ylabel("in time, deadlines of 500 ms at load 1.3")
    right.set_xticks([])
    right.set_ylim(0, 1)
    right.spines[["top", "right"]].set_visible(False)
    finish(figure, left, path)


def finish(figure: Any, axes: Any, path: Path) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    figure.savefig(path, dpi=110, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, default=DOCS)
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text())
    draw_latency(result, arguments.out / "scheduling-latency.png")
    draw_sharing(result, arguments.out / "scheduling-sharing.png")


if __name__ == "__main__":
    main()
