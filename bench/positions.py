"""Times M-RoPE over q and k and the splice of a prefill step, beside torch and a copy of the same bytes.

    python bench/positions.py                                            # cuda:0, about half a minute
    python bench/positions.py --quick                                    # two sizes of each shape
    TRITON_INTERPRET=1 python bench/positions.py --quick --device cpu    # does it run at all

Owns timing, the table and the result file; cases are ``position_cases``'s. On CUDA a sample is one replay of
a graph of ``launches`` launches over different inputs, which together exceed the L2 cache where 64 of them
can: no host time counts. ``whole_us`` is a step's splice as an engine calls it, with table, upload and
launch, one after the other. Variants take turns within a case. ``over_copy`` is the kernel's time over the
copy's, ``over_torch`` torch's over the kernel's.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measurement import (
    RESULTS,
    ResultFile,
    ceilings,
    describe_environment,
    interleaved_samples,
    synchronise,
)
from position_cases import ROTARY_SHAPES, SPLICE_SHAPES, Case, rotary_case, splice_case
from rich.console import Console
from rich.table import Table

NUM_TOKENS = (1, 16, 128, 512, 2048, 4096, 16384)
NUM_ROWS = (64, 1024, 4096, 16384)
QUICK_TOKENS = (1, 2048)
QUICK_ROWS = (64, 4096)
# On a CPU the kernels are interpreted, program by program.
CPU_TOKENS = (1, 8)
CPU_ROWS = (4,)
MIN_LAUNCHES = 16
MAX_ERROR = {"apply_mrope": 4e-3, "splice": 0.0}  # half a unit in the last place of bfloat16, and none


def main() -> int:
    arguments = parse_arguments()
    device: torch.device = arguments.device
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    kernel = importlib.util.find_spec("triton") is not None and (on_gpu or arguments.interpreted)
    begun = time.perf_counter()
    result: dict[str, Any] = {
        **describe_environment(device, arguments.commit),
        "settings": {
            "dtype": str(dtype).removeprefix("torch."),
            "min_launches": MIN_LAUNCHES,
            "replays": arguments.repeats,
            "budget_s": arguments.budget_s,
        },
        "complete": False,
        "ceilings": ceilings(device, quick=True) if on_gpu else {},
        "records": [],
    }
    file = ResultFile(arguments.out, "positions", result)
    cases = [("apply_mrope", name, size) for name in ROTARY_SHAPES for size in arguments.tokens]
    cases += [("splice", name, size) for name in SPLICE_SHAPES for size in arguments.rows]
    wrong = []
    for op, name, size in cases:
        if time.perf_counter() - begun > arguments.time_limit_s:
            break
        make = rotary_case if op == "apply_mrope" else splice_case
        record = measure(make(name, size, device, dtype, kernel), device, arguments)
        result["records"].append(record)
        file.write()
        if record["error"] > MAX_ERROR[op]:
            wrong.append(f"{op} {name} {size}: error {record['error']:.2e} above {MAX_ERROR[op]:.2e}")
    else:
        result["complete"] = True
    result["wall_s"] = time.perf_counter() - begun
    file.write()
    Console(width=150).print(table_of(result["records"]))
    print("\n".join([*wrong, str(file.path)]))
    return 1 if wrong else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--quick", action="store_true", help="two sizes of each shape, five samples")
    parser.add_argument("--tokens", type=int, nargs="+", help="of apply_mrope")
    parser.add_argument("--rows", type=int, nargs="+", help="visual tokens of splice")
    parser.add_argument("--budget-s", type=float, default=0.3, help="timing of one case")
    parser.add_argument("--time-limit-s", type=float, default=50.0, help="no case begins later")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args()
    on_gpu = arguments.device.type == "cuda"
    if on_gpu:
        if not torch.cuda.is_available():
            parser.error("no CUDA device here; --device cpu --quick shows that the bench runs")
        torch.cuda.set_device(arguments.device)
    arguments.tokens = arguments.tokens or (
        (QUICK_TOKENS if arguments.quick else NUM_TOKENS) if on_gpu else CPU_TOKENS
    )
    arguments.rows = arguments.rows or ((QUICK_ROWS if arguments.quick else NUM_ROWS) if on_gpu else CPU_ROWS)
    arguments.repeats = 5 if arguments.quick else 30
    arguments.interpreted = interpreted()
    return arguments


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter in this process."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def measure(case: Case, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    launches = max(MIN_LAUNCHES, case.num_sets) if on_gpu else 1
    error = case.error()
    runs = {
        name: captured(launch, launches) if on_gpu else (lambda launch=launch: launch(0))
        for name, launch in case.variants.items()
    }
    samples = interleaved_samples(
        runs, device, warm_up=2, repeats=arguments.repeats, budget_s=arguments.budget_s
    )
    micros = {name: [one * 1e3 / launches for one in values] for name, values in samples.items()}
    medians = {name: statistics.median(values) for name, values in micros.items()}
    record: dict[str, Any] = {
        "op": case.op,
        "shape": case.shape,
        "num_tokens": case.num_tokens,
        "num_bytes": case.num_bytes,
        "launches": launches,
        "num_sets": case.num_sets,
        "median_us": medians,
        "min_us": {name: min(values) for name, values in micros.items()},
        "num_samples": {name: len(values) for name, values in micros.items()},
        "error": error,
    }
    if "kernel" in medians:
        record["over_copy"] = medians["kernel"] / medians["copy"]
        record["over_torch"] = medians["torch"] / medians["kernel"]
        record["over_engine"] = medians["engine"] / medians["kernel"]
        record["gb_per_s"] = case.num_bytes / medians["kernel"] / 1e3
    if case.whole:
        whole = interleaved_samples(
            case.whole, device, warm_up=2, repeats=arguments.repeats, budget_s=arguments.budget_s
        )
        record["whole_us"] = {name: statistics.median(values) * 1e3 for name, values in whole.items()}
    return record


def captured(launch: Callable[[int], object], launches: int) -> Callable[[], None]:
    """The replay of a graph of so many launches."""
    for index in range(launches):
        launch(index)  # compiles, and reads every input once
    synchronise(torch.device("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            launch(index)
    return graph.replay


def table_of(records: list[dict[str, Any]]) -> Table:
    table = Table(title="microseconds of a launch")
    for name in ("op", "shape", "tokens"):
        table.add_column(name, no_wrap=True)
    for name in ("kernel", "torch", "engine", "copy", "of torch", "of copy", "GB/s", "whole", "error"):
        table.add_column(name, justify="right")
    for record in records:
        medians = record["median_us"]
        table.add_row(
            record["op"],
            record["shape"],
            str(record["num_tokens"]),
            *(
                f"{medians[name]:.2f}" if name in medians else ""
                for name in ("kernel", "torch", "engine", "copy")
            ),
            f"{record['over_torch']:.1f}x" if "over_torch" in record else "",
            f"{record['over_copy']:.2f}" if "over_copy" in record else "",
            f"{record['gb_per_s']:.0f}" if "gb_per_s" in record else "",
            f"{record['whole_us'].get('kernel', 0):.1f}" if record.get("whole_us") else "",
            f"{record['error']:.1e}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
