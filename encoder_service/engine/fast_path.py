"""The fast path of a GPU: fused tower, attention chosen by measurement, one CUDA graph per bucket.

Owns its assembly before readiness: which attention backends are tried on which shapes, the ladder of buckets,
the captures and the calibration. If the fast path is not possible, the plain tower serves and the log says
why.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence

import structlog
import torch

from encoder_service.engine.calibrate import calibrate
from encoder_service.engine.graphs import CaptureRecord, GraphRunner
from encoder_service.errors import ConfigurationError
from encoder_service.scheduler.buckets import Bucket, BucketLadder, default_ladder, ladder_of_sizes
from encoder_service.towers.attention import AttentionBackend, parse_attention
from encoder_service.towers.attention.per_shape import PerShapeAttention
from encoder_service.towers.attention.select import ShapeCase, graph_time_ms, measure_backends
from encoder_service.towers.gemm.per_rows import TORCH_CHOICES, GemmChoices
from encoder_service.towers.gemm.select import BlockShape, choose_gemms, find_gemms
from encoder_service.towers.moonvit import MoonViTTower
from encoder_service.towers.qwen3_vl import Qwen3VLTower
from encoder_service.towers.tower import Tower

log = structlog.get_logger(__name__)

# Attention is measured on buckets of about these sizes, under each bound that they have.
MEASURED_SIZES = (784, 1024, 4096, 16_384)
# Products are cheaper to measure, and waves of tiles make their times uneven.
GEMM_SIZES = (256, 784, 1024, 2048, 4096, 8192, 16_384, 32_768)


def build_graph_runner(
    tower: Tower,
    *,
    attention: str,
    deterministic: bool,
    max_patches: int,
    longest_item: int = 0,
    bucket_sizes: Sequence[int] = (),
    progress: Callable[[CaptureRecord, int], None] | None = None,
) -> GraphRunner | None:
    """A runner with every graph captured; None where the plain tower has to serve.

    attention: "auto" or a backend's name. deterministic: one backend for all shapes whose rows for an item
    do not depend on its batch. max_patches: of the largest batch; longest_item: patches of the largest item
    that attends over all of itself, which runs alone where it is above that; bucket_sizes: the ladder, in
    patches, instead of the default one. Raises ConfigurationError for an attention or sizes that
    cannot be had.
    """
    candidates = [
        backend
        for backend in parse_attention(attention, tower.device, deterministic=deterministic)
        if not backend.static_lengths
    ]
    reason = why_plain(tower, candidates)
    if reason is not None:
        log.warning("fast path is off, the plain tower serves", reason=reason)
        return None
    from encoder_service.towers.fused import FusedTower  # triton, which only a GPU needs

    ladder = ladder_of(tower, max_patches, bucket_sizes, longest_item)
    started_s = time.monotonic()
    chosen = choose_attention(tower, candidates, ladder, deterministic=deterministic)
    gemms = choose_tower_gemms(tower, ladder, deterministic=deterministic)
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
    # Measured costs differ from start to start, and with them the bucket that a batch takes.
    calibration = None if deterministic else calibrate(runner, tower.merge_size, clock=time.monotonic)
    if calibration is not None:
        runner.use(calibration)
    runner.reset_counters()  # from here on they count what is served
    return runner


def why_plain(tower: Tower, candidates: Sequence[AttentionBackend]) -> str | None:
    """Why the fast path is not possible, or None."""
    if not isinstance(tower, Qwen3VLTower | MoonViTTower):
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
    """The configured sizes, or the default ladder up to ``max_patches`` and, for single items, up to
    ``longest_item``. Raises ConfigurationError."""
    max_frames = tower.config.max_frames if isinstance(tower, MoonViTTower) else 1
    unit = tower.merge_size**2
    if not bucket_sizes:
        return default_ladder(
            max_patches // unit * unit,
            max_frames=max_frames,
            merge_size=tower.merge_size,
            longest=longest_item,
        )
    wrong = [size for size in bucket_sizes if size < unit or size % unit]
    if wrong:
        raise ConfigurationError(f"bucket sizes {wrong} are no positive multiples of {unit} patches")
    return ladder_of_sizes(bucket_sizes, max_frames=max_frames)


def choose_attention(
    tower: Tower, candidates: Sequence[AttentionBackend], ladder: BucketLadder, *, deterministic: bool
) -> PerShapeAttention:
    """The fastest backend by shape, measured on buckets of the ladder with sequences as long as they take and
    shorter ones. A backend that was asked for by name is checked against float32 on the way as well, and
    refused with ConfigurationError when it is wrong on this device."""
    assert isinstance(tower, Qwen3VLTower | MoonViTTower)
    num_heads = tower.config.num_heads
    shapes = {(bucket.num_patches, bucket.max_seqlen): bucket for bucket in measured_buckets(ladder)}
    cases = [
        ShapeCase.mixed(f"{patches}x{seqlen}", patches, bucket.num_sequences, seqlen)
        for (patches, seqlen), bucket in shapes.items()
    ]
    choices = measure_backends(
        candidates,
        cases,
        num_heads=num_heads,
        head_dim=tower.config.hidden_size // num_heads,
        dtype=tower.dtype,
        device=tower.device,
        time_ms=graph_time_ms,
        deterministic=deterministic,
    )
    return PerShapeAttention({shape: choices[case.name] for shape, case in zip(shapes, cases, strict=True)})


def choose_tower_gemms(tower: Tower, ladder: BucketLadder, *, deterministic: bool) -> GemmChoices:
    """The fastest gemm of each product by number of rows. deterministic: torch's for all, since two gemms
    round differently."""
    assert isinstance(tower, Qwen3VLTower | MoonViTTower)
    candidates = find_gemms(tower.device)
    if deterministic or len(candidates) == 1:
        return TORCH_CHOICES
    config = tower.config
    return choose_gemms(
        candidates,
        BlockShape(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.rope_theta,
            "interleaved" if tower.merges_time else "blocked",
        ),
        sorted(nearest_sizes(ladder, GEMM_SIZES)),
        dtype=tower.dtype,
        device=tower.device,
        time_ms=graph_time_ms,
    )


def measured_buckets(ladder: BucketLadder) -> list[Bucket]:
    """The buckets nearest to MEASURED_SIZES, under each of their bounds."""
    sizes = nearest_sizes(ladder, MEASURED_SIZES)
    return [bucket for bucket in ladder.buckets if bucket.num_patches in sizes]


def nearest_sizes(ladder: BucketLadder, wanted: Sequence[int]) -> set[int]:
    """The ladder's sizes nearest to these."""
    return {min(ladder.sizes, key=lambda size: abs(size - one)) for one in wanted}
