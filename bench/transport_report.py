"""What a run of the transport bench shows: the table, the picture, what was left out.

    python bench/transport_report.py bench/results/transport-nvidia-h200-2026-11-20.json

Owns both forms, and reads the result alone: a picture can be drawn again from any file. Measuring is
transport.py's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chart import INK, NoMatplotlib, draw_from_command_line, tidy
from rich.table import Table
from transport_cases import MIB, PATHS

__all__ = ["NoMatplotlib", "draw", "left_out_lines", "table_of"]

STYLES = {
    "device_same_gpu": ("device lease, same GPU", "#7d2181", "*"),
    "device_nvlink": ("device lease, NVLink", "#d1570d", "o"),
    "host_shm": ("host shared memory", "#eda04e", "D"),
    "inline_uds": ("inline, unix socket", "#64788f", "^"),
    "inline_tcp": ("inline, TCP", "#33485f", "v"),
}
FLOORS = {
    "device_same_gpu": "copy within the GPU",
    "device_nvlink": "peer copy",
    "host_shm": "memcpy",
    "inline_uds": "raw gRPC, unix socket",
    "inline_tcp": "raw gRPC, TCP",
}
# What the project set itself for 32 MiB: milliseconds, or a multiple of the floor.
GOAL_BYTES = 32 * MIB
GOALS_MS = {"device_nvlink": 0.3, "host_shm": 12.0}
GOAL_RATIOS = {"inline_uds": 1.3, "inline_tcp": 1.3}
# Labels that fit above one another into the height of a picture.
MAX_LABELS = 36


def table_of(result: dict[str, Any]) -> Table:
    where = "own PID, IPC and mount namespaces" if result["isolated"] else "the same namespaces"
    table = Table(
        title=f"Delivery of rows on {result['device']}" + ("" if result["complete"] else " (cut short)"),
        caption=f"one call from its start to checked rows in the caller's buffer; processes in {where}",
    )
    table.add_column("path")
    numbers = ("MiB", "at once", "median ms", "p99 ms", "floor ms", "ratio", "GiB/s", "copy ms")
    for name in (*numbers, "socket ms", "gRPC ms", "calls"):
        table.add_column(name, justify="right")
    table.add_column("goal")
    order = {path: number for number, path in enumerate(PATHS)}
    for record in sorted(
        result["records"], key=lambda one: (one["concurrency"], order[one["path"]], one["bytes"])
    ):
        table.add_row(
            record["path"],
            f"{record['bytes'] / MIB:.3g}",
            str(record["concurrency"]),
            f"{record['median_ms']:.3f}",
            f"{record['p99_ms']:.3f}",
            f"{record['floor_ms']:.3f}",
            f"{record['ratio']:.2f}",
            f"{record['gib_per_s']:.2f}",
            *(
                f"{record[name]:.3f}" if name in record else ""
                for name in ("copy_ms", "socket_ms", "grpc_ms")
            ),
            str(record["num_calls"]),
            goal_text(record),
        )
    return table


def goal_text(record: dict[str, Any]) -> str:
    """The goal of a record that has one, and whether it is met."""
    if record["bytes"] != GOAL_BYTES or record["concurrency"] != 1:
        return ""
    path = record["path"]
    if path in GOALS_MS:
        return f"{GOALS_MS[path]:g} ms: {met(record['median_ms'] <= GOALS_MS[path])}"
    if path in GOAL_RATIOS:
        return f"{GOAL_RATIOS[path]:g} x floor: {met(record['ratio'] <= GOAL_RATIOS[path])}"
    return ""


def met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def left_out_lines(left_out: list[dict[str, Any]]) -> list[str]:
    """One line for each path and reason, with what is missing."""
    places: dict[tuple[str, str], list[str]] = {}
    for one in left_out:
        place = f"{one['bytes'] / MIB:.3g} MiB x {one['concurrency']}" if "bytes" in one else "all"
        places.setdefault((one["path"], one["reason"]), []).append(place)
    return [f"left out: {path}, {', '.join(names)}: {reason}" for (path, reason), names in places.items()]


def draw(result: dict[str, Any], path: Path) -> Path:
    """Writes the picture and returns its path. Raises NoMatplotlib, or ValueError for a result without
    records."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib(
            "pip install matplotlib, then python bench/transport_report.py RESULT.json"
        ) from error
    alone = [one for one in result["records"] if one["concurrency"] == 1]
    if not alone:
        raise ValueError(f"{len(result['records'])} records, none of one caller alone")
    font = {"font.size": 9, "axes.edgecolor": INK, "axes.titlesize": 10, "axes.titleweight": "bold"}
    with mpl.rc_context(font):
        figure = Figure(figsize=(15, 6.8), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
        times(left, alone)
        rates(right, result["records"])
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", frameon=False, fontsize=8.5, ncols=6)
        figure.suptitle(title_of(result), fontsize=11, x=0.01, ha="left")
        figure.savefig(path, dpi=110, facecolor="white")
    return path


def title_of(result: dict[str, Any]) -> str:
    parts = [
        f"Delivery of one item's rows on {result['device']}",
        "processes in namespaces of their own" if result["isolated"] else "processes in the same namespaces",
        f"grpcio {result['versions'].get('grpcio')}",
        str(result["date"])[:10],
        f"commit {str(result['commit'])[:12]}",
    ]
    if not result.get("complete", True):
        parts.append("run cut short")
    return ", ".join(parts)


def times(axes: Any, records: list[dict[str, Any]]) -> None:
    """Median of one call and its floor against bytes, both axes logarithmic; the goals at 32 MiB."""
    ends: dict[str, tuple[float, float]] = {}
    for path, (label, colour, marker) in STYLES.items():
        own = sorted((one for one in records if one["path"] == path), key=lambda one: one["bytes"])
        if not own:
            continue
        sizes = [one["bytes"] / MIB for one in own]
        style = {"color": colour, "markersize": 9 if marker == "*" else 5}
        axes.plot(
            sizes, [one["median_ms"] for one in own], marker=marker, linewidth=1.6, label=label, **style
        )
        axes.plot(
            sizes,
            [one["floor_ms"] for one in own],
            color=colour,
            linewidth=1,
            linestyle="--",
            label=f"floor: {FLOORS[path]}",
        )
        ends[path] = (sizes[-1], own[-1]["median_ms"])
    shown = {one["path"] for one in records}
    for path, goal_ms in GOALS_MS.items():
        if path in shown:
            axes.plot(
                [GOAL_BYTES / MIB],
                [goal_ms],
                color=STYLES[path][1],
                marker="_",
                markersize=22,
                markeredgewidth=2.5,
                linestyle="none",
                label=f"goal: {goal_ms:g} ms",
            )
    axes.set_xscale("log", base=2)
    logarithmic(axes)
    ticks = sorted({one["bytes"] / MIB for one in records})
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * 1.5)
    axes.set_xlabel("MiB of rows")
    axes.set_ylabel("ms, one caller")
    axes.set_title("Median time of a call, and its floor (dashed)", loc="left", pad=10)
    label_ends(axes, ends, "ms")
    tidy(axes)


