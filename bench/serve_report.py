"""What a run of the serving bench shows: tables, goals, the picture.

    python bench/serve_report.py bench/results/serve-nvidia-h200-2026-11-24.json

Owns the forms, and reads the result alone: a picture can be drawn again from any file. Measuring is
serve.py's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chart import GRID, INK, NoMatplotlib, draw_from_command_line, tidy
from rich.table import Table
from serve_figures import GOAL_TOWER_SHARE, STAGES
from transport_report import logarithmic

__all__ = ["NoMatplotlib", "draw", "lines_of", "tables_of"]

SERVICE, BASELINE = "service", "baseline"
OURS, THEIRS, LIMIT = "#d1570d", "#64788f", "#7d2181"
STAGE_COLOURS = ("#33485f", "#64788f", "#98a4b3", "#c3c9d1", "#f2cf9b", "#d1570d", "#7d2181", "#4a7a3f")
STACKED = tuple(stage for stage in STAGES if stage != "total_ms")


def tables_of(result: dict[str, Any]) -> list[Table]:
    loads = Table(
        title=f"Serving on {result['device']}, {result['settings']['size']} size,"
        f" rows by {result['settings']['transport']}" + ("" if result["complete"] else " (cut short)"),
        caption="load: new images a second over what the tower alone does; kp/s: thousand patches a second\n"
        "encoded and delivered; tower: over the tower's own; good: requests a second within the bound;\n"
        "p50, p90, p99: from when a request was due; beyond: p50 of a miss beyond decode and tower;\n"
        "cores, loop: CPU of the service, of its event loop",
    )
    for name in ("server", "mix"):
        loads.add_column(name)
    for name in (
        "load", "req/s", "img/s", "kp/s", "tower", "good", "p50 ms", "p90", "p99", "beyond",
        "busy", "pad", "cores", "loop", "hits", "fail",
    ):  # fmt: skip
        loads.add_column(name, justify="right")
    for record in result["records"]:
        loads.add_row(*cells_of(record))
    stages = Table(title="Stages of the images that were encoded, ms: p50 / p99")
    for name in ("server", "mix", "load", *(stage.removesuffix("_ms") for stage in STAGES)):
        stages.add_column(name, justify="right")
    for record in result["records"]:
        if record["stages"]:
            spent = [record["stages"][stage] for stage in STAGES]
            stages.add_row(
                record["server"],
                record["mix"],
                load_text(record),
                *(f"{one['p50']:.3g} / {one['p99']:.3g}" for one in spent),
            )
    return [loads, stages, summary_table(result)]


def summary_table(result: dict[str, Any]) -> Table:
    table = Table(
        title="Service, tower and plain loop",
        caption="best patches a second of one over the other's; beyond: p50 of a miss beyond decode and\n"
        "tower at the lightest load, as its caller sees it, without the queue, and by the service's clock",
    )
    shares = ("service / tower", "service / loop", "loop / tower")
    for name in ("mix", "tower img/s", *shares, "beyond ms", "unqueued", "service's"):
        table.add_column(name, justify="right")
    for one in result.get("summary", []):
        found = (one["service_over_tower"], one["service_over_baseline"], one["baseline_over_tower"])
        spent = [one[f"{name}_p50_ms"] for name in ("overhead", "overhead_unqueued", "service_overhead")]
        table.add_row(
            one["mix"],
            f"{one['tower_images_per_s']:.1f}",
            *("" if share is None else f"{share:.2f}" for share in found),
            *("" if value is None else f"{value:.2f}" for value in spent),
        )
    return table


def cells_of(record: dict[str, Any]) -> list[str]:
    latency, overhead = record["latency_ms"], record["overhead_ms"]
    hits = 1 - record["tiers"].get("miss", 0.0) if record["tiers"] else None
    return [
        record["server"],
        record["mix"],
        load_text(record),
        f"{record['offered_images_per_s']:.1f}",
        f"{record['images_per_s']:.1f}",
        f"{record['encoded_patches_per_s'] / 1e3:.1f}",
        f"{record['tower_share']:.1%}",
        f"{record['goodput_images_per_s']:.1f}",
        *(f"{latency[name]:.1f}" if latency else "" for name in ("p50", "p90", "p99")),
        f"{overhead['p50']:.2f}" if overhead else "",
        share_text(record.get("device_busy_share")),
        share_text(record.get("padding_share")),
        f"{record['cores']:.1f}" if "cores" in record else "",
        share_text(record.get("loop_share")),
        share_text(hits),
        str(sum(record["failures"].values()) or ""),
    ]


def load_text(record: dict[str, Any]) -> str:
    return f"{record['load']:g}" + (" bursty" if record["bursty"] else "")


def share_text(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def lines_of(result: dict[str, Any]) -> list[str]:
    """The tower alone, the goals, and what was left out."""
    lines = [
        f"tower alone, {mix}: {one['images_per_s']:.1f} images/s,"
        f" {one['patches_per_s'] / 1e3:.1f} thousand patches/s,"
        f" {one['images_per_batch']:.1f} images a batch, busy {one['busy_share']:.0%},"
        f" padding {one['padding_share']:.1%}"
        for mix, one in result["tower"].items()
    ]
    for goal in result["goals"]:
        verdict = {True: "met", False: "missed", None: "not judged: less was offered"}[goal["met"]]
        beside = f" ({goal['without_queue']:.2f} without the queue)" if "without_queue" in goal else ""
        lines.append(
            f"goal, {goal['mix']}: {goal['goal']} {goal['wanted']:g}, found {goal['found']:.3g}{beside}"
            f" at load {goal['load']:g}: {verdict}"
        )
    lines += [
        f"left out: {one['server']} {one['mix']} at {one['load']:g}: {one['reason']}"
        for one in result["left_out"]
    ]
    return lines


def draw(result: dict[str, Any], path: Path) -> Path:
    """Writes the picture and returns its path. Raises NoMatplotlib, or ValueError for a result without
    records of the service."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib("pip install matplotlib, then python bench/serve_report.py RESULT.json") from error
    mix = next(iter(result["tower"]), "")
    steady = ordered(result, mix, SERVICE, bursty=False)
    if not steady:
        raise ValueError(f"{len(result['records'])} records, none of the service under a steady load")
    font = {"font.size": 9, "axes.edgecolor": INK, "axes.titlesize": 10, "axes.titleweight": "bold"}
    with mpl.rc_context(font):
        figure = Figure(figsize=(15, 9), layout="constrained")
        (top_left, top_right), (low_left, low_right) = figure.subplots(2, 2)
        throughput(top_left, result, mix)
        latency(top_right, result, mix)
        shares(low_left, steady)
        stages(low_right, steady)
        figure.suptitle(title_of(result, mix), fontsize=11, x=0.01, ha="left")
        figure.savefig(path, dpi=110, facecolor="white")
    return path


