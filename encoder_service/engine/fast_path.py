"""The fast path of a GPU: fused tower, attention chosen by measurement, one CUDA graph per bucket.

Owns its construction before the service is ready: which attention backends and gemms are tried on which
shapes, the ladder of buckets, the captures and the calibration. ``choices`` keeps what was measured. If the
fast path is not possible, the plain tower serves and the log says why.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from encoder_service.engine.calibrate import calibrate
from encoder_service.engine.choices import ChoicesFile, KernelNames, copy_kept, keep_compiled, kept_folder
from encoder_service.engine.graphs import GraphRunner
from encoder_service.errors import ConfigurationError
from encoder_service.ops.progress import Progress
from encoder_service.scheduler.buckets import Bucket, BucketLadder, default_ladder, ladder_of_sizes
from encoder_service.towers.attention import AttentionBackend, parse_attention
from encoder_service.towers.attention.cases import ATTENTION, PackedBatch, attention_selection
from encoder_service.towers.gemm import TORCH_CHOICES, TORCH_GEMM, Gemm, GemmChoices, Step
from encoder_service.towers.gemm.available import available_gemms
from encoder_service.towers.gemm.cases import gemm_selections
from encoder_service.towers.layers import PlainTower
from encoder_service.towers.selection import Choices, Selection, TimeMs, graph_time_ms
from encoder_service.towers.tower import Tower
from encoder_service.towers.windows import most_windows

log = structlog.get_logger(__name__)

# Attention is measured on buckets of about these sizes, with each of their sequence bounds.
MEASURED_SIZES = (784, 1024, 4096, 16_384)
# Matrix products are cheaper to measure, and wave quantisation makes their times uneven.
GEMM_SIZES = (256, 784, 1024, 2048, 4096, 8192, 16_384, 32_768)


def build_graph_runner(
    tower: Tower,
    *,
    attention: str,
    deterministic: bool,
    max_patches: int,
    longest_item: int = 0,
    bucket_sizes: Sequence[int] = (),
    choices_dir: Path | None = None,
    choices_seed: Path | None = None,
) -> GraphRunner | None:
    """A runner with every graph captured; None if the plain tower has to serve.

    attention: "auto" or a backend's name. deterministic: use one backend for all shapes, whose rows for an
    item do not depend on its batch. max_patches: patches of the largest batch. longest_item: patches of the
    largest item that attends over all its patches; it runs alone if it is above max_patches. bucket_sizes:
    the ladder's sizes in patches, instead of the default ones. choices_dir: folder of the kernel choices of
    earlier starts, which are used instead of measuring, and of their compiled kernels; None for none.
    choices_seed: such a folder, from which it takes what it lacks. Raises ConfigurationError for an attention
    backend or sizes that are not available.
    """
    kept = None
    if choices_dir is not None and tower.device.type == "cuda":
        kept = kept_folder(choices_dir, tower.device)
        if choices_seed is not None:
            copy_kept(choices_seed, kept)
        keep_compiled(kept)
    candidates = [
        backend
        for backend in parse_attention(attention, tower.device, deterministic=deterministic)
        if not backend.static_lengths
    ]
    reason = why_plain(tower, candidates)
    if reason is not None:
        log.warning("fast path is off, the plain tower serves", reason=reason)
        return None
    assert isinstance(tower, PlainTower)
    ladder = ladder_of(tower, max_patches, bucket_sizes, longest_item)
    started_s = time.monotonic()
    selections = KernelSelections.of(tower, candidates, ladder, deterministic=deterministic)
    file = None
    if kept is not None:
        file = ChoicesFile.of_device(kept, tower.device, selections.measured)
    kernels = choose_kernels(selections, file)
    log.info("kernels chosen", seconds=round(time.monotonic() - started_s, 1), **kernels.used)
    runner = captured_runner(tower, kernels, ladder)
    # Not if deterministic: measured costs differ between starts, and with them the bucket of a batch.
    calibration = None if deterministic else calibrate(runner, tower.merge_size, clock=time.monotonic)
    if calibration is not None:
        runner.use(calibration)
    runner.reset_counters()  # from now on they count served batches only
    return runner


def captured_runner(tower: PlainTower, kernels: Kernels, ladder: BucketLadder) -> GraphRunner:
    """A runner of the fused tower with these kernels, every graph captured."""
    from encoder_service.towers.fused import FusedTower  # needs triton, which only GPUs require

    started_s = time.monotonic()
    fused = FusedTower(tower, kernels.attention, kernels.gemms)
    choices = [
        (operation, case, name)
        for operation, by_case in kernels.names.items()
        for case, name in by_case.items()
    ]
    runner = GraphRunner(fused, ladder, tower.device, capture=True, clock=time.monotonic, choices=choices)
    runner.capture_all()
    log.info(
        "graphs captured",
        graphs=len(ladder),
        sizes=len(ladder.sizes),
        max_patches=ladder.max_patches,
        capture_s=round(time.monotonic() - started_s, 1),
        captured_mib=runner.captured_bytes >> 20,
        paired_mib=fused.paired_bytes >> 20,
    )
    return runner


def why_plain(tower: Tower, candidates: Sequence[AttentionBackend]) -> str | None:
    """Why the fast path is not possible; None if it is."""
    if not isinstance(tower, PlainTower):
        return f"no fused form of {type(tower).__name__}"
    if tower.device.type != "cuda":
        return f"graphs need a CUDA device, the tower is on {tower.device}"
    if tower.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels serve 16-bit weights, these are {tower.dtype}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not candidates:
        return "every attention backend that is installed bakes sequence lengths into its launches"
    return None


def ladder_of(
    tower: Tower, max_patches: int, bucket_sizes: Sequence[int], longest_item: int = 0
) -> BucketLadder:
    """A ladder of the configured sizes, or the default ladder up to ``max_patches`` and, for single items, up
    to ``longest_item``. Raises ConfigurationError."""
    unit = tower.merge_size**2
    if not bucket_sizes:
        return default_ladder(
            max_patches // unit * unit,
            max_frames=tower.max_frames,
            merge_size=tower.merge_size,
            longest=longest_item,
        )
    wrong = [size for size in bucket_sizes if size < unit or size % unit]
    if wrong:
        raise ConfigurationError(f"bucket sizes {wrong} are no positive multiples of {unit} patches")
    return ladder_of_sizes(bucket_sizes, max_frames=tower.max_frames)


@dataclass(frozen=True)
class Kernels:
    """The attention backend by number of patches and max_seqlen, and the gemm of each product by number of
    rows."""

    attention: Choices[AttentionBackend]
    gemms: GemmChoices

    @property
    def names(self) -> KernelNames:
        return {ATTENTION: self.attention.names} | {
            step: by_rows.names for step, by_rows in self.gemms.items()
        }

    @property
    def used(self) -> dict[str, list[str]]:
        """The names of those that are used in any case."""
        gemms = {name for by_rows in self.gemms.values() for name in by_rows.names.values()}
        return {"attention": sorted({*self.attention.names.values()}), "gemms": sorted(gemms)}


@dataclass(frozen=True)
class KernelSelections:
    """What is chosen at a start. gemms: empty if torch's gemm is the only candidate. measured: all that the
    choices depend on besides the device and its packages, as values that JSON keeps."""

    attention: Selection[AttentionBackend]
    gemms: Mapping[Step, Selection[Gemm]]
    measured: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        tower: PlainTower,
        backends: Sequence[AttentionBackend],
        ladder: BucketLadder,
        *,
        deterministic: bool,
    ) -> KernelSelections:
        """deterministic: one attention backend for all shapes, whose rows do not depend on the batch, and
        torch's gemm for all products, because two gemms round differently."""
        block, dtype, device = tower.block_shape, tower.dtype, tower.device
        # Buckets that differ only in their frames are one case.
        by_shape = {(bucket.num_patches, bucket.max_seqlen): bucket for bucket in measured_buckets(ladder)}
        batches = [
            PackedBatch.mixed(patches, bucket.num_sequences, seqlen)
            for (patches, seqlen), bucket in by_shape.items()
        ]
        batches += window_batches(tower, list(by_shape.values()))
        attention = attention_selection(backends, batches, block, dtype, device, deterministic=deterministic)
        gemms = [TORCH_GEMM] if deterministic else available_gemms(device)
        rows = sorted(nearest_sizes(ladder, GEMM_SIZES)) if len(gemms) > 1 else []
        measured = {
            "tower": [type(tower).__name__, str(dtype)],
            "block": list(block),
            "attention": [backend.name for backend in backends],
            "cases": [
                f"{case.name} in {batch.num_sequences}"
                for case, batch in zip(attention.cases, batches, strict=True)
            ],
            "gemms": [gemm.name for gemm in gemms],
            "rows": rows,
            "deterministic": deterministic,
        }
        products = gemm_selections(gemms, rows, block, dtype, device) if rows else {}
        return cls(attention, products, measured)

    def check(self, names: KernelNames) -> Kernels:
        """The saved choices. Raises ConfigurationError if one is not available or deviates from float32."""
        progress = self._progress("checking kernels")
        attention = self.attention.check(names[ATTENTION], progress)
        gemms = {
            step: selection.check(names.get(step, {}), progress) for step, selection in self.gemms.items()
        }
        return Kernels(attention, gemms or TORCH_CHOICES)

    def measure(self, time_ms: TimeMs) -> Kernels:
        """The fastest correct candidates. Raises ConfigurationError if no attention backend is correct."""
        progress = self._progress("measuring kernels")
        attention = self.attention.measure(time_ms, progress)
        gemms = {step: selection.measure(time_ms, progress) for step, selection in self.gemms.items()}
        return Kernels(attention, gemms or TORCH_CHOICES)

    def _progress(self, event: str) -> Progress:
        selections: list[Selection[Any]] = [self.attention, *self.gemms.values()]
        return Progress(event, sum(len(selection.cases) for selection in selections))


