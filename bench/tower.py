"""Times one forward of every family's tower, ours, the reference's and vLLM's, in one run on one device.

    python -m bench.tower                                  # full-size towers in bfloat16 on cuda:0
    python -m bench.tower --quick                          # two cases, no compiling, no power
    python -m bench.tower --profile --families qwen3_vl    # with the kernels of each case, by group
    python -m bench.tower --variants graph graph_torch     # what other matrix products than torch's gain
    python -m bench.tower --quick --size tiny --device cpu # checks that the bench runs

Owns the run: its options, order, time budgets, records and table. variants.py builds what is timed,
measurement.py times it, charts.py draws the result. bench/README.md states the method.
"""

from __future__ import annotations

import argparse
import contextlib
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

from bench.checkpoints import random_checkpoint
from bench.engine_towers import PEERS, EngineTower, ranks
from bench.kernel_profile import line_of, profile_runs
from bench.measurement import (
    TimedRun,
    ceilings,
    host_time_us,
    interleaved_samples,
    options_of,
    sustained,
    synchronise,
)
from bench.references import load_reference, reason_of, register_fa3
from bench.variants import (
    CASES,
    GRAPH_TORCH,
    KNOWN_CASES,
    KNOWN_VARIANTS,
    QUICK_CASES,
    REFERENCES,
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
from encoder_service.checkpoints.synthetic import FAMILIES, SIZES
from encoder_service.towers import Tower, load_tower

CHECK_LIMIT = 1e-5
SETTLE_S = 0.4
# Of the timing of one variant of a case, and of a saturated variant alone.
VARIANT_BUDGET_S, POWER_S = 0.7, 1.0
WEIGHTS_SEED = 0
VARIANTS_HELP = f"default: all but {GRAPH_TORCH}; not compiled if quick"
COLUMNS = {
    "family": "{family}",
    "case": "{case}",
    "variant": "{variant}",
    "median ms": "{median_ms:.2f}",
    "useful TFLOP/s": "{useful_tflops:.2f}",
    "padding": "{padding_share:.1%}",
    "host us": "{host_us:.0f}",
    "runs": "{num_runs}",
}
GAIN_COLUMNS = {
    "family": "{family}",
    "case": "{case}",
    "graph ms": "{graph_ms:.3f}",
    "torch ms": "{torch_ms:.3f}",
    "torch / graph": "{ratio:.3f}",
}


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = options_of(__doc__, quick="two cases, ten runs each, nothing compiled, no power")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--cases", nargs="+", choices=KNOWN_CASES, help="default: all; two if quick")
    parser.add_argument("--variants", nargs="+", choices=KNOWN_VARIANTS, help=VARIANTS_HELP)
    parser.add_argument("--profile", action="store_true", help="kernels of each case's replay")
    arguments = parser.parse_args(line)
    if arguments.device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("no CUDA device here; --device cpu --size tiny --quick checks that the bench runs")
        torch.cuda.set_device(arguments.device)
    elif arguments.profile:
        parser.error("--profile reads the kernels of a CUDA device")
    arguments.dtype = "float32" if arguments.device.type == "cpu" else "bfloat16"
    quick = arguments.quick
    is_small = quick and arguments.device.type == "cpu"
    arguments.full_ladder = (
        not quick and arguments.cases is None and GRAPH_TORCH not in (arguments.variants or ())
    )
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
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device: torch.device = arguments.device
        self.dtype: torch.dtype = getattr(torch, arguments.dtype)
        self.no_reference: str | None = None
        if importlib.util.find_spec("transformers") is None:
            self.no_reference = "the reference package is not installed"
        self.no_vllm: str | None = None
        self.no_fa3 = register_fa3(self.device)
        # New values in each run, because a fast path must be correct for any input.
        settings = {"pixel_seed": secrets.randbelow(2**31)}
        parts: dict[str, Any] = {name: [] for name in ("checks", "captures", "accuracy", "power", "profile")}
        super().__init__("tower", arguments, settings=settings, parts=parts)

    def main(self) -> None:
        self.result["ceilings"] = ceilings(self.device, quick=self.arguments.quick)
        with contextlib.ExitStack() as stack:
            if {*PEERS} & {*self.arguments.variants}:
                try:
                    stack.enter_context(ranks(self.device))
                except Exception as error:  # a peer must not stop the other measurements
                    self.no_vllm = reason_of(error)
            for number, family in enumerate(self.arguments.families):
                self._run_family(family, is_first=number == 0)
        if gains := gains_of(self.result["records"]):
            self.result["gains"] = gains
        self.finish()

    def _run_family(self, name: str, *, is_first: bool) -> None:
        arguments = self.arguments
        pending = [case for case in KNOWN_CASES if case in arguments.cases]
        places = {case: {"family": name, "case": case, "variant": None} for case in pending}
        if self.is_out_of_time(*places.values()):
            return
        with (
            self.console.status(f"{name}: loading, checking, capturing"),
            random_checkpoint(name, arguments.size, WEIGHTS_SEED, self.device) as path,
        ):
            exact = load_tower(path, device=self.device, dtype=torch.float32).tower
            reference, engine = self._reference(path, name, exact), self._engine(path, name)
            family = Family(
                name,
                path,
                self.device,
                self.dtype,
                variants=arguments.variants,
                cases=pending,
                reference=reference,
                engine=engine,
                no_fa3=self.no_fa3,
                full_ladder=is_first and arguments.full_ladder,
            )
        self.result["captures"] += family.captures
        while places and not self.is_out_of_time(*places.values()):
            places.pop(case_name := next(iter(places)))
            with self.console.status(f"{name} {case_name}"):
                self._run_case(family, case_name, exact)
            release(self.device)
        del family, reference, engine, exact
        release(self.device)

    @torch.inference_mode()
    def _run_case(self, family: Family, name: str, exact: Tower) -> None:
        arguments, result = self.arguments, self.result
        case = family.case(name, result["settings"]["pixel_seed"])
        result["accuracy"] += [{"family": family.name} | one for one in accuracies(case, exact)]
        for variant, reason in case.left_out.items():
            self.leave_out(reason, family=family.name, case=name, variant=variant)
        samples = interleaved_samples(
            case.runs,
            self.device,
            warm_up=arguments.warm_up,
            repeats=arguments.repeats,
            budget_s=VARIANT_BUDGET_S * len(case.runs),
        )
        host_us = None
        if "graph" in case.runs:
            host_us = host_time_us(case.runs["graph"], self.device, repeats=arguments.repeats)
        result["records"] += records_of(family.name, case, samples, host_us)
        self.file.write()
        if self.device.type == "cuda" and name in SATURATED_CASES and not arguments.quick:
            result["power"] += [
                {"family": family.name, "case": name, "variant": variant}
                | sustained(run, self.device, settle_s=SETTLE_S, measure_s=POWER_S)
                for variant, run in case.runs.items()
            ]
        if arguments.profile and "graph" in case.runs:
            place: dict[str, Any] = {"family": family.name, "case": name, "variant": "graph"}
            try:
                profile = profile_runs(case.runs["graph"], self.device)
            except (RuntimeError, ValueError) as error:  # the machine does not permit tracing
                self.leave_out(f"profile: {reason_of(error)}", **place)
            else:
                result["profile"].append(place | profile)
                self.console.print(line_of(f"{family.name} {name} graph", profile))
        self.file.write()

    def _reference(self, path: Path, family: str, exact: Tower) -> Any:
        """The reference's tower, after the check, or why there is none."""
        if self.no_reference is not None:
            return self.no_reference
        place: dict[str, Any] = {"family": family, "case": None, "variant": None}
        try:
            self._check(path, family, exact)
            if {*REFERENCES} & {*self.arguments.variants}:
                return load_reference(path, self.device, self.dtype)
        except Exception as error:  # this release of the reference may not have the family
            self.leave_out(f"check: {reason_of(error)}", **place)
            return reason_of(error)
        return "not asked for"

    def _engine(self, path: Path, family: str) -> EngineTower | str:
        """vLLM's tower, or why there is none."""
        if self.no_vllm is not None or not {*PEERS} & {*self.arguments.variants}:
            return self.no_vllm or "not asked for"
        try:
            return EngineTower(family, path, device=self.device, dtype=self.dtype)
        except Exception as error:  # a peer must not stop the other measurements
            return reason_of(error)

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


def gains_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case with both, the time of ``graph`` with torch's matrix products alone over its own time."""
    medians = {(one["family"], one["case"], one["variant"]): one["median_ms"] for one in records}
    return [
        {"family": family, "case": case, "graph_ms": ms, "torch_ms": torch_ms, "ratio": torch_ms / ms}
        for (family, case, variant), ms in medians.items()
        if variant == "graph" and (torch_ms := medians.get((family, case, GRAPH_TORCH))) is not None
    ]


def release(device: torch.device) -> None:
    """Frees the memory of the previous tower or case before the next one is built."""
    gc.collect()
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.empty_cache()


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    run = Run(parse_arguments())
    run.main()
    result = run.result
    limits = result["ceilings"]
    run.print_table(
        f"Tower forward on {result['device']}, {result['settings']['size']} size,"
        f" {result['settings']['dtype']}",
        result["records"],
        COLUMNS,
        f"ceilings: product {limits['matmul_tflops']:.2f} TFLOP/s, copy {limits['copy_gb_per_s']:.1f} GB/s",
    )
    if "gains" in result:
        run.print_table("Selected matrix products against torch's alone", result["gains"], GAIN_COLUMNS)
    run.print_end()
    if any(check["relative_error"] >= CHECK_LIMIT for check in result["checks"]):
        sys.exit(f"a tower differs from the reference by {CHECK_LIMIT} or more: see the checks")


if __name__ == "__main__":
    main()