def title_of(result: dict[str, Any], mix: str) -> str:
    settings = result["settings"]
    parts = [
        f"Serving {mix} photographs on {result['device']}",
        f"{settings['family']} {settings['size']}",
        f"rows by {settings['transport']}",
        f"{settings['clients']} clients, {settings['ingest_threads']} ingest threads",
        str(result["date"])[:10],
        f"commit {str(result['commit'])[:12]}",
    ]
    if not result.get("complete", True):
        parts.append("run cut short")
    return ", ".join(parts)


def ordered(result: dict[str, Any], mix: str, server: str, *, bursty: bool) -> list[dict[str, Any]]:
    """Records of one line of the picture, by load."""
    return sorted(
        (
            one
            for one in result["records"]
            if one["mix"] == mix and one["server"] == server and one["bursty"] == bursty
        ),
        key=lambda one: one["load"],
    )


def lines_drawn(result: dict[str, Any], mix: str) -> list[tuple[str, str, str, list[dict[str, Any]]]]:
    lines = [
        ("service", OURS, "o", ordered(result, mix, SERVICE, bursty=False)),
        ("service, bursty", LIMIT, "*", ordered(result, mix, SERVICE, bursty=True)),
        ("plain loop over the reference", THEIRS, "v", ordered(result, mix, BASELINE, bursty=False)),
    ]
    return [line for line in lines if line[3]]