def label_ends(axes: Any, ends: dict[str, tuple[float, float]], unit: str) -> None:
    """The last point's figure beside each line, lifted where labels would lie on one another."""
    low, high = axes.get_ylim()
    apart = (high / low) ** (1 / MAX_LABELS)
    free = 0.0
    for path, (x, value) in sorted(ends.items(), key=lambda end: end[1][1]):
        height = max(value, free)
        free = height * apart
        axes.annotate(
            f"{value:.3g} {unit}",
            (x, height),
            textcoords="offset points",
            xytext=(8, 0),
            va="center",
            fontsize=8,
            color=STYLES[path][1],
        )


def rates(axes: Any, records: list[dict[str, Any]]) -> None:
    """GiB/s of all callers together against their number, and of the floor, for the largest size that
    several ask for at once."""
    several = [one for one in records if one["concurrency"] > 1]
    if not several:
        axes.axis("off")
        return
    num_bytes = max(one["bytes"] for one in several)
    shown = [one for one in records if one["bytes"] == num_bytes]
    ends: dict[str, tuple[float, float]] = {}
    for path, (_, colour, marker) in STYLES.items():
        own = sorted((one for one in shown if one["path"] == path), key=lambda one: one["concurrency"])
        callers = [one["concurrency"] for one in own]
        style = {"color": colour, "markersize": 9 if marker == "*" else 5}
        axes.plot(callers, [one["gib_per_s"] for one in own], marker=marker, linewidth=1.6, **style)
        axes.plot(callers, [one["floor_gib_per_s"] for one in own], color=colour, linewidth=1, linestyle="--")
        if own:
            ends[path] = (callers[-1], own[-1]["gib_per_s"])
    axes.set_xscale("log", base=2)
    logarithmic(axes)
    counts = sorted({one["concurrency"] for one in shown})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * 1.6)
    axes.set_xlabel("callers at once")
    axes.set_ylabel("GiB/s of all callers")
    axes.set_title(f"Rate at {num_bytes / MIB:.3g} MiB (floor dashed)", loc="left", pad=10)
    label_ends(axes, ends, "GiB/s")
    tidy(axes)


def logarithmic(axes: Any) -> None:
    """A logarithmic height with figures at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def main() -> None:
    draw_from_command_line(draw, __doc__)


if __name__ == "__main__":
    main()
