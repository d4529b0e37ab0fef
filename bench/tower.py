"""Times one forward of every family's tower and checks it against the reference implementation.

    python bench/tower.py                                  # full-size towers in bfloat16 on cuda:0
    python bench/tower.py --quick --size tiny --device cpu # does it run at all

Owns the cases, the count of useful work and the table. How time is taken is measurement.py's; bench/README.md
states the method.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import secrets
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measurement import (
    RESULTS,
    ceilings,
    describe_environment,
    interleaved_medians,
    synchronise,
    write_result,
)
from rich.console import Console
from rich.table import Table

from encoder_service.engine.fast_path import build_graph_runner
from encoder_service.engine.graphs import GraphRunner
from encoder_service.towers import Tower, TowerInputs, load_tower
from encoder_service.towers.attention import AttentionBackend, available_backends
from encoder_service.towers.attention.per_shape import PerShapeAttention
from encoder_service.towers.config import MoonViTConfig, QwenVisionConfig
from encoder_service.towers.fused import FusedTower
from encoder_service.towers.fused_inputs import FusedInputs
from encoder_service.towers.synthetic import FAMILIES, SIZES, make_checkpoint
from encoder_service.types import Grid

# Patches a side of 448 and 1024 pixel images at 16 pixels a patch; Kimi's tower gets the same grids, so
# that the families compare.
SIDES = {256: 16, 448: 28, 512: 32, 768: 48, 1024: 64}
SIZES_OF_MIXED = ((8, 448), (2, 1024), (4, 768), (16, 256), (6, 512))
CASES = ("1x448", "1x1024", "8x1024", "32x448", "mixed", "clip")
QUICK_CASES = ("1x448", "1x1024")
CHECK_CASE = "1x448"
# Of the largest bucket: ``mixed`` has 33,920.
MAX_PATCHES = 36_864
CHECK_LIMIT = 1e-5


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    device, dtype = arguments.device, arguments.dtype
    has_reference = importlib.util.find_spec("transformers") is not None
    warm_up, repeats = (1, 3) if arguments.quick else (5, 50)
    result: dict[str, Any] = describe_environment(device, arguments.commit) | {
        "settings": {
            "size": arguments.size,
            "dtype": str(dtype).removeprefix("torch."),
            "seed": arguments.seed,
            "warm_up": warm_up,
            "repeats": repeats,
            "quick": arguments.quick,
        },
        "ceilings": ceilings(device, quick=arguments.quick),
        "checks": [],
        "captures": [],
        "records": [],
    }
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as folder, console.status(f"{family}: making the checkpoint"):
            path = Path(folder) / family
            make_checkpoint(path, family, arguments.size, arguments.seed)
            if has_reference:
                result["checks"].append(check_float32(path, family, device))
                console.print(check_line(result["checks"][-1]))
            tower = load_tower(path, device=device, dtype=dtype).tower
            reference = load_reference(path, device, dtype) if has_reference else None
            runner = None
            if device.type == "cuda":
                runner = build_graph_runner(
                    tower, attention="auto", deterministic=False, max_patches=MAX_PATCHES
                )
                result["captures"].append(describe_runner(family, runner))
        for case in QUICK_CASES if arguments.quick else CASES:
            with console.status(f"{family} {case}"):
                result["records"] += time_case(
                    tower,
                    reference,
                    runner,
                    family,
                    case,
                    warm_up,
                    repeats,
                    every_backend=arguments.every_backend,
                )
        del tower, reference, runner
        release(device)
    console.print(table_of(result))
    console.print(f"written to {write_result(arguments.out, 'tower', result)}")
    if any(check["relative_error"] >= CHECK_LIMIT for check in result["checks"]):
        sys.exit(f"a tower differs from the reference by {CHECK_LIMIT} or more: see the checks")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: bfloat16, float32 on a CPU"
    )
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--quick", action="store_true", help="two cases, three runs each")
    parser.add_argument("--every-backend", action="store_true", help="each attention backend in a graph too")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and pixels")
    parser.add_argument("--commit", help="the commit measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    if arguments.device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("no CUDA device here; --device cpu --size tiny --quick shows that the bench runs")
        torch.cuda.set_device(arguments.device)
    default_dtype = "float32" if arguments.device.type == "cpu" else "bfloat16"
    arguments.dtype = getattr(torch, arguments.dtype or default_dtype)
    return arguments


def load_reference(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """The reference implementation's tower, attention through SDPA."""
    from tests.parity.reference import ReferenceTower

    return ReferenceTower(path, device=device, dtype=dtype)