def window_batches(tower: PlainTower, buckets: Sequence[Bucket]) -> list[PackedBatch]:
    """The windows of buckets, one batch for each number of patches; none of towers without windows."""
    length = (tower.window * tower.merge_size) ** 2
    slots = {bucket.num_patches: bucket.num_sequences for bucket in buckets if tower.window}
    taken = {bucket.num_patches for bucket in buckets if bucket.max_seqlen == length}
    return [
        PackedBatch.mixed(patches, most_windows(patches, count, tower.merge_size, tower.window), length)
        for patches, count in slots.items()
        if patches not in taken
    ]


def choose_kernels(
    selections: KernelSelections, file: ChoicesFile | None, time_ms: TimeMs = graph_time_ms
) -> Kernels:
    """The choices of an earlier start, checked against float32 again; without them, measures and keeps the
    choices in the file. file: None to measure and keep nothing. Raises ConfigurationError if no backend is
    correct on this device."""
    saved = None if file is None else file.read()
    if file is not None and saved is not None:
        try:
            kernels = selections.check(saved)
        except ConfigurationError as error:
            log.warning("kernel choices ignored", path=str(file.path), reason=error.message)
        else:
            log.info("kernel choices of a former start", path=str(file.path))
            return kernels
    kernels = selections.measure(time_ms)
    if file is not None:
        file.write(kernels.names)
    return kernels


def measured_buckets(ladder: BucketLadder) -> list[Bucket]:
    """The buckets with the sizes nearest to MEASURED_SIZES, with every bound on the sequence length."""
    sizes = nearest_sizes(ladder, MEASURED_SIZES)
    return [bucket for bucket in ladder.buckets if bucket.num_patches in sizes]


def nearest_sizes(ladder: BucketLadder, targets: Sequence[int]) -> set[int]:
    """The size of the ladder that is nearest to each of ``targets``."""
    return {min(ladder.sizes, key=lambda size: abs(size - target)) for target in targets}
