"""Draws a result of the fleet bench: latency around each event, and the keys that moved.

    python bench/fleet_chart.py bench/results/fleet-2026-11-22.json

Owns the picture, and reads the result alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

INK, OURS, QUIET = "#333333", "#d1570d", "#98a4b3"


def draw(result: dict[str, Any], path: Path) -> Path:
    """Writes the picture and returns its path. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    records = result["records"]
    figure = Figure(figsize=(12, 8.4), layout="constrained")
    grid = figure.add_gridspec(3, 3, height_ratios=(1, 1, 0.8))
    for place, one in enumerate(records):
        axes = figure.add_subplot(grid[divmod(place, 3)])
        seconds, medians, largest = zip(*one["series"], strict=True)
        axes.fill_between(seconds, medians, largest, color=OURS, alpha=0.25, linewidth=0, step="post")
        axes.step(seconds, medians, color=OURS, where="post", linewidth=1.2)
        axes.axvline(0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_yscale("log")
        axes.set_title(f"{one['event']}: {one['failed']} of {one['items']} failed", fontsize=9)
        axes.set_xlabel("seconds from the event", fontsize=8)
        axes.set_ylabel("ms: median to largest", fontsize=8)
        tidy(axes)
    moved_keys(figure.add_subplot(grid[2, :2]), records)
    recovery(figure.add_subplot(grid[2, 2]), records)
    figure.suptitle(
        f"A fleet on loopback, {result['device']}, {str(result['date'])[:10]}, commit "
        f"{str(result['commit'])[:12]}",
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    figure.savefig(path, dpi=110, facecolor="white")
    return path


def moved_keys(axes: Any, records: list[dict[str, Any]]) -> None:
    """Bars of the measured share beside the ideal one."""
    for place, one in enumerate(records):
        axes.bar([place - 0.2], [100 * statistics.median(one["moved"])], 0.38, color=OURS)
        axes.bar([place + 0.2], [100 * one["ideal_moved"]], 0.38, color=QUIET)
    axes.set_xticks(range(len(records)), [one["event"] for one in records], fontsize=8)
    axes.set_ylabel("% of keys that moved; grey: ideal", fontsize=8)
    tidy(axes)


def recovery(axes: Any, records: list[dict[str, Any]]) -> None:
    """A dot for each repeat."""
    for place, one in enumerate(records):
        axes.plot(
            [place] * len(one["recovery_ms"]), one["recovery_ms"], "o", color=OURS, alpha=0.6, markersize=4
        )
    names = [one["event"].replace(" ", "\n") for one in records]
    axes.set_xticks(range(len(records)), names, fontsize=6)
    axes.set_ylabel("recovery, ms", fontsize=8)
    tidy(axes)


def tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", colors=INK, labelsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    arguments = parser.parse_args()
    print(draw(json.loads(arguments.result.read_text()), arguments.result.with_suffix(".png")))


if __name__ == "__main__":
    main()
