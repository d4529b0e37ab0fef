"""Draws a result of the tower bench: time over the floor, TFLOP/s against patches, padding against load.

    python bench/chart.py bench/results/tower-nvidia-h200-2026-11-20.json

Owns the picture, and reads the result alone: charts can be drawn again from any file, older ones too. The
floor of a case is its useful work at the rate that the same run measured on one large product.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cases import KNOWN_CASES, num_patches_of

# Families, cases and variants in the order of the picture. Baselines are cool and grey, ours warm.
FAMILIES = {"qwen3_vl": "Qwen3-VL", "qwen3_5": "Qwen3.5", "kimi_k25": "Kimi-K2.5"}
STYLES = {
    "ref_sdpa": ("reference, SDPA", "#c3c9d1", "v"),
    "ref_fa3": ("reference, FA3", "#98a4b3", "^"),
    "ref_fa3_graph": ("reference, FA3, exact graph", "#64788f", "<"),
    "ref_compiled": ("reference, FA3, compiled, graph", "#33485f", ">"),
    "plain": ("plain", "#f2cf9b", "s"),
    "fused": ("fused, eager", "#eda04e", "D"),
    "graph": ("bucketed graph", "#d1570d", "o"),
    "fp8": ("bucketed graph, fp8", "#7d2181", "*"),
}
LABELLED = ("graph", "fp8")
TALLEST = 6.0
GRID = "#e4e4e4"
INK = "#333333"
WASTE_GOAL = 0.12
UPRIGHT: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 7, "color": INK, "rotation": 90}
BACKLOG_PLACE = 1.1


class NoMatplotlib(Exception):
    """The package that draws is not installed."""


def draw(result: dict[str, Any], path: Path) -> Path:
    """Writes the picture and returns its path. Raises NoMatplotlib, or ValueError for a result without
    records of the variants that are drawn."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib("pip install matplotlib, then python bench/chart.py RESULT.json") from error
    records = [one for one in result["records"] if one["variant"] in STYLES]
    if not records:
        raise ValueError(f"{len(result['records'])} records, none of {', '.join(STYLES)}")
    families = [family for family in FAMILIES if any(one["family"] == family for one in records)]
    variants = [variant for variant in STYLES if any(one["variant"] == variant for one in records)]
    font = {"font.size": 9, "axes.edgecolor": INK, "axes.titlesize": 10, "axes.titleweight": "bold"}
    with mpl.rc_context(font):
        height = 3.1 * len(families) + 3.6
        figure = Figure(figsize=(15, height), layout="constrained")
        rows = figure.add_gridspec(len(families) + 1, 2, width_ratios=(2.2, 1))
        for row, family in enumerate(families):
            own = [one for one in records if one["family"] == family]
            over_floor(figure.add_subplot(rows[row, 0]), own, variants, result, family)
            rate(figure.add_subplot(rows[row, 1]), own, variants, result, family)
        waste(figure.add_subplot(rows[-1, 0]), result.get("padding"))
        legend = figure.add_subplot(rows[-1, 1])
        legend.axis("off")
        handles, labels = figure.axes[1].get_legend_handles_labels()
        legend.legend(handles, labels, loc="upper left", frameon=False, fontsize=10)
        figure.suptitle(title_of(result), fontsize=11, x=0.01, ha="left")
        figure.savefig(path, dpi=110, facecolor="white")
    return path


def title_of(result: dict[str, Any]) -> str:
    settings, versions = result["settings"], result["versions"]
    parts = [
        f"One tower forward on {result['device']}",
        f"{settings['size']} size, {settings['dtype']}",
        f"torch {versions['torch']}",
        str(result["date"])[:10],
        f"commit {str(result['commit'])[:12]}",
    ]
    if not result.get("complete", True):
        parts.append("run cut short")
    return ", ".join(parts)


def floor_ms(record: dict[str, Any], result: dict[str, Any]) -> float:
    """Milliseconds of the record's useful work at the measured rate of one large product."""
    return float(record["median_ms"] * record["useful_tflops"] / result["ceilings"]["matmul_tflops"])


def tidy(axes: Any) -> None:
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def over_floor(
    axes: Any, records: list[dict[str, Any]], variants: list[str], result: dict[str, Any], family: str
) -> None:
    """Bars by case and variant; those above the picture carry their value. Ours carry milliseconds."""
    cases = [case for case in KNOWN_CASES if any(one["case"] == case for one in records)]
    by_place = {(one["case"], one["variant"]): one for one in records}
    width = 0.86 / len(variants)
    ratios = [one["median_ms"] / floor_ms(one, result) for one in records]
    # A linear scale that shows what ours leave; what towers above it is cut and says by how much.
    top = min(TALLEST, max(ratios) * 1.1)
    for number, variant in enumerate(variants):
        label, colour, _ = STYLES[variant]
        for place, case in enumerate(cases):
            record = by_place.get((case, variant))
            if record is None:
                continue
            ratio = record["median_ms"] / floor_ms(record, result)
            x = place - 0.43 + (number + 0.5) * width
            axes.bar(x, min(ratio, top), width * 0.92, color=colour, label=label)
            if ratio > top:
                axes.text(
                    x,
                    top * 1.01,
                    f"{ratio:.3g}",
                    ha="center",
                    va="bottom",
                    fontsize=6.5,
                    color=INK,
                    rotation=90,
                )
            if variant in LABELLED:
                axes.text(x, min(ratio, top) + top * 0.015, f"{record['median_ms']:.3g} ms", **UPRIGHT)
    axes.axhline(1, color=INK, linewidth=1, linestyle="--")
    axes.set_ylim(0, top * 1.12)
    axes.set_xlim(-0.55, len(cases) - 0.45)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel("time / floor")
    axes.set_title(
        f"{FAMILIES[family]}: time over the floor (useful work at"
        f" {result['ceilings']['matmul_tflops']:.3g} TFLOP/s, dashed)",
        loc="left",
        pad=14,
    )
    tidy(axes)