def throughput(axes: Any, result: dict[str, Any], mix: str) -> None:
    tower = result["tower"][mix]["patches_per_s"] / 1e3
    highest = max(one["load"] for one in result["records"] if one["mix"] == mix)
    axes.axhline(tower, color=INK, linewidth=1, linestyle="--", label="tower alone")
    axes.axhline(tower * GOAL_TOWER_SHARE, color=INK, linewidth=1, linestyle=":", label="goal")
    axes.plot([0, highest], [0, highest * tower], color=GRID, linewidth=1.2, label="offered")
    for label, colour, marker, records in lines_drawn(result, mix):
        axes.plot(
            [one["load"] for one in records],
            [one["encoded_patches_per_s"] / 1e3 for one in records],
            color=colour,
            marker=marker,
            label=label,
        )
    axes.set_ylim(0, tower * 1.2)
    axes.set_ylabel("thousand patches/s, encoded and delivered")
    axes.set_title("Throughput", loc="left")
    axes.legend(frameon=False, loc="lower right")
    finish(axes)


def latency(axes: Any, result: dict[str, Any], mix: str) -> None:
    for label, colour, marker, records in lines_drawn(result, mix):
        drawn = [one for one in records if one["latency_ms"]]
        loads = [one["load"] for one in drawn]
        for name, style in (("p50", "-"), ("p99", "--")):
            values = [one["latency_ms"][name] for one in drawn]
            axes.plot(loads, values, style, color=colour, marker=marker, label=f"{label}, {name}")
    logarithmic(axes)
    axes.set_ylabel("ms from when a request was due")
    axes.set_title("Latency of all requests, hits among them", loc="left")
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    finish(axes)


def shares(axes: Any, records: list[dict[str, Any]]) -> None:
    loads = [one["load"] for one in records]
    for label, colour, name in (
        ("device busy", OURS, "device_busy_share"),
        ("event loop busy", LIMIT, "loop_share"),
        ("padding of the patches", THEIRS, "padding_share"),
    ):
        values = [(one.get(name) or 0.0) * 100 for one in records]
        axes.plot(loads, values, color=colour, marker="o", label=label)
    good = [100 * one["goodput_images_per_s"] / one["offered_images_per_s"] for one in records]
    bound_ms = records[0]["bound_ms"]
    axes.plot(loads, good, color=INK, marker="s", linestyle=":", label=f"requests within {bound_ms:g} ms")
    axes.set_ylim(0, 108)
    axes.set_ylabel("%")
    axes.set_title("What is busy, and what arrives in time", loc="left")
    axes.legend(frameon=False, loc="center left", fontsize=8)
    finish(axes)


def stages(axes: Any, records: list[dict[str, Any]]) -> None:
    """Median of each stage on top of one another; medians do not add up to the median of the whole."""
    drawn = [one for one in records if one["stages"]]
    bottoms = [0.0] * len(drawn)
    places = range(len(drawn))
    for stage, colour in zip(STACKED, STAGE_COLOURS, strict=True):
        values = [one["stages"][stage]["p50"] for one in drawn]
        axes.bar(places, values, 0.7, bottom=bottoms, color=colour, label=stage.removesuffix("_ms"))
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    axes.set_xticks(places, [f"{one['load']:g}" for one in drawn])
    axes.set_xlabel("load")
    axes.set_ylabel("ms, medians of the images encoded")
    axes.set_title("Stages", loc="left")
    axes.legend(frameon=False, loc="upper left", ncols=2, fontsize=8)
    tidy(axes)


def finish(axes: Any) -> None:
    axes.set_xlim(0, None)
    axes.set_xlabel("load: new images a second over what the tower alone does")
    tidy(axes)


def main() -> None:
    draw_from_command_line(draw, __doc__)


if __name__ == "__main__":
    main()
