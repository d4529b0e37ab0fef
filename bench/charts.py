"""Draws charts of bench results: towers, transports, serving, engines, autoscaling, fleets.

    python -m bench.charts bench/results/tower-nvidia-h200-2026-11-23.json

Owns the charts. It needs only the result file, so any result can be drawn again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

INK, GRID = "#333333", "#e4e4e4"
WARM, COOL, DEEP = "#d1570d", "#64788f", "#7d2181"
MIB = 1 << 20

# Families and variants in the order of the chart. The reference has cool colours, vLLM violet ones, our
# variants warm ones.
FAMILIES = {
    "qwen3_vl": "Qwen3-VL",
    "qwen3_5": "Qwen3.5",
    "kimi_k25": "Kimi-K2.5",
    "qwen4_exp": "Qwen3.8-Flash-Next",
    "qwen3_omni_moe": "Qwen3-Omni",
    "interns1_pro": "Intern-S1-Pro",
    "intern_s2_preview": "Intern-S2-Preview",
    "kimi_vl": "Kimi-VL",
    "kimi_k3": "Kimi-K3",
    "glm4v": "GLM-4.1V",
    "glm_ocr": "GLM-OCR",
    "glm5_next": "GLM-5.3-Flash",
    "ling_vl": "Ling-3.0-flash-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
}
CASE_ORDER = ("1x256", "1x448", "1x1024", "8x1024", "32x448", "mixed", "clip")
VARIANT_STYLES = {
    "ref_sdpa": ("reference, SDPA", "#c3c9d1", "v"),
    "ref_fa3": ("reference, FA3", "#98a4b3", "^"),
    "ref_fa3_graph": ("reference, FA3, exact graph", COOL, "<"),
    "ref_compiled": ("reference, FA3, compiled, graph", "#33485f", ">"),
    "vllm": ("vLLM's tower, eager", "#c9a5cd", "X"),
    "vllm_graphs": ("vLLM's tower, exact graph", DEEP, "d"),
    "plain": ("plain", "#f2cf9b", "s"),
    "fused": ("fused, eager", "#eda04e", "D"),
    "graph_torch": ("bucketed graph, torch's products", "#e07b3a", "P"),
    "graph": ("bucketed graph", WARM, "o"),
}
TALLEST = 6.0
PATH_STYLES = {
    "device_same_gpu": ("device, same GPU", DEEP, "*"),
    "device_nvlink": ("device, NVLink", WARM, "o"),
    "host_shm": ("host", "#eda04e", "D"),
    "inline_uds": ("inline, unix socket", COOL, "^"),
    "inline_tcp": ("inline, TCP", "#33485f", "v"),
}
STAGE_COLOURS = {
    "identify_ms": "#33485f",
    "admit_ms": COOL,
    "decode_ms": "#98a4b3",
    "resize_ms": "#c3c9d1",
    "queue_ms": "#f2cf9b",
    "tower_ms": WARM,
    "store_ms": DEEP,
    "delivery_ms": "#4a7a3f",
}
PEER_COLOURS = ("#98a4b3", WARM, "#33485f", DEEP, "#4a7a3f", "#eda04e", COOL, INK)
PEER_LABELS = {
    "tower": "its own tower, as it comes",
    "graphs": "its own tower, in its encoder graphs",
    "beside": "an encoder beside it, in time slices",
    "mps": "an encoder beside it, by MPS",
    "one thread": "its own tower, OMP_NUM_THREADS=1",
    "host": "an encoder beside it, rows by host memory",
    "apart": "an encoder on a GPU of its own",
    "apart, for three": "the same for two further servers too",
    "tp": "tensor parallel, its tower in its graphs",
    "split": "the engine's own encoder split",
}
AS_TEXT = " as text"


class NoChart(Exception):
    """No chart can be drawn: matplotlib is not installed, or the result has no records to draw."""


def draw_beside(bench: str, result: dict[str, Any], path: Path) -> str:
    """Draws the chart next to the result file. Returns a line that says where it is, or why there is none."""
    try:
        return f"chart: {draw(bench, result, path.with_suffix('.png'))}"
    except NoChart as error:
        return f"no chart: {error}"


def draw(bench: str, result: dict[str, Any], path: Path) -> Path:
    """Draws a chart to ``path``. bench: one of DRAWERS. Raises NoChart."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoChart("matplotlib is not installed") from error
    if bench not in DRAWERS:
        raise NoChart(f"{path.name}: no picture for {bench!r}, only for {', '.join(DRAWERS)}")
    if not result["records"]:
        raise NoChart(f"{path.name}: no records")
    font: Any = {"font.size": 9, "axes.edgecolor": INK, "axes.titlesize": 10, "axes.titleweight": "bold"}
    with mpl.rc_context(font):
        figure = Figure(figsize=(15, 7), layout="constrained")
        subject = DRAWERS[bench](figure, result)
        parts = [subject, str(result["date"])[:10], f"commit {str(result['commit'])[:12]}"]
        if not result.get("complete", True):
            parts.append("run cut short")
        figure.suptitle(", ".join(parts), fontsize=11, x=0.01, ha="left")
        figure.savefig(path, dpi=110, facecolor="white")
    return path


