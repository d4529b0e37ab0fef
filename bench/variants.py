"""The cases and variants of the tower bench: what is built once per family, and what runs for one case.

Owns the batches, the count of useful operations, building our variants, and the reasons for those that are
left out. Image sides are in patches, so that families with different patch sizes get the same grids.
references.py builds the reference's variants, engine_towers.py vLLM's; measurement.py times all of them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import references
from bench.engine_towers import PEERS, VLLM, EngineTower
from bench.references import FA3, FA3_OPERATOR, SDPA, LeftOut, captured, reason_of
from encoder_service.engine.fast_path import Kernels, build_graph_runner, captured_runner, ladder_of
from encoder_service.engine.graphs import GraphRunner
from encoder_service.errors import VisionEncoderError
from encoder_service.scheduler.cost import Launch
from encoder_service.towers import Tower, TowerInputs, load_tower
from encoder_service.towers.attention import available_backends
from encoder_service.towers.config import VisionConfig
from encoder_service.towers.fused import FusedTower
from encoder_service.towers.gemm import TORCH_CHOICES
from encoder_service.types import Grid

# Pixels of an image's side at 16 pixels a patch -> patches of a side.
SIDES = {256: 16, 448: 28, 512: 32, 768: 48, 1024: 64}
SIZES_OF_MIXED = ((8, 448), (2, 1024), (4, 768), (16, 256), (6, 512))
# The most informative case first, so that a run that is cut short has it.
CASES = ("1x1024", "8x1024", "1x448", "32x448", "mixed", "clip")
QUICK_CASES = ("1x448", "1x1024")
# For a CPU, to check that the bench runs.
SMALL_CASE = "1x256"
KNOWN_CASES = (SMALL_CASE, *CASES)
# Cases that keep the device busy, so that its power and clocks are meaningful.
SATURATED_CASES = ("8x1024", "32x448")
# Compiling takes tens of seconds.
COMPILED_CASE = "1x1024"
REFERENCES = ("ref_sdpa", "ref_fa3", "ref_fa3_graph", "ref_compiled")
OURS = ("plain", "fused", "graph")
VARIANTS = (*REFERENCES, *PEERS, *OURS)
# ``graph`` with torch's matrix products alone, and the same attention, buckets and costs.
GRAPH_TORCH = "graph_torch"
KNOWN_VARIANTS = (*VARIANTS, GRAPH_TORCH)
# Of bfloat16 rows of vLLM's tower relative to ours in float32. Rounding gives 1e-2 to 2e-2.
PEER_LIMIT = 5e-2
# Size of the largest bucket: ``mixed`` has 33,920 patches.
MAX_PATCHES = 36_864


def grids_of(case: str, *, merges_time: bool) -> list[Grid]:
    """The items of a case. ``clip`` has 16 times 448 pixels: one item of 16 frame pairs if attention stays
    within a frame, or four items of four frames (the maximum for the tower) if it spans the clip."""
    if case == "clip":
        return [Grid(4, 28, 28)] * 4 if merges_time else [Grid(16, 28, 28)]
    if case == "mixed":
        return [Grid(1, SIDES[side], SIDES[side]) for count, side in SIZES_OF_MIXED for _ in range(count)]
    count, side = (int(part) for part in case.split("x"))
    return [Grid(1, SIDES[side], SIDES[side])] * count


def num_patches_of(case: str) -> int:
    """The number of patches of a case, which is the same for every family."""
    return sum(grid.num_patches for grid in grids_of(case, merges_time=False))


def random_inputs(tower: Tower, grids: Sequence[Grid], seed: int) -> TowerInputs:
    """A prepared batch on the tower's device with random float32 pixels."""
    generator = torch.Generator(tower.device).manual_seed(seed)
    num_patches = sum(grid.num_patches for grid in grids)
    pixels = torch.randn(num_patches, tower.patch_dim, generator=generator, device=tower.device) * 0.5
    return tower.prepare(grids).to(tower.device).with_pixels(pixels)


def useful_flops(tower: Tower, inputs: TowerInputs) -> int:
    """The number of operations (multiplications and additions) in matrix products and attention, without
    norms, activations and rotations."""
    config: VisionConfig = tower.config  # type: ignore[assignment]
    width, num_patches = config.hidden_size, inputs.num_patches
    merged = inputs.merge_index.shape[0] if inputs.merge_index is not None else num_patches
    num_rows = merged // config.merge_size**2
    merged_width = width * config.merge_size**2
    products = num_patches * width * (4 * width + 2 * config.intermediate_size)
    full, windows = inputs.seqlens, getattr(inputs, "window_seqlens", inputs.seqlens)
    num_full = len(getattr(tower, "full_blocks", ()))
    attention = [(full, num_full), (windows, config.depth - num_full)]
    squares = sum(count * sum(length**2 for length in lengths) for lengths, count in attention)
    merger = num_rows * merged_width * (merged_width + config.out_width)
    return 2 * (
        num_patches * tower.patch_dim * width
        + config.depth * products
        + 2 * width * squares
        + (1 + tower.num_deepstack_levels) * merger
    )


