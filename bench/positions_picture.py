"""Draws the three axes of one mixed prompt, and which axis turns which pair of a head, for docs/positions.md.

    python bench/positions_picture.py [--out docs]

Owns the prompt that is drawn and the drawing. Positions and axes are the adapter's own: nothing is typed in.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from lm_adapter.mrope import MRopePositions, mrope_positions
from lm_adapter.placeholders import ExpandedPrompt, expand_placeholders, prompt_item
from lm_adapter.rotary import MRopeLayout
from lm_adapter.items import Modality

IMAGE, VIDEO, MERGE_SIZE = 900, 901, 2
IMAGE_GRID, CLIP_GRID = (1, 6, 10), (3, 4, 6)
NUM_GENERATED = 6
AXES = ("t", "h", "w")
COLOURS = ("#1b6ca8", "#d1661b", "#3c8d40")
MARKERS = ("o", "^", "s")
SHADES = {"text": "#ffffff", "image": "#fdeec9", "clip": "#dcebf7", "generated": "#eeeeee"}
LAYOUTS = {
    "Qwen3-VL, interleaved [24, 20, 20]": MRopeLayout((24, 20, 20), interleaved=True),
    "Qwen3.5, interleaved [11, 11, 10]": MRopeLayout((11, 11, 10), interleaved=True),
    "Qwen2.5-VL, chunked [16, 24, 24]": MRopeLayout((16, 24, 24), interleaved=False),
}


def example() -> tuple[ExpandedPrompt, MRopePositions]:
    """Text, an image of 3x5 visual tokens, text, a clip of three frames of 2x3 with two tokens of timestamp
    and a vision start before each, text."""
    ids = [1] * 4 + [IMAGE] + [2] * 3
    ids += [token for _ in range(CLIP_GRID[0]) for token in (3, 3, 4, VIDEO)]
    ids += [5] * 3
    items = [
        prompt_item(
            grid, placeholder_id=placeholder, merge_size=MERGE_SIZE, modality=modality, merges_time=False
        )
        for grid, placeholder, modality in (
            (IMAGE_GRID, IMAGE, Modality.IMAGE),
            (CLIP_GRID, VIDEO, Modality.VIDEO),
        )
    ]
    prompt = expand_placeholders(ids, items)
    return prompt, mrope_positions(prompt, [IMAGE_GRID, CLIP_GRID], merge_size=MERGE_SIZE)


def draw_axes(path: Path) -> None:
    prompt, positions = example()
    total = len(prompt) + NUM_GENERATED
    whole = positions.chunk(0, total)
    figure, (plot, cells) = plt.subplots(
        2, 1, figsize=(11, 8.6), height_ratios=(3, 1.35), layout="constrained"
    )
    for span, kind in zip(prompt.spans, ("image", "clip"), strict=True):
        for number, segment in enumerate(span.segments):
            plot.axvspan(segment.start - 0.5, segment.end - 0.5, color=SHADES[kind], zorder=0)
            name = "image 3x5" if kind == "image" else f"frame {number}, 2x3"
            plot.text(segment.start - 0.2, 42.4, name, fontsize=8.5, va="top", color="#555555")
    plot.axvspan(len(prompt) - 0.5, total - 0.5, color=SHADES["generated"], zorder=0)
    plot.text(len(prompt) - 0.2, 42.4, "generated", fontsize=8.5, va="top", color="#555555")
    for axis in range(3):
        plot.plot(
            np.arange(total) + (axis - 1) * 0.27, whole[axis], MARKERS[axis], color=COLOURS[axis],
            markersize=3.4, label=f"axis {AXES[axis]}", zorder=3 - axis,
        )  # fmt: skip
    plot.plot([0, 40], [0, 40], ":", color="#999999", linewidth=1, label="position = token index")
    last = total - 1
    plot.annotate(
        f"delta = {positions.delta}:\nposition = index + delta\non all axes from here on",
        xy=(len(prompt), positions.next_position), xytext=(len(prompt) - 7.6, 6.2), fontsize=9,
        arrowprops={"arrowstyle": "->", "color": "#444444"},
    )  # fmt: skip
    plot.set(
        xlabel="token index", ylabel="position", xlim=(-0.8, last + 0.8), ylim=(-1, 43.5),
        title="Text moves all three axes on; an item's rows spread over its grid; "
        "what follows starts behind the largest",
    )  # fmt: skip
    plot.legend(loc="center left", bbox_to_anchor=(0.01, 0.72), fontsize=9)
    plot.grid(color="#dddddd", linewidth=0.5)
    draw_cells(cells, prompt, positions)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_cells(plot: Any, prompt: ExpandedPrompt, positions: MRopePositions) -> None:
    """The image and each frame as the grid they are, with (t, h, w) in each cell."""
    plot.set_title("The same rows as the grid they are: (t, h, w) of each visual token", fontsize=10)
    left = 0.0
    for span, grid, kind in zip(prompt.spans, (IMAGE_GRID, CLIP_GRID), ("image", "clip"), strict=True):
        width = grid[2] // MERGE_SIZE
        for number, segment in enumerate(span.segments):
            for n in range(segment.length):
                row, column = divmod(n, width)
                corner = (left + column, -row - 1)
                plot.add_patch(plt.Rectangle(corner, 1, 1, facecolor=SHADES[kind], edgecolor="#888888"))
                numbers = ",".join(str(p) for p in positions.prompt[:, segment.start + n])
                plot.text(corner[0] + 0.5, corner[1] + 0.5, numbers, ha="center", va="center", fontsize=7.4)
            name = "image" if kind == "image" else f"frame {number}"
            plot.text(left, 0.12, name, fontsize=9, color="#555555")
            left += width + 0.8
    plot.set(xlim=(-0.1, left - 0.6), ylim=(-3.2, 0.6))
    plot.axis("off")


def draw_pairs(path: Path) -> None:
    figure, plots = plt.subplots(len(LAYOUTS), 1, figsize=(11, 3.2), layout="constrained")
    for plot, (name, layout) in zip(plots, LAYOUTS.items(), strict=True):
        for pair, axis in enumerate(layout.axes()):
            plot.add_patch(
                plt.Rectangle((pair, 0), 1, 1, facecolor=COLOURS[axis], edgecolor="white", linewidth=0.8)
            )
            plot.text(pair + 0.5, 0.5, AXES[axis], ha="center", va="center", fontsize=7.5, color="white")
        plot.set_title(f"{name}: {layout.rotary_dim // 2} pairs", fontsize=10, loc="left")
        plot.set(xlim=(0, 64), ylim=(0, 1))
        plot.axis("off")
    figure.suptitle("Which axis turns which pair of a head, fastest pair first", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "docs")
    out = parser.parse_args().out
    draw_axes(out / "positions-axes.png")
    draw_pairs(out / "positions-pairs.png")


if __name__ == "__main__":
    main()