# -- towers ----------------------------------------------------------------------------------------------


def draw_towers(figure: Any, result: dict[str, Any]) -> str:
    """Time relative to the floor, and rate against patches. The floor of a case is the time of its useful
    work at the rate that the same run measured for one large matrix product."""
    records = [one for one in result["records"] if one["variant"] in VARIANT_STYLES]
    families = list(dict.fromkeys(one["family"] for one in records))
    if not families:
        raise NoChart(f"{len(result['records'])} records, none of {', '.join(VARIANT_STYLES)}")
    figure.set_size_inches(15, 3.3 * len(families) + 1)
    axes = figure.subplots(len(families), 2, width_ratios=(2.2, 1), squeeze=False)
    lines: dict[str, Any] = {}
    for (left, right), family in zip(axes, families, strict=True):
        own = [one for one in records if one["family"] == family]
        # A family may lack some: vLLM has graphs of a few.
        variants = [variant for variant in VARIANT_STYLES if any(one["variant"] == variant for one in own)]
        tower_times(left, own, variants, result["ceilings"]["matmul_tflops"], family)
        tower_rates(right, own, variants, result["ceilings"]["matmul_tflops"], family)
        handles, labels = right.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    names = [label for label, _, _ in VARIANT_STYLES.values() if label in lines]
    figure.legend([lines[name] for name in names], names, loc="outside lower left", frameon=False, ncols=7)
    settings = result["settings"]
    return f"One tower forward on {result['device']}, {settings['size']} size, {settings['dtype']}"


def tower_times(
    axes: Any, records: list[dict[str, Any]], variants: list[str], limit_tflops: float, family: str
) -> None:
    """Bars by case and variant. A bar that is cut off shows its ratio; ``graph`` shows its milliseconds."""
    cases = [case for case in CASE_ORDER if any(one["case"] == case for one in records)]
    ratios = {(one["case"], one["variant"]): limit_tflops / one["useful_tflops"] for one in records}
    medians = {(one["case"], one["variant"]): one["median_ms"] for one in records}
    top = min(TALLEST, max(ratios.values()) * 1.1)
    width = 0.86 / len(variants)
    upright = {"ha": "center", "va": "bottom", "fontsize": 7, "color": INK, "rotation": 90}
    for number, variant in enumerate(variants):
        for index, case in enumerate(cases):
            ratio = ratios.get((case, variant))
            if ratio is None:
                continue
            x = index - 0.43 + (number + 0.5) * width
            axes.bar(x, min(ratio, top), width * 0.92, color=VARIANT_STYLES[variant][1])
            if ratio > top:
                axes.text(x, top * 1.01, f"{ratio:.3g}", **upright)
            if variant == "graph":
                axes.text(x, min(ratio, top) + top * 0.015, f"{medians[case, variant]:.3g} ms", **upright)
    axes.axhline(1, color=INK, linewidth=1, linestyle="--")
    axes.set_ylim(0, top * 1.12)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel("time / floor")
    axes.set_title(
        f"{FAMILIES.get(family, family)}: time over useful work at {limit_tflops:.3g} TFLOP/s",
        loc="left",
        pad=14,
    )
    tidy(axes)


def tower_rates(
    axes: Any, records: list[dict[str, Any]], variants: list[str], limit_tflops: float, family: str
) -> None:
    for variant in variants:
        label, colour, marker = VARIANT_STYLES[variant]
        points = sorted(
            (one["num_patches"], one["useful_tflops"]) for one in records if one["variant"] == variant
        )
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, label=label)
    axes.axhline(limit_tflops, color=INK, linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, None)
    axes.set_xlabel("patches of the batch")
    axes.set_ylabel("useful TFLOP/s")
    axes.set_title(f"{FAMILIES.get(family, family)}: rate (one large product, dashed)", loc="left", pad=14)
    tidy(axes)


