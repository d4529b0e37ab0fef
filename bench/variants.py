"""The variants of the tower bench: what is built once for a family, and what runs for one case of it.

Owns which variants there are, how each is built, and the reasons of those that are left out. Baselines are
built by baselines.py; timing is measurement.py's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import baselines
import torch
from baselines import FA3, FA3_OPERATOR, SDPA, LeftOut, captured, reason_of
from cases import COMPILED_CASES, grids_of, random_inputs, useful_flops

from encoder_service.engine.fast_path import build_graph_runner, ladder_of
from encoder_service.engine.graphs import GraphRunner
from encoder_service.errors import VisionEncoderError
from encoder_service.scheduler.cost import Launch
from encoder_service.towers import Tower, TowerInputs, load_tower
from encoder_service.towers.attention import AttentionBackend, available_backends
from encoder_service.towers.attention.per_shape import PerShapeAttention
from encoder_service.towers.fused import FusedTower
from encoder_service.towers.gemm.per_rows import GemmChoices
from encoder_service.towers.precision import AS_DTYPE, FP8, FP8_EVERYWHERE, Precision

REFERENCES = ("ref_sdpa", "ref_fa3", "ref_fa3_graph", "ref_compiled")
OURS = ("plain", "fused", "graph", "fp8")
VARIANTS = (*REFERENCES, *OURS)
# Only when asked for: every product of every block in fp8, which the default policy does not trust.
EVERYWHERE = "fp8_everywhere"
# With --every-backend, beside these one fused_<backend> for each attention backend.
PLAIN_GRAPH = "plain_graph"
# Of the largest bucket: ``mixed`` has 33,920.
MAX_PATCHES = 36_864


@dataclass
class CompileBudget:
    """Seconds that may still be spent on compiling; a case is not begun when the last one took more than is
    left."""

    left_s: float
    last_s: float = 0.0

    def check(self) -> None:
        """Raises LeftOut."""
        if self.left_s <= self.last_s:
            raise LeftOut(
                f"{max(0.0, self.left_s):.0f} s are left of the compile budget, the last case took"
                f" {self.last_s:.0f} s"
            )

    def spend(self, seconds: float) -> None:
        self.left_s -= seconds
        self.last_s = seconds


@dataclass
class Case:
    """One case of one family, ready to run. padding_shares and notes by variant."""

    name: str
    inputs: TowerInputs
    flops: int
    runs: dict[str, Callable[[], Any]] = field(default_factory=dict)
    padding_shares: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    compile_s: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


class Family:
    """Everything of one family that its cases share. reference: None without the reference package.

    Raises what loading raises; a graph runner that cannot be built is a variant left out, with its reason.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        device: torch.device,
        dtype: torch.dtype,
        *,
        variants: Sequence[str],
        cases: Sequence[str],
        reference: Any,
        no_fa3: str | None,
        full_ladder: bool,
        compile_budget: CompileBudget,
    ) -> None:
        """no_fa3: why there is no FlashAttention-3, None where there is. full_ladder: ``graph`` captures
        the whole default ladder, not only the buckets that the cases use."""
        self.name = name
        self.device = device
        self.variants = tuple(variants)
        self.tower = load_tower(path, device=device, dtype=dtype).tower
        self.reference = reference
        self.no_fa3 = no_fa3
        self.compile_budget = compile_budget
        self.left_out: dict[str, str] = {}
        self.captures: list[dict[str, Any]] = []
        self.runners: dict[str, GraphRunner] = {}
        sizes = self._bucket_sizes(cases)
        for variant, precision, chosen in (
            ("graph", AS_DTYPE, () if full_ladder else sizes),
            ("fp8", FP8, sizes),
            (EVERYWHERE, FP8_EVERYWHERE, sizes),
        ):
            if variant in self.variants:
                self._build_runner(variant, precision, chosen)

    def case(self, name: str, seed: int, *, every_backend: bool) -> Case:
        """The case with every variant that can run; the reasons of the others are in ``left_out``."""
        grids = grids_of(name, merges_time=self.tower.merges_time)
        inputs = random_inputs(self.tower, grids, seed)
        case = Case(name, inputs, useful_flops(self.tower, inputs), left_out=dict(self.left_out))
        assert inputs.pixel_values is not None
        pixels = inputs.pixel_values
        if "plain" in self.variants:
            case.runs["plain"] = lambda: self.tower(inputs)
        if "fused" in self.variants or every_backend:
            self._add_fused(case, grids, pixels, every_backend=every_backend)
        on_device = [pixels.to(self.tower.dtype)]
        for variant, runner in self.runners.items():
            case.runs[variant] = functools.partial(run_step, runner, grids, on_device)
            bucket = runner.can_use(runner.prepare(grids))
            padded = 0 if bucket is None else bucket.num_patches
            case.padding_shares[variant] = 1 - inputs.num_patches / padded if padded else 0.0
            if bucket is None:
                case.notes[variant] = "no bucket takes it: eager"
        for variant in (variant for variant in REFERENCES if variant in self.variants):
            try:
                self._add_reference(case, variant, grids, pixels)
            except LeftOut as error:
                case.left_out[variant] = str(error)
            except Exception as error:  # a baseline that fails leaves the rest to be measured
                case.left_out[variant] = reason_of(error)
        return case

    def _add_fused(
        self, case: Case, grids: Sequence[Any], pixels: torch.Tensor, *, every_backend: bool
    ) -> None:
        """``fused`` with the most preferred backend, eager; with every_backend also graphs of each."""
        if self.device.type != "cuda":
            case.left_out["fused"] = f"its kernels need a CUDA device, this is {self.device}"
            return
        for number, backend in enumerate(cuda_backends(self.device)):
            if number and not every_backend:
                break
            fused = FusedTower(self.tower, backend)  # type: ignore[arg-type]
            inputs = fused.prepare(grids).with_pixels(pixels.to(fused.dtype)).to(self.device)
            run = functools.partial(fused, inputs)
            if number == 0 and "fused" in self.variants:
                case.runs["fused"] = run
            if every_backend:
                case.runs[f"fused_{backend.name}"] = captured(run, self.device)
        if every_backend:
            case.runs[PLAIN_GRAPH] = captured(lambda: self.tower(case.inputs), self.device)

    def _add_reference(self, case: Case, variant: str, grids: Sequence[Any], pixels: torch.Tensor) -> None:
        """Raises LeftOut, or what the reference raises."""
        if self.reference is None:
            raise LeftOut("the reference package is not installed")
        pixels = pixels.to(self.tower.dtype)
        if variant == "ref_sdpa":
            case.runs[variant] = baselines.eager(self.reference, pixels, grids, SDPA)
            return
        if self.no_fa3 is not None:
            raise LeftOut(self.no_fa3)
        if variant == "ref_fa3":
            run = baselines.eager(self.reference, pixels, grids, FA3)
            run()
            case.runs[variant] = run
        elif variant == "ref_fa3_graph":
            case.runs[variant] = captured(
                baselines.with_tables(self.reference, pixels, grids, FA3), self.device
            )
        else:
            if case.name not in COMPILED_CASES:
                raise LeftOut(f"compiled for {', '.join(COMPILED_CASES)} only: each takes long to compile")
            self.compile_budget.check()
            begun = time.perf_counter()
            try:
                compiled = baselines.compiled(self.reference, pixels, grids, FA3_OPERATOR)
            finally:
                self.compile_budget.spend(time.perf_counter() - begun)
            case.runs[variant] = compiled.run
            case.compile_s[variant] = compiled.compile_s
            if compiled.note is not None:
                case.notes[variant] = compiled.note

    def _bucket_sizes(self, cases: Sequence[str]) -> list[int]:
        """The sizes of the default ladder that the cases run in by the cost model as it stands before it is
        fitted to the device, so that a ladder of these alone chooses the same buckets."""
        ladder = ladder_of(self.tower, MAX_PATCHES, ())
        sizes = set()
        for case in cases:
            inputs = self.tower.prepare(grids_of(case, merges_time=self.tower.merges_time))
            frames = 1 if inputs.merge_index is None else inputs.merge_index.shape[1]
            bucket = ladder.choose_for(Launch.of(inputs.seqlens, frames))
            if bucket is not None:
                sizes.add(bucket.num_patches)
        return sorted(sizes)

    def _build_runner(self, variant: str, precision: Precision, bucket_sizes: Sequence[int]) -> None:
        begun = time.perf_counter()
        try:
            runner = build_graph_runner(
                self.tower,
                attention="auto",
                deterministic=False,
                max_patches=MAX_PATCHES,
                bucket_sizes=bucket_sizes,
                precision=precision,
            )
        except VisionEncoderError as error:
            self.left_out[variant] = reason_of(error)
            return
        if runner is None:
            self.left_out[variant] = (
                f"graphs need a CUDA device and 16-bit weights: {self.device}, {self.tower.dtype}"
            )
            return
        self.runners[variant] = runner
        self.captures.append(
            {"family": self.name, "variant": variant, "seconds": time.perf_counter() - begun}
            | describe_runner(runner)
        )