@dataclass
class Case:
    """One case of one family, ready to run. padding_shares, notes and left_out are by variant."""

    name: str
    inputs: TowerInputs
    flops: int
    runs: dict[str, Callable[[], Any]] = field(default_factory=dict)
    padding_shares: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


class Family:
    """What all cases of one family share. The constructor raises the errors of loading. If the graph runner
    cannot be built, the variant is left out, with the reason."""

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
        engine: EngineTower | str,
        no_fa3: str | None,
        full_ladder: bool,
    ) -> None:
        """reference, engine: or why it is missing. no_fa3: why FlashAttention-3 is missing, or None.
        full_ladder: whether ``graph`` captures the whole default ladder, or only the buckets of the cases."""
        self.name = name
        self.device = device
        self.variants = tuple(variants)
        self.tower = load_tower(path, device=device, dtype=dtype).tower
        self.reference = reference
        self.engine = engine
        self.no_fa3 = no_fa3
        self.captures: list[dict[str, Any]] = []
        self.no_graph: str | None = None
        self.runners: dict[str, GraphRunner] = {}
        if {"graph", GRAPH_TORCH} & {*self.variants}:
            self._build_runners(() if full_ladder else self.bucket_sizes(cases))

    def case(self, name: str, seed: int) -> Case:
        """The case with every variant that can run. ``left_out`` has the reasons for the others."""
        grids = grids_of(name, merges_time=self.tower.merges_time)
        inputs = random_inputs(self.tower, grids, seed)
        case = Case(name, inputs, useful_flops(self.tower, inputs))
        assert inputs.pixel_values is not None
        pixels = inputs.pixel_values
        if "plain" in self.variants:
            case.runs["plain"] = lambda: self.tower(inputs)
        if "fused" in self.variants:
            self._add_fused(case, grids, pixels)
        for variant in (variant for variant in ("graph", GRAPH_TORCH) if variant in self.variants):
            if self.no_graph is None:
                self._add_graph(case, variant, grids, pixels)
            else:
                case.left_out[variant] = self.no_graph
        for variant in (variant for variant in (*REFERENCES, *PEERS) if variant in self.variants):
            add = self._add_peer if variant in PEERS else self._add_reference
            try:
                add(case, variant, grids, pixels.to(self.tower.dtype))
            except Exception as error:  # neither must stop the other measurements
                case.left_out[variant] = reason_of(error)
        return case

    def bucket_sizes(self, cases: Sequence[str]) -> list[int]:
        """The bucket sizes of the default ladder that the cases use, according to the cost model before it is
        fitted to the device. A ladder of only these sizes selects the same buckets."""
        ladder = ladder_of(self.tower, MAX_PATCHES, ())
        sizes = set()
        for case in cases:
            inputs = self.tower.prepare(grids_of(case, merges_time=self.tower.merges_time))
            frames = 1 if inputs.merge_index is None else inputs.merge_index.shape[1]
            bucket = ladder.choose(Launch.of(inputs.seqlens, frames))
            if bucket is not None:
                sizes.add(bucket.num_patches)
        return sorted(sizes)

    def _build_runners(self, bucket_sizes: Sequence[int]) -> None:
        begun = time.perf_counter()
        try:
            runner = build_graph_runner(
                self.tower,
                attention="auto",
                deterministic=False,
                max_patches=MAX_PATCHES,
                bucket_sizes=bucket_sizes,
            )
        except VisionEncoderError as error:
            self.no_graph = reason_of(error)
            return
        if runner is None:
            self.no_graph = f"graphs need a CUDA device and 16-bit weights: {self.device}, {self.tower.dtype}"
            return
        self._add_runner("graph", runner, begun)
        if GRAPH_TORCH in self.variants:
            begun = time.perf_counter()
            kernels = Kernels(runner.tower.attention, TORCH_CHOICES)  # type: ignore[attr-defined]
            twin = captured_runner(self.tower, kernels, runner.ladder)  # type: ignore[arg-type]
            self._add_runner(GRAPH_TORCH, twin, begun)

    def _add_runner(self, variant: str, runner: GraphRunner, begun: float) -> None:
        self.runners[variant] = runner
        spent = {"family": self.name, "variant": variant, "seconds": time.perf_counter() - begun}
        self.captures.append(spent | describe_runner(runner))

    def _add_graph(self, case: Case, variant: str, grids: Sequence[Grid], pixels: torch.Tensor) -> None:
        runner = self.runners[variant]
        case.runs[variant] = functools.partial(run_step, runner, grids, [pixels.to(self.tower.dtype)])
        bucket = runner.can_use(runner.prepare(grids))
        if bucket is None:
            case.notes[variant] = "no bucket takes it: eager"
        else:
            case.padding_shares[variant] = 1 - case.inputs.num_patches / bucket.num_patches

    def _add_fused(self, case: Case, grids: Sequence[Grid], pixels: torch.Tensor) -> None:
        """Adds ``fused``, eager, with the preferred backend."""
        if self.device.type != "cuda":
            case.left_out["fused"] = f"its kernels need a CUDA device, this is {self.device}"
            return
        backend = next(backend for backend in available_backends(self.device) if not backend.static_lengths)
        fused = FusedTower(self.tower, backend)  # type: ignore[arg-type]
        inputs = fused.prepare(grids).with_pixels(pixels.to(fused.dtype)).to(self.device)
        case.runs["fused"] = functools.partial(fused, inputs)

    def _add_reference(self, case: Case, variant: str, grids: Sequence[Grid], pixels: torch.Tensor) -> None:
        """Adds one variant of the reference. Raises LeftOut, or the reference's errors."""
        if isinstance(self.reference, str):
            raise LeftOut(self.reference)
        if variant == "ref_sdpa":
            case.runs[variant] = references.eager(self.reference, pixels, grids, SDPA)
            return
        if self.no_fa3 is not None:
            raise LeftOut(self.no_fa3)
        if variant == "ref_fa3":
            run = references.eager(self.reference, pixels, grids, FA3)
            run()
            case.runs[variant] = run
        elif variant == "ref_fa3_graph":
            tables = references.with_tables(self.reference, pixels, grids, FA3)
            case.runs[variant] = captured(tables, self.device)
        elif case.name != COMPILED_CASE:
            raise LeftOut(f"compiled for {COMPILED_CASE} only: it takes long")
        else:
            case.runs[variant] = references.compiled(self.reference, pixels, grids, FA3_OPERATOR)

    def _add_peer(self, case: Case, variant: str, grids: Sequence[Grid], pixels: torch.Tensor) -> None:
        """Adds one of vLLM's variants. Raises LeftOut, or vLLM's errors."""
        if isinstance(self.engine, str):
            raise LeftOut(self.engine)
        if variant == VLLM:
            case.runs[variant] = functools.partial(self.engine.rows, pixels, grids)
        else:
            case.runs[variant] = self.engine.graphs(pixels, grids)


