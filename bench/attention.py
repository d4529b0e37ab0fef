"""Times every attention backend on the towers' shapes and checks each against float32.

    python bench/attention.py                                # installed backends, exact and baked bounds
    python bench/attention.py --sweep --cases 1x4096 mixed   # tiles of the Triton kernel and of flash-attn 4
    python bench/attention.py --quick --device cpu           # does it run at all

Owns the cases, the tiles that are swept and the table. A run is the attention of a whole tower: one plan and
27 calls, replayed from a CUDA graph (called directly on a CPU), over copies of the input that together exceed
the cache. Useful work is 4 * S * S * d operations for each head of each sequence. ``baked`` has 64 sequence
slots and max_seqlen set to all patches: what a bucket's graph does.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measurement import RESULTS, describe_environment, interleaved_medians, write_result
from rich.console import Console
from rich.table import Table

from encoder_service.towers.attention import AttentionBackend, available_backends
from encoder_service.towers.attention.fa4 import Fa4Attention, Fa4Tile
from encoder_service.towers.attention.select import ShapeCase, WrongResult, bounds_of, describe, deviation

PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl")
NUM_BLOCKS = 27
NUM_HEADS = 16
CACHE_BYTES = 128 << 20
MAX_COPIES = 8
BAKED_SLOTS = 64
CASES: dict[str, tuple[int, ...]] = {
    "1x784": (784,),
    "32x784": (784,) * 32,
    "16x1024": (1024,) * 16,
    "1x4096": (4096,),
    "4x4096": (4096,) * 4,
    "1x16384": (16384,),
    "mixed": (784,) * 8 + (4096,) * 2 + (2304,) * 4 + (256,) * 16 + (1024,) * 6,
}
QUICK_CASES = {"2x256": (256, 256), "mixed": (100, 1, 300)}
# Queries and warps, keys, stages. A warp group of four warps multiplies 64 rows.
TRITON_ROWS = ((64, 4), (128, 4), (128, 8))
TRITON_KEYS = (32, 64, 128)
TRITON_STAGES = (2, 3, 4)
FA4_TILES = (
    *(Fa4Tile(192, keys) for keys in (96, 112, 128, 144, 160, 176)),
    *(Fa4Tile(128, keys) for keys in (128, 160, 192)),
    *(Fa4Tile(128, keys, probabilities_in_registers=True) for keys in (128, 160)),
    Fa4Tile(192, 160, overlap=False),
)


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    device, dtype = arguments.device, arguments.dtype
    known = QUICK_CASES if device.type == "cpu" else CASES
    result: dict[str, Any] = describe_environment(device, arguments.commit) | {
        "settings": {
            "num_heads": NUM_HEADS,
            "head_dim": arguments.head_dim,
            "dtype": str(dtype).removeprefix("torch."),
            "num_calls": NUM_BLOCKS,
            "repeats": arguments.repeats,
            "sweep": arguments.sweep,
            "cases": {name: list(known[name]) for name in arguments.cases or known},
        },
        "records": [],
    }
    result["versions"] |= {name: installed_version(name) for name in PACKAGES}
    backends = swept_backends(console) if arguments.sweep else available_backends(device)
    for name in arguments.cases or known:
        seqlens = known[name]
        total = sum(seqlens)
        exact = ShapeCase(name, seqlens, total, len(seqlens), max(seqlens))
        baked = ShapeCase(name, seqlens, total, max(BAKED_SLOTS, len(seqlens)), total)
        for bounds, case in {"exact": exact, "baked": baked}.items():
            if bounds == "baked" and arguments.sweep:
                continue
            with console.status(f"{name} {bounds}"):
                result["records"] += time_case(backends, case, bounds, arguments)
    console.print(table_of(result["records"]))
    for record in result["records"]:
        if record["excluded"]:
            console.print(f"{record['backend']} {record['case']} {record['bounds']}: {record['excluded']}")
    console.print(f"written to {write_result(arguments.out, 'attention', result)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--head-dim", type=int, default=72)
    parser.add_argument("--cases", nargs="+", choices=sorted({*CASES, *QUICK_CASES}))
    parser.add_argument("--sweep", action="store_true", help="tiles instead of backends, exact bounds only")
    parser.add_argument("--repeats", type=int, default=20, help="replays of each graph")
    parser.add_argument("--quick", action="store_true", help="three replays each")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    if arguments.device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("no CUDA device here; --device cpu --quick shows that the bench runs")
        torch.cuda.set_device(arguments.device)
    elif arguments.sweep:
        parser.error("--sweep compiles kernels and needs a CUDA device")
    known = QUICK_CASES if arguments.device.type == "cpu" else CASES
    for name in arguments.cases or ():
        if name not in known:
            parser.error(f"case {name} is not one of this device's: {', '.join(known)}")
    arguments.dtype = getattr(
        torch, arguments.dtype or ("float32" if arguments.device.type == "cpu" else "bfloat16")
    )
    if arguments.quick:
        arguments.repeats = 3
    return arguments


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def swept_backends(console: Console) -> list[AttentionBackend]:
    """The Triton kernel and flash-attn 4, once for each tile, and both with their defaults."""
    backends: list[AttentionBackend] = []
    try:
        from encoder_service.towers.attention.triton_varlen import TileConfig, TritonVarlenAttention
    except ImportError as error:
        console.print(f"no Triton kernel: {error}")
    else:
        backends.append(TritonVarlenAttention())
        backends += [
            TritonVarlenAttention(TileConfig(queries, keys, warps, stages))
            for queries, warps in TRITON_ROWS
            for keys in TRITON_KEYS
            for stages in TRITON_STAGES
        ]
    try:
        backends += [Fa4Attention(library_tile=True), *(Fa4Attention(tile=tile) for tile in FA4_TILES)]
    except (ImportError, ValueError) as error:
        console.print(f"no tiles of flash-attn 4: {error}")
    return backends


@torch.inference_mode()
def time_case(
    backends: Sequence[AttentionBackend], case: ShapeCase, bounds: str, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Records of every backend that serves the case, timed in turns, and of those that do not, with why."""
    device, dtype, head_dim = arguments.device, arguments.dtype, arguments.head_dim
    row_bytes = 3 * NUM_HEADS * head_dim * dtype.itemsize
    num_copies = min(MAX_COPIES, CACHE_BYTES // (case.num_patches * row_bytes) + 1)
    qkvs = [
        torch.randn(case.num_patches, 3, NUM_HEADS, head_dim, device=device, dtype=dtype)
        for _ in range(num_copies)
    ]
    records: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], object]] = {}
    for backend in backends:
        record = {"backend": backend.name, "case": case.name, "bounds": bounds, "excluded": None}
        records[backend.name] = record
        if bounds == "baked" and backend.static_lengths:
            record["excluded"] = "bakes the lengths themselves"
            continue
        try:
            record["relative_error"] = deviation(backend, case, qkvs[0])
            runs[backend.name] = runnable(backend, case, qkvs)
        except WrongResult as error:
            record["excluded"] = str(error)
        except Exception as error:
            record["excluded"] = describe(error)
    if not runs:
        return list(records.values())
    medians = interleaved_medians(runs, device, warm_up=2, repeats=arguments.repeats, budget_s=60)
    operations = sum(4 * length**2 * head_dim * NUM_HEADS for length in case.seqlens)
    for name, (milliseconds, num_runs) in medians.items():
        records[name] |= {
            "median_ms": milliseconds / NUM_BLOCKS,
            "useful_tflops": operations * NUM_BLOCKS / milliseconds / 1e9,
            "num_runs": num_runs,
        }
    return list(records.values())