def run_step(runner: GraphRunner, grids: Sequence[Any], pixels: Sequence[torch.Tensor]) -> torch.Tensor:
    """A step of the service from packed grids on: host metadata, its transfer, padding, the replay."""
    return runner.run(runner.prepare(grids), pixels)


def describe_runner(runner: GraphRunner) -> dict[str, Any]:
    """How many graphs, what they hold, the attention of each measured shape and the gemm of each product by
    number of rows."""
    attention: PerShapeAttention = runner._tower.attention  # type: ignore[attr-defined]
    gemms: GemmChoices = runner._tower.gemms  # type: ignore[attr-defined]
    return {
        "graphs": len(runner.ladder),
        "sizes": list(runner.ladder.sizes),
        "captured_bytes": runner.captured_bytes,
        "attention": {f"{shape[0]}x{shape[1]}": backend.name for shape, backend in attention.choices.items()},
        "gemms": gemms.names,
    }


def cuda_backends(device: torch.device) -> list[AttentionBackend]:
    """The installed backends whose launches do not depend on lengths known to the host."""
    return [backend for backend in available_backends(device) if not backend.static_lengths]


def accuracy(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Cosine of each row, mean and least, and the norm of the difference over the norm of ``expected``."""
    found_RW, expected_RW = found.double(), expected.double()
    cosines = torch.nn.functional.cosine_similarity(found_RW, expected_RW, dim=-1)
    return {
        "cosine_mean": float(cosines.mean()),
        "cosine_min": float(cosines.min()),
        "relative_error": float((found_RW - expected_RW).norm() / expected_RW.norm()),
    }


@torch.inference_mode()
def accuracies(case: Case, exact: Tower) -> list[dict[str, Any]]:
    """Of our own variants against this repository's float32 tower on the same pixels, and of fp8 against the
    rows of the 16-bit graph. A variant whose rows are not finite raises ValueError."""
    rows_of = {
        variant: case.runs[variant]().clone() for variant in (*OURS, EVERYWHERE) if variant in case.runs
    }
    if not rows_of:
        return []
    references = {"float32": exact(case.inputs)}
    found = []
    for variant, rows in rows_of.items():
        if not bool(rows.isfinite().all()):
            raise ValueError(f"{case.name} {variant}: {int((~rows.isfinite()).sum())} values are not finite")
        against = references | (
            {"graph": rows_of["graph"]} if variant.startswith("fp8") and "graph" in rows_of else {}
        )
        found += [
            {"case": case.name, "variant": variant, "against": name} | accuracy(rows, expected)
            for name, expected in against.items()
        ]
    return found