def rate(
    axes: Any, records: list[dict[str, Any]], variants: list[str], result: dict[str, Any], family: str
) -> None:
    """Useful TFLOP/s against patches, a point for each case, in order of patches."""
    limit = result["ceilings"]["matmul_tflops"]
    for variant in variants:
        label, colour, marker = STYLES[variant]
        points = sorted(
            (patches_of(one), one["useful_tflops"]) for one in records if one["variant"] == variant
        )
        axes.plot(
            [point[0] for point in points],
            [point[1] for point in points],
            color=colour,
            marker=marker,
            markersize=8 if marker == "*" else 5,
            linewidth=1.4,
            label=label,
        )
    axes.axhline(limit, color=INK, linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    ticks = sorted({patches_of(one) for one in records})
    # 25,088, 32,768 and 33,920 patches stand so close that only one of them gets a label.
    shown = [tick for index, tick in enumerate(ticks) if index == 0 or tick > 1.6 * ticks[index - 1]]
    axes.set_xticks(shown, [f"{tick:,}" for tick in shown])
    axes.minorticks_off()
    axes.set_ylim(0, None)
    axes.set_xlabel("patches of the batch")
    axes.set_ylabel("useful TFLOP/s")
    axes.set_title(f"{FAMILIES[family]}: rate (one large product, dashed)", loc="left", pad=14)
    tidy(axes)


def patches_of(record: dict[str, Any]) -> int:
    """Older results do not have them."""
    return int(record.get("num_patches") or num_patches_of(record["case"]))


def waste(axes: Any, padding: dict[str, Any] | None) -> None:
    """The part of the device's time that padding takes, by offered load."""
    axes.set_title("Padding: part of the device's time, by the cost model (goal dotted)", loc="left", pad=14)
    tidy(axes)
    if padding is None:
        axes.text(0.5, 0.5, "not in this result", ha="center", color=INK, transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    for policy, label, colour in (
        ("powers_of_two", "first come, sizes that are powers of two", "#98a4b3"),
        ("service", "the service's planner and ladder", "#d1570d"),
    ):
        records = [one for one in padding["records"] if one["policy"] == policy]
        points = [
            (BACKLOG_PLACE if one["load"] is None else one["load"], one["waste_share"] * 100)
            for one in records
        ]
        axes.plot(
            [point[0] for point in points],
            [point[1] for point in points],
            color=colour,
            marker="o",
            markersize=5,
            label=f"{label} ({padding['num_sizes'][policy]})",
        )
        if policy == "service":
            for point, one in zip(points, records, strict=True):
                axes.annotate(
                    f"{one['items_per_batch']:.2g}",
                    point,
                    textcoords="offset points",
                    xytext=(0, 7),
                    ha="center",
                    fontsize=7,
                    color=INK,
                )
    axes.axhline(WASTE_GOAL * 100, color=INK, linewidth=1, linestyle=":")
    axes.set_ylim(0, max(WASTE_GOAL * 100, *(one["waste_share"] * 100 for one in padding["records"])) * 1.3)
    axes.set_xlim(0, BACKLOG_PLACE + 0.05)
    shares = [one["load"] for one in records if one["load"] is not None]
    axes.set_xticks([*shares, BACKLOG_PLACE], [*(f"{share:g}" for share in shares), "backlog"])
    axes.set_xlabel("offered load (small numbers: images a batch)")
    axes.set_ylabel("padding, %")
    axes.legend(frameon=False, loc="upper left", ncols=2)


def main() -> None:
    draw_from_command_line(draw, __doc__)


def draw_from_command_line(draw: Callable[[dict[str, Any], Path], Path], description: str | None) -> None:
    """Draws a result file named on the command line: ``draw`` gets the result and where its picture goes, and
    says where it went. Ends the process with a message when nothing can be drawn."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, help="default: beside the result, as .png")
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text(encoding="utf-8"))
    try:
        print(draw(result, arguments.out or arguments.result.with_suffix(".png")))
    except (NoMatplotlib, ValueError) as error:
        sys.exit(f"no chart: {error}")


if __name__ == "__main__":
    main()
