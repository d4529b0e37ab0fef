"""The fast path of a GPU: fused tower, attention chosen by measurement, one CUDA graph per bucket.

Owns its construction before the service is ready: which attention backends and gemms are tried on which
shapes, the ladder of buckets, the captures and the calibration. ``choices`` keeps what was measured. If the
fast path is not possible, the plain tower serves and the log says why.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch

from encoder_service.engine.calibrate import calibrate
from encoder_service.engine.choices import ChoicesFile, KernelChoices, environment_of, keep_compiled
from encoder_service.engine.graphs import CaptureRecord, GraphRunner
from encoder_service.errors import ConfigurationError
from encoder_service.scheduler.buckets import Bucket, BucketLadder, default_ladder, ladder_of_sizes
from encoder_service.towers.attention import AttentionBackend, parse_attention
from encoder_service.towers.attention.per_shape import PerShapeAttention
from encoder_service.towers.attention.select import (
    ShapeCase,
    check_backends,
    graph_time_ms,
    measure_backends,
)
from encoder_service.towers.gemm import TORCH_GEMM, Gemm
from encoder_service.towers.gemm.per_rows import TORCH_CHOICES, GemmChoices
from encoder_service.towers.gemm.select import check_gemms, choose_gemms, find_gemms
from encoder_service.towers.layers import BlockShape, PlainTower
from encoder_service.towers.tower import Tower

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
    progress: Callable[[CaptureRecord, int], None] | None = None,
) -> GraphRunner | None:
    """A runner with every graph captured; None if the plain tower has to serve.

    attention: "auto" or a backend's name. deterministic: use one backend for all shapes, whose rows for an
    item do not depend on its batch. max_patches: patches of the largest batch. longest_item: patches of the
    largest item that attends over all its patches; it runs alone if it is above max_patches. bucket_sizes:
    the ladder's sizes in patches, instead of the default ones. choices_dir: folder of former starts' kernel
    choices, which are used instead of measuring, and of their compiled kernels; None for none. Raises
    ConfigurationError for an attention backend or sizes that are not available.
    """
    if choices_dir is not None:
        keep_compiled(choices_dir)
    candidates = [
        backend
        for backend in parse_attention(attention, tower.device, deterministic=deterministic)
        if not backend.static_lengths
    ]
    reason = why_plain(tower, candidates)
    if reason is not None:
        log.warning("fast path is off, the plain tower serves", reason=reason)
        return None
    from encoder_service.towers.fused import FusedTower  # needs triton, which only GPUs require

    ladder = ladder_of(tower, max_patches, bucket_sizes, longest_item)
    started_s = time.monotonic()
    kernels = KernelCandidates.of(tower, candidates, ladder, deterministic=deterministic)
    chosen, gemms = choose_kernels(kernels, choices_dir)
    measured_s = time.monotonic()
    fused = FusedTower(tower, chosen, gemms)  # type: ignore[arg-type]
    runner = GraphRunner(
        fused,
        ladder,
        tower.device,
        capture=True,
        clock=time.monotonic,
        choices=[
            *(("attention", f"{size}x{bound}", one.name) for (size, bound), one in chosen.choices.items()),
            *(
                (step, str(rows), name)
                for step, by_rows in gemms.names.items()
                for rows, name in by_rows.items()
            ),
        ],
    )
    runner.capture_all(progress)
    captured_s = time.monotonic()
    log.info(
        "graphs captured",
        graphs=len(ladder),
        sizes=len(ladder.sizes),
        max_patches=ladder.max_patches,
        attention=sorted({backend.name for backend in chosen.choices.values()}),
        gemms=sorted({name for by_rows in gemms.names.values() for name in by_rows.values()}),
        measure_s=round(measured_s - started_s, 1),
        capture_s=round(captured_s - measured_s, 1),
        captured_mib=runner.captured_bytes >> 20,
        paired_mib=fused.paired_bytes >> 20,
    )
    # Not if deterministic: measured costs differ between starts, and with them the bucket of a batch.
    calibration = None if deterministic else calibrate(runner, tower.merge_size, clock=time.monotonic)
    if calibration is not None:
        runner.use(calibration)
    runner.reset_counters()  # from now on they count served batches only
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


def choose_kernels(
    candidates: KernelCandidates, choices_dir: Path | None
) -> tuple[PerShapeAttention, GemmChoices]:
    """The attention backend by shape and the gemm of each product by number of rows: the choices of a former
    start, checked against float32 again, or else measured now and kept for later starts. Raises
    ConfigurationError if no backend is correct on this device."""
    if choices_dir is None:
        return candidates.measure()
    measured_for = candidates.measured_for()
    if measured_for["driver"] is None:
        log.warning("kernel choices not kept", reason="the driver's version is unknown")
        return candidates.measure()
    file = ChoicesFile(choices_dir, measured_for)
    saved = file.read()
    if saved is not None:
        try:
            found = candidates.check(saved)
        except ConfigurationError as error:
            log.warning("kernel choices ignored", path=str(file.path), reason=error.message)
        else:
            log.info("kernel choices of a former start", path=str(file.path))
            return found
    attention, gemms = candidates.measure()
    file.write(
        KernelChoices(
            {candidates.cases[shape].name: backend.name for shape, backend in attention.choices.items()},
            {
                step: {str(rows): name for rows, name in by_rows.items()}
                for step, by_rows in gemms.names.items()
            },
        )
    )
    return attention, gemms


@dataclass(frozen=True)
class KernelCandidates:
    """What a start chooses from, and the shapes it chooses for. cases: by (number of patches, max_seqlen).
    rows: numbers of rows for which gemms are chosen; none if torch's gemm is the only candidate.
    deterministic: one attention backend for all shapes, whose rows do not depend on the batch."""

    tower: PlainTower
    attention: Sequence[AttentionBackend]
    gemms: Sequence[Gemm]
    cases: Mapping[tuple[int, int], ShapeCase]
    rows: Sequence[int]
    deterministic: bool

    @classmethod
    def of(
        cls, tower: Tower, attention: Sequence[AttentionBackend], ladder: BucketLadder, *, deterministic: bool
    ) -> KernelCandidates:
        """deterministic: also torch's gemm for all products, because two gemms round differently."""
        assert isinstance(tower, PlainTower)
        shapes = {(bucket.num_patches, bucket.max_seqlen): bucket for bucket in measured_buckets(ladder)}
        cases = {
            (patches, seqlen): ShapeCase.mixed(f"{patches}x{seqlen}", patches, bucket.num_sequences, seqlen)
            for (patches, seqlen), bucket in shapes.items()
        }
        gemms = [TORCH_GEMM] if deterministic else find_gemms(tower.device)
        rows = sorted(nearest_sizes(ladder, GEMM_SIZES)) if len(gemms) > 1 else []
        return cls(tower, attention, gemms, cases, rows, deterministic)

    @property
    def block(self) -> BlockShape:
        return self.tower.block_shape

    def measured_for(self) -> dict[str, Any]:
        """All that the choices depend on, as values that JSON keeps."""
        return {
            **environment_of(self.tower.device),
            "tower": [type(self.tower).__name__, str(self.tower.dtype)],
            "block": list(self.block),
            "attention": [backend.name for backend in self.attention],
            "cases": [f"{case.name} in {case.num_sequences}" for case in self.cases.values()],
            "gemms": [gemm.name for gemm in self.gemms],
            "rows": list(self.rows),
            "deterministic": self.deterministic,
        }

    def check(self, saved: KernelChoices) -> tuple[PerShapeAttention, GemmChoices]:
        """The saved choices. Raises ConfigurationError if one is not available or deviates from float32."""
        attention = check_backends(saved.attention, self.attention, [*self.cases.values()], **self._sizes)
        gemms = TORCH_CHOICES
        if self.rows:
            gemms = check_gemms(saved.gemms, self.gemms, self.block, self.rows, **self._where)
        return self._by_shape(attention), gemms

    def measure(self) -> tuple[PerShapeAttention, GemmChoices]:
        """The fastest correct candidates. Raises ConfigurationError if no attention backend is correct."""
        attention = measure_backends(
            self.attention, [*self.cases.values()], time_ms=graph_time_ms, **self._sizes
        )
        gemms = TORCH_CHOICES
        if self.rows:
            gemms = choose_gemms(self.gemms, self.block, self.rows, time_ms=graph_time_ms, **self._where)
        return self._by_shape(attention), gemms

    def _by_shape(self, attention: Mapping[str, AttentionBackend]) -> PerShapeAttention:
        return PerShapeAttention({shape: attention[case.name] for shape, case in self.cases.items()})

    @property
    def _where(self) -> dict[str, Any]:
        return {"dtype": self.tower.dtype, "device": self.tower.device}

    @property
    def _sizes(self) -> dict[str, Any]:
        num_heads = self.block.num_heads
        return {
            "num_heads": num_heads,
            "head_dim": self.block.hidden_size // num_heads,
            "deterministic": self.deterministic,
            **self._where,
        }


def measured_buckets(ladder: BucketLadder) -> list[Bucket]:
    """The buckets with the sizes nearest to MEASURED_SIZES, with every bound on the sequence length."""
    sizes = nearest_sizes(ladder, MEASURED_SIZES)
    return [bucket for bucket in ladder.buckets if bucket.num_patches in sizes]


def nearest_sizes(ladder: BucketLadder, wanted: Sequence[int]) -> set[int]:
    """The ladder's sizes nearest to the wanted ones."""
    return {min(ladder.sizes, key=lambda size: abs(size - one)) for one in wanted}