def grids_of(case: str, tower: Tower) -> list[Grid]:
    """The items of a case. ``clip`` is 16 times 448 pixels: one item of 16 frame pairs where attention stays
    within a frame, four items of four frames (the longest that the tower takes) where it spans the clip."""
    if case == "clip":
        return [Grid(4, 28, 28)] * 4 if tower.merges_time else [Grid(16, 28, 28)]
    if case == "mixed":
        return [Grid(1, SIDES[side], SIDES[side]) for count, side in SIZES_OF_MIXED for _ in range(count)]
    count, side = (int(part) for part in case.split("x"))
    return [Grid(1, SIDES[side], SIDES[side])] * count


def random_inputs(tower: Tower, grids: list[Grid], seed: int) -> TowerInputs:
    """A prepared batch on the tower's device with random float32 pixels."""
    generator = torch.Generator().manual_seed(seed)
    num_patches = sum(grid.num_patches for grid in grids)
    pixels = torch.randn(num_patches, tower.patch_dim, generator=generator) * 0.5
    return tower.prepare(grids).with_pixels(pixels).to(tower.device)


@torch.inference_mode()
def check_float32(path: Path, family: str, device: torch.device) -> dict[str, Any]:
    """Largest absolute and relative error of the tower in float32 against the reference in float32."""
    tower = load_tower(path, device=device, dtype=torch.float32).tower
    reference = load_reference(path, device, torch.float32)
    grids = grids_of(CHECK_CASE, tower)
    # Fresh values each time: a fast path has to be right on any input, not on one.
    seed = secrets.randbelow(2**31)
    inputs = random_inputs(tower, grids, seed)
    found, expected = tower(inputs).double(), reference.rows(inputs.pixel_values, grids).double()
    difference = found - expected
    check = {
        "family": family,
        "case": CHECK_CASE,
        "pixel_seed": seed,
        "against": "reference in float32",
        "max_abs_error": float(difference.abs().max()),
        "relative_error": float(difference.norm() / expected.norm()),
    }
    del tower, reference
    release(device)
    return check


@torch.inference_mode()
def time_case(
    tower: Tower,
    reference: Any,
    runner: GraphRunner | None,
    family: str,
    case: str,
    warm_up: int,
    repeats: int,
    *,
    every_backend: bool,
) -> list[dict[str, Any]]:
    """One record for each variant, all interleaved in one run.

    ``ref_sdpa``: the reference's eager tower with SDPA. ``plain``: this repository's readable tower, eager.
    ``fused``: the fused path, eager, with the first of the attention backends. ``graph``: what the service
    runs, bucketed graphs with attention chosen by measuring, host metadata and padding included. With
    every_backend also ``fused_<backend>`` and ``plain_graph``: CUDA graphs of the exact shape.
    """
    grids, device = grids_of(case, tower), tower.device
    inputs = random_inputs(tower, grids, seed=1)
    pixels = inputs.pixel_values
    assert pixels is not None
    flops = useful_flops(tower, inputs)
    variants: dict[str, Callable[[], object]] = {"plain": lambda: tower(inputs)}
    relative_errors: dict[str, float] = {}
    if device.type == "cuda":
        expected = tower(inputs)
        backends = cuda_backends(device)
        for number, backend in enumerate(backends if every_backend else backends[:1]):
            fused = FusedTower(tower, backend)  # type: ignore[arg-type]
            fused_inputs = fused.prepare(grids).with_pixels(pixels.to(tower.dtype)).to(device)
            if number == 0:
                relative_errors["fused"] = relative_error(fused(fused_inputs), expected)
                variants["fused"] = functools.partial(fused, fused_inputs)
            if every_backend:
                name = f"fused_{backend.name}"
                relative_errors[name] = relative_error(fused(fused_inputs), expected)
                variants[name] = captured(fused, fused_inputs)
        if every_backend:
            variants["plain_graph"] = captured(tower, inputs)
    padding_share = 0.0
    if runner is not None:
        host_inputs = runner.prepare(grids)
        on_device = [pixels.to(tower.dtype)]
        relative_errors["graph"] = relative_error(runner.run(host_inputs, on_device), expected)
        variants["graph"] = lambda: runner.run(runner.prepare(grids), on_device)
        bucket = runner.can_use(host_inputs)
        if bucket is not None:
            padding_share = 1 - host_inputs.num_patches / bucket.num_patches
    if reference is not None:
        variants["ref_sdpa"] = lambda: reference.rows(pixels, grids)
    medians = interleaved_medians(variants, device, warm_up=warm_up, repeats=repeats, budget_s=10)
    return [
        {
            "family": family,
            "case": case,
            "variant": variant,
            "median_ms": median_ms,
            "useful_tflops": flops / median_ms / 1e9,
            # Of the bucket's patches; the other variants run exact shapes.
            "padding_share": padding_share if variant == "graph" else 0.0,
            "num_runs": num_runs,
            "relative_error_to_plain": relative_errors.get(variant),
        }
        for variant, (median_ms, num_runs) in medians.items()
    ]


