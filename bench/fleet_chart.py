"""Draws a result of bench/fleet.py: the p99 and the failures of each event over time.

python -m bench.fleet_chart bench/results/fleet-cpu-x86-64-2026-11-25.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.charts import DEEP, GRID, INK, WARM, NoChart, logarithmic, tidy

COLUMNS = 3


def draw(result: dict[str, Any], path: Path) -> Path:
    """Draws the chart to ``path``. Raises NoChart."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoChart("matplotlib is not installed") from error
    records = [record for record in result["records"] if record.get("series")]
    if not records:
        raise NoChart(f"{len(result['records'])} records, none with a series")
    num_rows = -(-len(records) // COLUMNS)
    figure = Figure(figsize=(15, 2.9 * num_rows + 0.8), layout="constrained")
    panels = figure.subplots(num_rows, COLUMNS, squeeze=False).flatten()
    for axes, record in zip(panels, records, strict=False):
        draw_event(axes, record)
    for axes in panels[len(records) :]:
        axes.set_visible(False)
    calls, failed = (sum(one[name] for one in records) for name in ("num_calls", "num_failed"))
    figure.suptitle(
        f"Encoders behind Envoy, {calls:,} calls, {failed} failed: p99 in ms of the calls under way, "
        f"{result['device']}, {str(result['date'])[:10]}, commit {str(result['commit'])[:12]}",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=110, facecolor="white")
    return path


def draw_event(axes: Any, record: dict[str, Any]) -> None:
    series = record["series"]
    points = [(at_s, p99_ms) for at_s, p99_ms in zip(series["at_s"], series["p99_ms"], strict=True) if p99_ms]
    axes.plot(*zip(*points, strict=True), color=WARM, linewidth=1)
    failures = [(at_s, n) for at_s, n in zip(series["at_s"], series["num_failed"], strict=True) if n]
    if failures:
        top = max(p99_ms for _, p99_ms in points)
        axes.scatter(
            [at_s for at_s, _ in failures], [top] * len(failures), color=DEEP, marker="x", label="failed"
        )
        axes.legend(frameon=False, fontsize=8)
    for mark in record["marks"]:
        axes.axvline(mark["at_s"], color=GRID, linewidth=1.5, zorder=0)
        axes.text(mark["at_s"], 0.97, f" {mark['name']}", fontsize=7, color=INK, rotation=90, va="top",
                  transform=axes.get_xaxis_transform())  # fmt: skip
    logarithmic(axes)
    axes.set_title(
        f"{record['event']}: {record['num_calls']:,} calls, {record['num_failed']} failed", loc="left"
    )
    axes.set_xlabel("s")
    tidy(axes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    path: Path = parser.parse_args().result
    print(draw(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".png")))


if __name__ == "__main__":
    main()