# -- transports ------------------------------------------------------------------------------------------


def draw_transports(figure: Any, result: dict[str, Any]) -> str:
    """The time of one call against bytes, its floor dashed."""
    # Older results also have records of several callers at once.
    records = [one for one in result["records"] if one.get("concurrency", 1) == 1]
    if not records:
        raise NoChart("no records of one caller")
    axes = figure.subplots()
    for path, (label, colour, marker) in PATH_STYLES.items():
        own = sorted((one for one in records if one["path"] == path), key=lambda one: one["bytes"])
        if own:
            sizes = [one["bytes"] / MIB for one in own]
            axes.plot(sizes, [one["median_ms"] for one in own], color=colour, marker=marker, label=label)
            axes.plot(sizes, [one["floor_ms"] for one in own], color=colour, linewidth=1, linestyle="--")
            axes.annotate(f" {own[-1]['median_ms']:.3g} ms", (sizes[-1], own[-1]["median_ms"]), color=colour)
    axes.set_xscale("log", base=2)
    logarithmic(axes)
    tidy(axes)
    axes.set_xlabel("MiB of rows")
    axes.set_ylabel("ms")
    axes.set_title("Median time of a call, and its floor (dashed)", loc="left", pad=10)
    axes.legend(frameon=False, loc="upper left")
    namespaces = "processes in namespaces of their own" if result["isolated"] else "shared namespaces"
    return f"Delivery of one item's rows on {result['device']}, {namespaces}"


# -- serving ---------------------------------------------------------------------------------------------


def draw_serving(figure: Any, result: dict[str, Any]) -> str:
    """Throughput relative to the tower alone, latency, stages and utilisation, for the first mix."""
    mix = next(iter(result["tower"]), "")
    records = sorted(
        (
            one
            for one in result["records"]
            if (one["mix"], one["server"]) == (mix, "service") and not one.get("bursty")
        ),
        key=lambda one: one["load"],
    )
    if not records:
        raise NoChart(f"{len(result['records'])} records, none of the service with {mix!r}")
    figure.set_size_inches(15, 9)
    (top_left, top_right), (low_left, low_right) = figure.subplots(2, 2)
    loads = [one["load"] for one in records]
    tower = result["tower"][mix]["patches_per_s"] / 1e3
    top_left.axhline(tower, color=INK, linewidth=1, linestyle="--", label="tower alone")
    top_left.plot([0, max(loads)], [0, max(loads) * tower], color=GRID, label="offered")
    encoded = [one["encoded_patches_per_s"] / 1e3 for one in records]
    top_left.plot(loads, encoded, color=WARM, marker="o", label="service")
    top_left.set_ylim(0, tower * 1.2)
    label(top_left, "Throughput", "thousand patches/s, encoded and delivered")
    answered = [one for one in records if one["latency_ms"]]
    for name, style in (("p50", "-"), ("p99", "--")):
        values = [one["latency_ms"][name] for one in answered]
        top_right.plot([one["load"] for one in answered], values, style, color=WARM, marker="o", label=name)
    logarithmic(top_right)
    label(top_right, "Latency of all requests, hits included", "ms from when a request was due")
    for name, colour, text in (
        ("device_busy_share", WARM, "device busy"),
        ("loop_share", DEEP, "event loop busy"),
        ("padding_share", COOL, "padding of the patches"),
    ):
        values = [(one.get(name) or 0.0) * 100 for one in records]
        low_left.plot(loads, values, color=colour, marker="o", label=text)
    low_left.set_ylim(0, 108)
    label(low_left, "What is busy", "%")
    serve_stages(low_right, [one for one in records if one["stages"]])
    settings = result["settings"]
    return f"Serving {mix} on {result['device']}, {settings['family']} {settings['size']}"


def serve_stages(axes: Any, records: list[dict[str, Any]]) -> None:
    """The median of each stage, stacked. The medians do not add up to the median of the total."""
    bottoms = [0.0] * len(records)
    for stage, colour in STAGE_COLOURS.items():
        values = [one["stages"][stage]["p50"] for one in records]
        axes.bar(
            range(len(records)), values, 0.7, bottom=bottoms, color=colour, label=stage.removesuffix("_ms")
        )
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    axes.set_xticks(range(len(records)), [f"{one['load']:g}" for one in records])
    label(axes, "Stages of images that were encoded", "ms, medians")


