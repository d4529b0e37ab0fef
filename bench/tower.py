"""Times one forward of every family's tower, ours and the baselines, in one run on one device.

    python bench/tower.py                                  # full-size towers in bfloat16 on cuda:0
    python bench/tower.py --quick                          # two cases, no compiling, under two minutes
    python bench/tower.py --profile --families qwen3_vl    # with a table of kernels for each case
    python bench/tower.py --quick --size tiny --device cpu # does it run at all

Owns the run: its order, its budgets, the result file and the table. What is timed is variants.py's and
baselines.py's, on the batches of cases.py; how time is taken is measurement.py's; bench/README.md states the
method.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import structlog
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import baselines
import chart
from cases import RUN_ORDER, SATURATED_CASES, grids_of, num_patches_of, random_inputs
from checkpoints import random_checkpoint
from kernel_profile import profile_runs, profile_table
from measurement import (
    ResultFile,
    ceilings,
    describe_environment,
    host_time_us,
    interleaved_samples,
    synchronise,
)
from options import parse_arguments
from padding_load import padding_under_load
from power import ManagedDevice, NoPowerReading, managed_device, sustained
from report import left_out_lines, records_of, table_of
from rich.console import Console
from variants import CompileBudget, Family, accuracies, accuracy

from encoder_service.config import Settings
from encoder_service.towers import Tower, load_tower

CHECK_LIMIT = 1e-5
SETTLE_S = 0.4


class Run:
    """One run of the bench: what was asked for, and the result as it grows. Each case is written at once, so
    that a run that is cut short leaves a valid file, marked by ``complete`` being false."""

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self.arguments = arguments
        self.console = console
        self.device: torch.device = arguments.device
        self.begun_s = time.perf_counter()
        self.has_reference = importlib.util.find_spec("transformers") is not None
        self.no_fa3 = self._register_fa3()
        self.compile_left_s: float = arguments.compile_budget_s
        environment = describe_environment(self.device, arguments.commit)
        settings = {
            name: value
            for name, value in vars(arguments).items()
            if name not in ("device", "out", "commit", "dtype", "profile")
        }
        settings |= {
            "dtype": str(arguments.dtype).removeprefix("torch."),
            # Fresh values each time: a fast path has to be right on any input, not on one.
            "pixel_seed": secrets.randbelow(2**31),
        }
        self.result: dict[str, Any] = environment | {
            "complete": False,
            "settings": settings,
            "ceilings": ceilings(self.device, quick=arguments.quick),
            "checks": [],
            "captures": [],
            "records": [],
            "accuracy": [],
            "compiled": [],
            "power": {"reason": None, "limit_w": None, "records": []},
            "padding": None,
            "left_out": [],
        }
        self.managed = self._managed_device()
        self.file = ResultFile(arguments.out, "tower", self.result)
        self.profile: dict[str, Any] | None = None
        self.profile_file: ResultFile | None = None
        if arguments.profile:
            self.profile = environment | {"settings": settings, "records": []}
            self.profile_file = ResultFile(arguments.out, "profile", self.profile)
            self.result["profile"] = self.profile_file.path.name

    def main(self) -> None:
        for number, family in enumerate(self.arguments.families):
            self._run_family(family, is_first=number == 0)
        self.result["complete"] = not any(one["cut_short"] for one in self.result["left_out"])
        self.result["seconds"] = time.perf_counter() - self.begun_s
        self.file.write()

    def _run_family(self, name: str, *, is_first: bool) -> None:
        arguments = self.arguments
        pending = [case for case in RUN_ORDER if case in arguments.cases]
        if self._out_of_time(name, pending):
            return
        with self.console.status(f"{name}: loading, checking, capturing"):
            families_left = len(arguments.families) - arguments.families.index(name)
            with random_checkpoint(name, arguments.size, arguments.seed, self.device) as path:
                exact = load_tower(path, device=self.device, dtype=torch.float32).tower
                reference = None
                if self.has_reference:
                    self._check(path, name, exact)
                    reference = load_reference(path, self.device, arguments.dtype)
                family = Family(
                    name,
                    path,
                    self.device,
                    arguments.dtype,
                    variants=arguments.variants,
                    cases=pending,
                    reference=reference,
                    no_fa3=self.no_fa3,
                    full_ladder=arguments.ladder == "all" or (arguments.ladder == "first" and is_first),
                    compile_budget=CompileBudget(self.compile_left_s / families_left),
                )
        given_s = family.compile_budget.left_s
        self.result["captures"] += family.captures
        if self.result["padding"] is None:
            self.result["padding"] = self._padding(family)
        while pending and not self._out_of_time(name, pending):
            case_name = pending.pop(0)
            with self.console.status(f"{name} {case_name}"):
                self._run_case(family, case_name, exact)
            release(self.device)
        self.compile_left_s -= given_s - family.compile_budget.left_s
        del family, reference, exact
        release(self.device)

    @torch.inference_mode()
    def _run_case(self, family: Family, name: str, exact: Tower) -> None:
        arguments, result = self.arguments, self.result
        case = family.case(name, result["settings"]["pixel_seed"], every_backend=arguments.every_backend)
        result["left_out"] += [
            {"family": family.name, "case": name, "variant": variant, "reason": reason, "cut_short": False}
            for variant, reason in case.left_out.items()
        ]
        result["accuracy"] += [{"family": family.name} | one for one in accuracies(case, exact)]
        samples = interleaved_samples(
            case.runs,
            self.device,
            warm_up=arguments.warm_up,
            repeats=arguments.repeats,
            budget_s=arguments.variant_budget_s * len(case.runs),
        )
        host_us = {
            variant: host_time_us(case.runs[variant], self.device, repeats=arguments.repeats)
            for variant in family.runners
        }
        result["records"] += records_of(family.name, case, samples, host_us)
        result["compiled"] += [
            {"family": family.name, "case": name, "seconds": seconds} for seconds in case.compile_s.values()
        ]
        self.file.write()
        if self.managed is not None and name in SATURATED_CASES and arguments.power_s > 0:
            result["power"]["records"] += [
                {"family": family.name, "case": name, "variant": variant}
                | sustained(run, self.device, self.managed, settle_s=SETTLE_S, measure_s=arguments.power_s)
                for variant, run in case.runs.items()
            ]
        if self.profile is not None and self.profile_file is not None:
            for variant in family.runners:
                place = {"family": family.name, "case": name, "variant": variant}
                try:
                    profile = profile_runs(case.runs[variant], self.device)
                except (RuntimeError, ValueError) as error:  # a machine that lets nobody trace its kernels
                    self.profile["records"].append(place | {"reason": baselines.reason_of(error)})
                else:
                    self.profile["records"].append(place | profile)
                    self.console.print(profile_table(f"{family.name} {name} {variant}", profile))
            self.profile_file.write()
        self.file.write()

    @torch.inference_mode()
    def _check(self, path: Path, family: str, exact: Tower) -> None:
        """Largest absolute and relative error of the float32 tower against the reference in float32."""
        reference = load_reference(path, self.device, torch.float32)
        case = min(self.arguments.cases, key=num_patches_of)
        grids = grids_of(case, merges_time=exact.merges_time)
        inputs = random_inputs(exact, grids, self.result["settings"]["pixel_seed"])
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

    def _padding(self, family: Family) -> dict[str, Any]:
        """Of a service with the default limits, by the cost model that the graphs were given."""
        fields = Settings.model_fields
        runner = family.runners.get("graph")
        costs = {} if runner is None else {"cost": runner.ladder.cost}
        return padding_under_load(
            max_patches=int(fields["max_patches_per_batch"].default),
            max_items=int(fields["max_items_per_batch"].default),
            seed=self.arguments.seed,
            **costs,
        )

    def _out_of_time(self, family: str, pending: list[str]) -> bool:
        """Whether the time limit is over; what is left of the family is then recorded as left out."""
        spent_s, limit_s = time.perf_counter() - self.begun_s, self.arguments.time_limit_s
        if spent_s < limit_s:
            return False
        self.result["left_out"] += [
            {
                "family": family,
                "case": case,
                "variant": None,
                "reason": f"{spent_s:.0f} s had passed of {limit_s:.0f}",
                "cut_short": True,
            }
            for case in pending
        ]
        self.file.write()
        return True

    def _register_fa3(self) -> str | None:
        """Why the reference runs without FlashAttention-3, or None."""
        if not self.has_reference:
            return "the reference package is not installed"
        if self.device.type != "cuda":
            return f"FlashAttention-3 needs a CUDA device, this is {self.device}"
        try:
            baselines.register_fa3(baselines.fa3_kernel())
        except baselines.LeftOut as error:
            return str(error)
        return None

    def _managed_device(self) -> ManagedDevice | None:
        try:
            managed = managed_device(self.device)
            self.result["power"]["limit_w"] = managed.power_limit_w()
        except NoPowerReading as error:
            self.result["power"]["reason"] = str(error)
            return None
        return managed


def main() -> None:
    arguments = parse_arguments((__doc__ or "").splitlines()[0])
    console = Console(width=None if sys.stdout.isatty() else 132)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    run = Run(arguments, console)
    run.main()
    result = run.result
    console.print(table_of(result))
    for line in left_out_lines(result["left_out"]):
        console.print(line)
    try:
        console.print(f"chart: {chart.draw(result, run.file.path.with_suffix('.png'))}")
    except (chart.NoMatplotlib, ValueError) as error:
        console.print(f"no chart: {error}")
    console.print(f"written to {run.file.path} after {result['seconds']:.0f} s")
    if any(check["relative_error"] >= CHECK_LIMIT for check in result["checks"]):
        sys.exit(f"a tower differs from the reference by {CHECK_LIMIT} or more: see the checks")


def load_reference(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """The reference implementation's tower with its projector."""
    from tests.parity.reference import ReferenceTower

    return ReferenceTower(path, device=device, dtype=dtype)


def release(device: torch.device) -> None:
    """Gives back what the last tower or case held before the next one is made."""
    gc.collect()
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
