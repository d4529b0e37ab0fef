"""Times one forward of every family's tower, ours and the reference's, in one run on one device.

    python bench/tower.py                                  # full-size towers in bfloat16 on cuda:0
    python bench/tower.py --quick                          # two cases, no compiling, under two minutes
    python bench/tower.py --profile --families qwen3_vl    # with the kernels of each case, by group
    python bench/tower.py --quick --size tiny --device cpu # checks that the bench runs

Owns the run: its options, order, time budgets, records and table. variants.py builds what is timed,
measurement.py times it, charts.py draws the result. bench/README.md states the method.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import secrets
import statistics
import sys
from pathlib import Path
from typing import Any

import structlog
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from charts import draw_beside
from checkpoints import random_checkpoint
from kernel_profile import line_of, profile_runs
from measurement import (
    TimedRun,
    ceilings,
    host_time_us,
    interleaved_samples,
    options_of,
    sustained,
    synchronise,
)
from references import load_reference, reason_of, register_fa3
from variants import (
    CASES,
    KNOWN_CASES,
    QUICK_CASES,
    RUN_ORDER,
    SATURATED_CASES,
    SMALL_CASE,
    VARIANTS,
    Case,
    Family,
    accuracies,
    accuracy,
    grids_of,
    num_patches_of,
    random_inputs,
)

from encoder_service.towers import Tower, load_tower
from encoder_service.towers.synthetic import FAMILIES, SIZES

CHECK_LIMIT = 1e-5
SETTLE_S = 0.4


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = options_of(__doc__, quick="two cases, ten runs each, nothing compiled")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: bfloat16, float32 on a CPU"
    )
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--cases", nargs="+", choices=KNOWN_CASES, help="default: all; two if quick")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="default: all; not compiled if quick")
    parser.add_argument("--profile", action="store_true", help="kernels of each case's replay")
    parser.add_argument("--variant-budget-s", type=float, default=0.7, help="timing of a case, a variant")
    parser.add_argument("--power-s", type=float, default=1.0, help="each variant alone, saturated; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    arguments = parser.parse_args(line)
    if arguments.device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("no CUDA device here; --device cpu --size tiny --quick checks that the bench runs")
        torch.cuda.set_device(arguments.device)
    elif arguments.profile:
        parser.error("--profile reads the kernels of a CUDA device")
    arguments.dtype = arguments.dtype or ("float32" if arguments.device.type == "cpu" else "bfloat16")
    quick = arguments.quick
    is_small = quick and arguments.device.type == "cpu"
    arguments.cases = arguments.cases or list([SMALL_CASE] if is_small else QUICK_CASES if quick else CASES)
    arguments.variants = arguments.variants or [
        variant for variant in VARIANTS if not (quick and variant == "ref_compiled")
    ]
    arguments.time_limit_s = arguments.time_limit_s or (100.0 if quick else 440.0)
    arguments.warm_up, arguments.repeats = (1, 10) if quick else (3, 50)
    if is_small:
        arguments.repeats = 3
    return arguments


class Run(TimedRun):
    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self.console = console
        self.device: torch.device = arguments.device
        self.dtype: torch.dtype = getattr(torch, arguments.dtype)
        self.has_reference = importlib.util.find_spec("transformers") is not None
        self.no_fa3 = register_fa3(self.device)
        # New values in each run, because a fast path must be correct for any input.
        settings = {"pixel_seed": secrets.randbelow(2**31)}
        parts: dict[str, Any] = {name: [] for name in ("checks", "captures", "accuracy", "power", "profile")}
        super().__init__("tower", arguments, settings=settings, parts=parts)

    def main(self) -> None:
        self.result["ceilings"] = ceilings(self.device, quick=self.arguments.quick)
        for number, family in enumerate(self.arguments.families):
            self._run_family(family, is_first=number == 0)
        self.finish()

    def _run_family(self, name: str, *, is_first: bool) -> None:
        arguments = self.arguments
        pending = [case for case in RUN_ORDER if case in arguments.cases]
        places = {case: {"family": name, "case": case, "variant": None} for case in pending}
        if self.is_out_of_time(*places.values()):
            return
        with (
            self.console.status(f"{name}: loading, checking, capturing"),
            random_checkpoint(name, arguments.size, arguments.seed, self.device) as path,
        ):
            exact = load_tower(path, device=self.device, dtype=torch.float32).tower
            reference = None
            if self.has_reference:
                self._check(path, name, exact)
                reference = load_reference(path, self.device, self.dtype)
            family = Family(
                name,
                path,
                self.device,
                self.dtype,
                variants=arguments.variants,
                cases=pending,
                reference=reference,
                no_fa3=self.no_fa3,
                full_ladder=is_first and not arguments.quick,
            )
        self.result["captures"] += family.captures
        while places and not self.is_out_of_time(*places.values()):
            places.pop(case_name := next(iter(places)))
            with self.console.status(f"{name} {case_name}"):
                self._run_case(family, case_name, exact)
            release(self.device)
        del family, reference, exact
        release(self.device)

    @torch.inference_mode()
    def _run_case(self, family: Family, name: str, exact: Tower) -> None:
        arguments, result = self.arguments, self.result
        case = family.case(name, result["settings"]["pixel_seed"])
        for variant, reason in case.left_out.items():
            self.leave_out(reason, family=family.name, case=name, variant=variant)
        result["accuracy"] += [{"family": family.name} | one for one in accuracies(case, exact)]
        samples = interleaved_samples(
            case.runs,
            self.device,
            warm_up=arguments.warm_up,
            repeats=arguments.repeats,
            budget_s=arguments.variant_budget_s * len(case.runs),
        )
        host_us = None
        if "graph" in case.runs:
            host_us = host_time_us(case.runs["graph"], self.device, repeats=arguments.repeats)
        result["records"] += records_of(family.name, case, samples, host_us)
        self.file.write()
        if self.device.type == "cuda" and name in SATURATED_CASES and arguments.power_s > 0:
            result["power"] += [
                {"family": family.name, "case": name, "variant": variant}
                | sustained(run, self.device, settle_s=SETTLE_S, measure_s=arguments.power_s)
                for variant, run in case.runs.items()
            ]
        if arguments.profile and "graph" in case.runs:
            place = {"family": family.name, "case": name, "variant": "graph"}
            try:
                profile = profile_runs(case.runs["graph"], self.device)
            except (RuntimeError, ValueError) as error:  # the machine does not permit tracing
                self.leave_out(f"profile: {reason_of(error)}", **place)
            else:
                result["profile"].append(place | profile)
                self.console.print(line_of(f"{family.name} {name} graph", profile))
        self.file.write()

    @torch.inference_mode()
    def _check(self, path: Path, family: str, exact: Tower) -> None:
        """Compares the float32 tower with the reference in float32: largest absolute and relative error."""
        reference = load_reference(path, self.device, torch.float32)
        case = min(self.arguments.cases, key=num_patches_of)
        grids = grids_of(case, merges_time=exact.merges_time)
        inputs = random_inputs(exact, grids, self.result["settings"]["pixel_seed"])
        assert inputs.pixel_values is not None
        found, expected = exact(inputs), reference.rows(inputs.pixel_values, grids)
        check = {
            "family": family,
            "case": case,
            "against": "reference in float32",
            "max_abs_error": float((found - expected).abs().max()),
            "relative_error": accuracy(found, expected)["relative_error"],
        }
        self.result["checks"].append(check)
        self.console.print(
            f"{family} {case} float32 against the reference: max abs"
            f" {check['max_abs_error']:.1e}, relative {check['relative_error']:.1e}"
        )
        del reference
        release(self.device)


def records_of(
    family: str, case: Case, samples: dict[str, list[float]], host_us: float | None
) -> list[dict[str, Any]]:
    """One record per variant of a case. padding_share: padding as a share of the bucket's patches; only
    ``graph`` pads. host_us: host time of ``graph``."""
    records = []
    for variant, values in samples.items():
        median_ms = statistics.median(values)
        record = {
            "family": family,
            "case": case.name,
            "variant": variant,
            "median_ms": median_ms,
            "useful_tflops": case.flops / median_ms / 1e9,
            "padding_share": case.padding_shares.get(variant, 0.0),
            "num_runs": len(values),
            "min_ms": min(values),
            "max_ms": max(values),
            "num_patches": case.inputs.num_patches,
        }
        if variant == "graph" and host_us is not None:
            record["host_us"] = host_us
        if variant in case.notes:
            record["note"] = case.notes[variant]
        records.append(record)
    return records


def table_of(result: dict[str, Any]) -> Table:
    limits = result["ceilings"]
    table = Table(
        title=f"Tower forward on {result['device']}, {result['settings']['size']} size,"
        f" {result['settings']['dtype']}" + ("" if result["complete"] else " (cut short)"),
        caption=f"ceilings: product {limits['matmul_tflops']:.2f} TFLOP/s, copy"
        f" {limits['copy_gb_per_s']:.1f} GB/s",
    )
    for name in ("family", "case", "variant"):
        table.add_column(name)
    for name in ("median ms", "useful TFLOP/s", "of ceiling", "padding", "host us", "runs"):
        table.add_column(name, justify="right")
    places = {
        (family, case): (f, c) for f, family in enumerate(FAMILIES) for c, case in enumerate(KNOWN_CASES)
    }
    for record in sorted(result["records"], key=lambda one: places[one["family"], one["case"]]):
        table.add_row(
            record["family"],
            record["case"],
            record["variant"],
            f"{record['median_ms']:.2f}",
            f"{record['useful_tflops']:.2f}",
            f"{record['useful_tflops'] / limits['matmul_tflops']:.0%}",
            f"{record['padding_share']:.1%}" if record["padding_share"] else "",
            f"{record['host_us']:.0f}" if "host_us" in record else "",
            str(record["num_runs"]),
        )
    return table


def left_out_lines(left_out: list[dict[str, Any]]) -> list[str]:
    """One line per variant and reason, with the cases that lack the variant."""
    cases: dict[tuple[str, str], list[str]] = {}
    for one in left_out:
        place = (one["variant"] or "everything", one["reason"])
        cases.setdefault(place, []).append(f"{one['family']} {one['case']}")
    return [
        f"left out: {variant}, {len(names)} cases ({names[0]}{', ...' if len(names) > 1 else ''}): {reason}"
        for (variant, reason), names in cases.items()
    ]


def release(device: torch.device) -> None:
    """Frees the memory of the previous tower or case before the next one is built."""
    gc.collect()
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.empty_cache()


def main() -> None:
    arguments = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 132)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    run = Run(arguments, console)
    run.main()
    result = run.result
    console.print(table_of(result))
    for line in left_out_lines(result["left_out"]):
        console.print(line)
    console.print(draw_beside("tower", result, run.file.path))
    console.print(f"written to {run.file.path} after {result['seconds']:.0f} s")
    if any(check["relative_error"] >= CHECK_LIMIT for check in result["checks"]):
        sys.exit(f"a tower differs from the reference by {CHECK_LIMIT} or more: see the checks")


if __name__ == "__main__":
    main()