def run_step(runner: GraphRunner, grids: Sequence[Grid], pixels: Sequence[torch.Tensor]) -> torch.Tensor:
    """A step of the service, starting from packed grids: host metadata, its upload, padding, the replay."""
    return runner.run(runner.prepare(grids), pixels)


def describe_runner(runner: GraphRunner) -> dict[str, Any]:
    """The graphs, their memory, the attention backend of each measured shape, and the gemm backend of each
    product by number of rows."""
    attention, gemms = runner.tower.attention, runner.tower.gemms  # type: ignore[attr-defined]
    return {
        "graphs": len(runner.ladder),
        "sizes": list(runner.ladder.sizes),
        "captured_bytes": runner.captured_bytes,
        "attention": attention.names,
        "gemms": {step: by_rows.names for step, by_rows in gemms.items()},
    }


def accuracy(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Mean and minimum cosine over rows, and the norm of the difference relative to that of ``expected``."""
    found_RW, expected_RW = found.double(), expected.double()
    cosines = torch.nn.functional.cosine_similarity(found_RW, expected_RW, dim=-1)
    return {
        "cosine_mean": float(cosines.mean()),
        "cosine_min": float(cosines.min()),
        "relative_error": float((found_RW - expected_RW).norm() / expected_RW.norm()),
    }


@torch.inference_mode()
def accuracies(case: Case, exact: Tower) -> list[dict[str, Any]]:
    """Accuracy of our variants and vLLM's against this repository's float32 tower on the same pixels. Raises
    ValueError for a variant of ours whose rows are not finite. A variant of vLLM's that fails, or whose rows
    are others, is left out."""
    found = []
    expected = exact(case.inputs)
    for variant in (variant for variant in (*OURS, GRAPH_TORCH, *PEERS) if variant in case.runs):
        try:
            rows = case.runs[variant]()
            if not bool(rows.isfinite().all()):
                raise ValueError(
                    f"{case.name} {variant}: {int((~rows.isfinite()).sum())} values are not finite"
                )
            figures = accuracy(rows, expected)
            if variant in PEERS and figures["relative_error"] >= PEER_LIMIT:
                raise LeftOut(f"its rows differ by {figures['relative_error']:.1e} from ours in float32")
        except Exception as error:
            if variant not in PEERS:
                raise
            del case.runs[variant]
            case.left_out[variant] = reason_of(error)
        else:
            place = {"case": case.name, "variant": variant, "against": "float32"}
            found.append(place | figures)
    return found