def describe_runner(family: str, runner: GraphRunner | None) -> dict[str, Any]:
    """How many graphs, what they cost, and the attention of each measured shape."""
    if runner is None:
        return {"family": family, "graphs": 0}
    attention: PerShapeAttention = runner._tower.attention  # type: ignore[attr-defined]
    return {
        "family": family,
        "graphs": len(runner.ladder),
        "captured_bytes": runner.captured_bytes,
        "attention": {f"{shape[0]}x{shape[1]}": backend.name for shape, backend in attention.choices.items()},
    }


def cuda_backends(device: torch.device) -> list[AttentionBackend]:
    """The installed backends whose launches do not depend on lengths known to the host."""
    return [backend for backend in available_backends(device) if not backend.static_lengths]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over norm of ``expected``."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def captured(tower: Tower, inputs: TowerInputs | FusedInputs) -> Callable[[], object]:
    """A replay of the tower's whole forward."""
    side_stream = torch.cuda.Stream(tower.device)
    side_stream.wait_stream(torch.cuda.current_stream(tower.device))
    with torch.cuda.stream(side_stream):
        for _ in range(2):
            tower(inputs)
    torch.cuda.current_stream(tower.device).wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tower(inputs)

    def replay() -> object:
        graph.replay()
        return tower, inputs  # whose memory the graph reads

    return replay


def useful_flops(tower: Tower, inputs: TowerInputs) -> int:
    """Multiplications and additions of the products and of attention; norms, activations and rotations are
    left out."""
    config: QwenVisionConfig | MoonViTConfig = tower.config  # type: ignore[assignment]
    width, num_patches = config.hidden_size, inputs.num_patches
    num_rows = (
        inputs.merge_index.shape[0] if inputs.merge_index is not None else num_patches
    ) // config.merge_size**2
    merged_width = width * config.merge_size**2
    products = num_patches * width * (4 * width + 2 * config.intermediate_size)
    attention = 2 * width * sum(length**2 for length in inputs.seqlens)
    merger = num_rows * merged_width * (merged_width + config.out_width)
    return 2 * (
        num_patches * tower.patch_dim * width
        + config.depth * (products + attention)
        + (1 + tower.num_deepstack_levels) * merger
    )


def release(device: torch.device) -> None:
    """Gives back what the last tower held before the next one is made."""
    gc.collect()
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.empty_cache()


def check_line(check: dict[str, Any]) -> str:
    return (
        f"{check['family']} {check['case']} float32 against the reference: max abs"
        f" {check['max_abs_error']:.1e}, relative {check['relative_error']:.1e}"
    )


def table_of(result: dict[str, Any]) -> Table:
    limits = result["ceilings"]
    table = Table(
        title=f"Tower forward on {result['device']}, {result['settings']['size']} size,"
        f" {result['settings']['dtype']}",
        caption=f"ceilings: product {limits['matmul_tflops']:.2f} TFLOP/s, copy"
        f" {limits['copy_gb_per_s']:.1f} GB/s",
    )
    for name in ("family", "case", "variant"):
        table.add_column(name)
    for name in ("median ms", "useful TFLOP/s", "of ceiling", "runs"):
        table.add_column(name, justify="right")
    for record in result["records"]:
        table.add_row(
            record["family"],
            record["case"],
            record["variant"],
            f"{record['median_ms']:.2f}",
            f"{record['useful_tflops']:.2f}",
            f"{record['useful_tflops'] / limits['matmul_tflops']:.0%}",
            str(record["num_runs"]),
        )
    return table


if __name__ == "__main__":
    main()
