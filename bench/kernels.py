"""Times each Triton kernel of the fused path on CUDA and checks it against plain torch.

    python bench/kernels.py --out kernels.json             # every kernel at 784, 4096 and 32768 patches
    python bench/kernels.py --warps 1 2 4 8                # the same with the row kernels' warps forced

Owns timing and table; arguments, bytes and references are kernel_cases.py's. A time is that of one
launch among many in one CUDA graph, replayed; launches take turns on copies of their inputs, together larger
than the L2 cache where ``--cold`` asks for it. By default they are not: between two products of a small
bucket the tower's activations are in L2 as well. GB/s counts each input and output once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernel_cases import Case, cases
from measurement import ceilings, describe_environment
from rich.console import Console
from rich.table import Table

from encoder_service.towers.kernels import tiles

NUM_PATCHES = (784, 4096, 32768)
L2_BYTES = 60 << 20
LAUNCHES, REPLAYS = 16, 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    parser.add_argument("--patches", type=int, nargs="+", default=NUM_PATCHES, help="multiples of 4")
    parser.add_argument("--warps", type=int, nargs="+", default=[0], help="warps of row kernels; 0: as built")
    parser.add_argument("--cold", action="store_true", help="inputs of a graph together exceed the L2 cache")
    parser.add_argument("--commit", help="recorded where the sources are no checkout")
    arguments = parser.parse_args()
    device: torch.device = arguments.device
    torch.cuda.set_device(device)
    ceiling = ceilings(device, quick=True)
    records = []
    table = Table("kernel", "patches", "warps", "us", "GB/s", "of copy", "error")
    for num_patches in arguments.patches:
        for case in cases(num_patches, device):
            for warps in arguments.warps:
                record = measure(case, num_patches, warps, cold=arguments.cold)
                record["of_copy"] = record["gb_per_s"] / ceiling["copy_gb_per_s"]
                records.append(record)
                table.add_row(
                    case.name,
                    str(num_patches),
                    str(warps or "built"),
                    f"{record['median_us']:.1f}",
                    f"{record['gb_per_s']:.0f}",
                    f"{record['of_copy']:.0%}",
                    f"{record['error']:.1e}",
                )
    Console(width=100).print(table)
    if arguments.out:
        settings = {"launches": LAUNCHES, "replays": REPLAYS, "cold": arguments.cold, "dtype": "bfloat16"}
        environment = describe_environment(device, arguments.commit)
        result = {**environment, "settings": settings, "ceilings": ceiling, "records": records}
        with arguments.out.open("x", encoding="utf-8") as file:
            json.dump(result, file, indent=2)


def measure(case: Case, num_patches: int, warps: int, *, cold: bool) -> dict[str, Any]:
    """One record: median microseconds of a launch, GB/s, largest error over the largest reference value."""
    forced = {"row_warps": lambda _: warps} if warps else {}
    with replaced(forced):
        inputs = case.inputs()
        expected = case.reference(*(x.float() if x.is_floating_point() else x for x in inputs))
        actual = case.run(*inputs).float()
        error = ((actual - expected).abs().max() / expected.abs().max()).item()
        num_copies = max(1, -(-2 * L2_BYTES // case.num_bytes)) if cold else 1
        copies = [case.inputs() for _ in range(num_copies)]
        median_us = graph_median_us(
            lambda index: case.run(*copies[index % num_copies]), max(LAUNCHES, num_copies)
        )
    return {
        "kernel": case.name,
        "num_patches": num_patches,
        "warps": warps or None,
        "median_us": median_us,
        "gb_per_s": case.num_bytes / median_us / 1e3,
        "error": error,
    }


class replaced:  # noqa: N801 - a context manager
    """Names of the kernels' modules with other values for a while."""

    def __init__(self, values: dict[str, Any]) -> None:
        modules = (m for name, m in sys.modules.items() if name.startswith(tiles.__package__ or ""))
        self._old = [(m, name, getattr(m, name)) for m in modules for name in values if hasattr(m, name)]
        self._values = values

    def __enter__(self) -> None:
        for module, name, _ in self._old:
            setattr(module, name, self._values[name])

    def __exit__(self, *_: object) -> None:
        for module, name, value in self._old:
            setattr(module, name, value)


def graph_median_us(launch: Callable[[int], object], num_launches: int) -> float:
    """Microseconds of one launch: median over replays of a graph of many, so that no host time counts."""
    for index in range(num_launches):
        launch(index)  # compiles, and reads every copy once
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_launches):
            launch(index)
    times = []
    for _ in range(REPLAYS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / num_launches)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