# -- engines -----------------------------------------------------------------------------------------------


def draw_goodput(figure: Any, result: dict[str, Any]) -> str:
    """The share of requests within each bound against their rate, of each mix and peer; bars reach from the
    least to the greatest round. Text in the place of a mix's images is a line in the panels of that mix."""
    rows = sorted((row for row in result.get("summary", ()) if row.get("rate")), key=lambda row: row["rate"])
    if not rows:
        raise NoChart("no mix with rates")
    mixes = list(dict.fromkeys(row["mix"] for row in rows if not row["mix"].endswith(AS_TEXT)))
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    lines = [
        (mix, peer, PEER_LABELS.get(peer, peer), {"color": colour, "marker": "o"})
        for mix in mixes
        for peer, colour in zip(peers, itertools.cycle(PEER_COLOURS), strict=False)
    ]
    text_style = {"color": INK, "marker": ".", "linestyle": ":"}
    lines += [(mix + AS_TEXT, peers[0], "text of as many tokens, no images", text_style) for mix in mixes]
    bounds = list(rows[0]["within"])
    figure.set_size_inches(2 + 4 * len(mixes), 1 + 3 * len(bounds))
    grid = figure.subplots(len(bounds), len(mixes), squeeze=False, sharex="col", sharey=True)
    named: dict[str, Any] = {}
    for row_of_axes, bound in zip(grid, bounds, strict=True):
        for axes, mix in zip(row_of_axes, mixes, strict=True):
            for shown, peer, text, style in lines:
                own = [row for row in rows if (row["mix"], row["peer"]) == (shown, peer)]
                if not own or shown.removesuffix(AS_TEXT) != mix:
                    continue
                shares = [[100 * share for share in row["within"][bound]] for row in own]
                middles = [middle for middle, _, _ in shares]
                ends = [[abs(one[0] - one[end]) for one in shares] for end in (1, 2)]
                named[text] = axes.errorbar([row["rate"] for row in own], middles, ends, **style)
            axes.axhline(90, color=INK, linewidth=1, linestyle="--")
            axes.set_ylim(0, 105)
            axes.set_title(f"{mix}: {bound} ms", loc="left")
            tidy(axes)
        row_of_axes[0].set_ylabel("% of the requests")
    for axes in grid[-1]:
        axes.set_xlabel("requests a second")
    figure.legend(named.values(), named, loc="outside lower left", frameon=False, ncols=2)
    settings = result["settings"]
    return (
        f"Requests within first token / between tokens: {settings['engine']}, {settings['gpus']} "
        f"{result['device']} for each peer"
    )


# -- fleets ----------------------------------------------------------------------------------------------


def draw_fleet(figure: Any, result: dict[str, Any]) -> str:
    """The p99 and the failures of each event over time."""
    records = [record for record in result["records"] if record.get("series")]
    if not records:
        raise NoChart(f"{len(result['records'])} records, none with a series")
    num_rows = -(-len(records) // 3)
    figure.set_size_inches(15, 2.9 * num_rows + 0.8)
    panels = figure.subplots(num_rows, 3, squeeze=False).flatten()
    for axes, record in zip(panels, records, strict=False):
        draw_event(axes, record)
    for axes in panels[len(records) :]:
        axes.set_visible(False)
    calls, failed = (sum(one[name] for one in records) for name in ("num_calls", "num_failed"))
    return f"Behind Envoy, {calls:,} calls, {failed} failed: p99 in ms of calls under way, {result['device']}"


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


# -- all pictures ----------------------------------------------------------------------------------------


def label(
    axes: Any, title: str, unit: str, below: str = "load: new images a second over the tower's own rate"
) -> None:
    axes.set_title(title, loc="left")
    axes.set_ylabel(unit)
    axes.set_xlabel(below)
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)


def tidy(axes: Any) -> None:
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def logarithmic(axes: Any) -> None:
    """Sets a logarithmic y axis with labels at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


DRAWERS: Mapping[str, Callable[[Any, dict[str, Any]], str]] = {
    "tower": draw_towers,
    "transport": draw_transports,
    "serve": draw_serving,
    "epd": draw_goodput,
    "fleet": draw_fleet,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, help="default: beside the result, as .png")
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text(encoding="utf-8"))
    bench = arguments.result.name.partition("-")[0]
    try:
        print(draw(bench, result, arguments.out or arguments.result.with_suffix(".png")))
    except NoChart as error:
        sys.exit(f"no chart: {error}")


if __name__ == "__main__":
    main()