def runnable(
    backend: AttentionBackend, case: ShapeCase, qkvs: Sequence[torch.Tensor]
) -> Callable[[], object]:
    """A tower's attention: a replay of its graph on CUDA, the calls themselves elsewhere."""
    bounds = bounds_of(case, qkvs[0].device)

    def run() -> None:
        plan = backend.plan(bounds, qkvs[0][:, 0].shape, qkvs[0].dtype)
        for index in range(NUM_BLOCKS):
            backend.attend(*qkvs[index % len(qkvs)].unbind(1), plan)

    if qkvs[0].device.type != "cuda":
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(_kept: object = run) -> None:
        """The graph reads bounds that only the run holds on to."""
        graph.replay()

    return replay


def table_of(records: Sequence[dict[str, Any]]) -> Table:
    """Useful TFLOP/s, a row for each backend and bounds, a column for each case; the worst error last."""
    cases = list(dict.fromkeys(record["case"] for record in records))
    cells = {
        (record["backend"], record["bounds"], record["case"]): record
        for record in records
        if "median_ms" in record
    }
    table = Table("backend", "bounds", *cases, "error", title="attention, useful TFLOP/s (us a call)")
    for backend, bounds in dict.fromkeys((key[0], key[1]) for key in cells):
        own = [cells.get((backend, bounds, case)) for case in cases]
        figures = [
            f"{record['useful_tflops']:.4g} ({record['median_ms'] * 1e3:.0f})" if record else "-"
            for record in own
        ]
        error = max(record["relative_error"] for record in own if record)
        table.add_row(backend, bounds, *figures, f"{error:.1e}")
    return table


if __name__ == "__main__":
    main()
