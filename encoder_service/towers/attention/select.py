"""Which attention backend serves which bucket: checked against float32, then timed, on the device itself.

Owns the measurement and the choice. Candidates come from available.py, buckets and what is done with the
choice from the engine. Takes about as long as a few hundred attention calls per bucket, before readiness.

Shape legend: P patches of the batch, S sequences, H heads, d head_dim.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import structlog
import torch

from encoder_service.errors import ConfigurationError
from encoder_service.towers.attention.sdpa import SdpaAttention

if TYPE_CHECKING:
    from encoder_service.towers.attention import AttentionBackend

log = structlog.get_logger(__name__)

TimeMs = Callable[[Callable[[], object]], float]

# Largest relative Frobenius error against float32 on normal random values. Probabilities and output rounded
# to bfloat16 make 2e-3 to 4e-3; a wrong mask, scale or bound makes 1e-1 and more.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Backends within this share of the fastest count as equally fast: repeats differ by about as much.
TIE_SHARE = 0.02
# Attention calls to one plan in what is timed; towers have 27 blocks.
NUM_BLOCKS = 8
# What every backend has to get right before it is timed: mixed lengths, single rows, no whole tile.
CHECK_SEQLENS = (200, 1, 77, 1, 300, 64, 130)


@dataclass(frozen=True)
class ShapeCase:
    """A batch to measure: ``seqlens`` in num_patches rows and num_sequences slots, with max_seqlen baked.

    name: what the choice is looked up by; weight: share of the traffic, for one choice over all cases.
    """

    name: str
    seqlens: tuple[int, ...]
    num_patches: int
    num_sequences: int
    max_seqlen: int
    weight: float = 1.0

    @classmethod
    def filling(cls, name: str, num_patches: int, num_sequences: int, max_seqlen: int) -> ShapeCase:
        """A bucket filled with the longest sequences that it takes, and one of what is left."""
        whole = min(num_patches // max_seqlen, num_sequences)
        seqlens = [max_seqlen] * whole
        if whole < num_sequences and num_patches % max_seqlen:
            seqlens.append(num_patches % max_seqlen)
        return cls(name, tuple(seqlens), num_patches, num_sequences, max_seqlen)

    @classmethod
    def mixed(cls, name: str, num_patches: int, num_sequences: int, max_seqlen: int) -> ShapeCase:
        """A bucket filled in equal parts with the longest sequences that it takes and with ones of three
        quarters and a quarter of that; ``filling`` where a third of it holds none of the longest."""
        lengths = [max_seqlen * quarters // 4 for quarters in (4, 3, 1)]
        if num_patches // len(lengths) < max_seqlen or min(lengths) < 1:
            return cls.filling(name, num_patches, num_sequences, max_seqlen)
        seqlens = [length for length in lengths for _ in range(num_patches // len(lengths) // length)]
        return cls(name, tuple(seqlens[:num_sequences]), num_patches, num_sequences, max_seqlen)


@dataclass(frozen=True)
class CaseBounds:
    """SequenceBounds of a case on a device."""

    cu_seqlens: torch.Tensor
    seqlens: tuple[int, ...]
    max_seqlen: int


@dataclass(frozen=True)
class Measurement:
    """One backend on one case. milliseconds is of one attention call, None where it was excluded."""

    backend: str
    case: str
    milliseconds: float | None
    error: float | None
    excluded: str | None = None


@dataclass(frozen=True)
class Selection:
    """The backend of each case by its name, with every figure behind the choice."""

    choices: dict[str, AttentionBackend]
    measurements: tuple[Measurement, ...]


class WrongResult(Exception):
    """The backend computed something else than attention; never leaves this module."""


def measure_backends(
    backends: Sequence[AttentionBackend],
    cases: Sequence[ShapeCase],
    *,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    time_ms: TimeMs,
    fixed_lengths: bool = False,
    deterministic: bool = False,
) -> Selection:
    """The fastest backend of each case among those that are right; within TIE_SHARE the earlier one.

    time_ms: milliseconds of one run of a function; fixed_lengths: each case serves exactly its lengths, which
    lets in backends that bake them. A backend that raises is excluded from the case; one that deviates from
    float32 by more than TOLERANCES, from all. deterministic: only backends whose rows for a sequence are
    bit-equal alone and in a batch (tried, not only claimed), and one backend for all cases, since two
    backends round differently. Raises ConfigurationError where a case is left without a backend.
    """
    measurements: list[Measurement] = []
    for backend in backends:
        reason = None
        if backend.static_lengths and not fixed_lengths:
            reason = "bakes lengths into its launches, the case serves others"
        elif deterministic and not backend.batch_invariant:
            reason = "its rows depend on the batch"
        if reason is not None:
            measurements.extend(Measurement(backend.name, case.name, None, None, reason) for case in cases)
        else:
            measurements.extend(
                measure_one(backend, cases, num_heads, head_dim, dtype, device, time_ms, deterministic)
            )
    for measured in measurements:
        if measured.excluded is not None:
            log.warning(
                "attention_backend_excluded",
                backend=measured.backend,
                case=measured.case,
                reason=measured.excluded,
            )
    choices = choose_one(backends, cases, measurements) if deterministic else {}
    for case in cases:
        if not deterministic:
            choices[case.name] = choose(backends, case, measurements)
        times = {m.backend: m.milliseconds for m in measurements if m.case == case.name and m.milliseconds}
        log.info("attention_selected", case=case.name, backend=choices[case.name].name, milliseconds=times)
    return Selection(choices, tuple(measurements))


def measure_one(
    backend: AttentionBackend,
    cases: Sequence[ShapeCase],
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    time_ms: TimeMs,
    deterministic: bool,
) -> list[Measurement]:
    """One backend over all cases; see measure_backends."""
    total = sum(CHECK_SEQLENS)
    check = ShapeCase("check", CHECK_SEQLENS, total + 27, len(CHECK_SEQLENS) + 3, total)
    found: list[Measurement] = []
    try:
        qkv = random_qkv(check, num_heads, head_dim, dtype, device)
        deviation(backend, check, qkv)
        if deterministic:
            check_invariance(backend, check, qkv)
        for case in cases:
            try:
                qkv = random_qkv(case, num_heads, head_dim, dtype, device)
                error = deviation(backend, case, qkv)
                milliseconds = time_ms(forward_of(backend, case, qkv)) / NUM_BLOCKS
                found.append(Measurement(backend.name, case.name, milliseconds, error))
            except WrongResult:
                raise
            except Exception as error:
                found.append(Measurement(backend.name, case.name, None, None, describe(error)))
    except Exception as error:
        reason = str(error) if isinstance(error, WrongResult) else describe(error)
        return [Measurement(backend.name, case.name, None, None, reason) for case in cases]
    return found


def describe(error: Exception) -> str:
    """The error's kind and first line: libraries put pages of generated code behind it."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def choose(
    backends: Sequence[AttentionBackend], case: ShapeCase, measurements: Sequence[Measurement]
) -> AttentionBackend:
    times = {
        m.backend: m.milliseconds for m in measurements if m.case == case.name and m.milliseconds is not None
    }
    return first_of_the_fastest(backends, times, f"case {case.name}", measurements)


def choose_one(
    backends: Sequence[AttentionBackend], cases: Sequence[ShapeCase], measurements: Sequence[Measurement]
) -> dict[str, AttentionBackend]:
    """The backend with the least weighted time over all cases, among those that served each."""
    weights = {case.name: case.weight for case in cases}
    times: dict[str, float] = {}
    for backend in backends:
        own = [m for m in measurements if m.backend == backend.name and m.milliseconds is not None]
        if len(own) == len(cases):
            times[backend.name] = sum(weights[m.case] * (m.milliseconds or 0.0) for m in own)
    chosen = first_of_the_fastest(backends, times, f"all {len(cases)} cases", measurements)
    return {case.name: chosen for case in cases}


def first_of_the_fastest(
    backends: Sequence[AttentionBackend],
    times: dict[str, float],
    what: str,
    measurements: Sequence[Measurement],
) -> AttentionBackend:
    if not times:
        reasons = "; ".join(sorted({f"{m.backend}: {m.excluded}" for m in measurements if m.excluded}))
        raise ConfigurationError(
            f"0 of {len(backends)} attention backends serve {what}: {reasons}", found=0, tried=len(backends)
        )
    limit = min(times.values()) * (1 + TIE_SHARE)
    return next(backend for backend in backends if times.get(backend.name, float("inf")) <= limit)


def random_qkv(
    case: ShapeCase, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[P, 3, H, d] of normal values. Zeros would run faster than any real batch."""
    return torch.randn(case.num_patches, 3, num_heads, head_dim, dtype=dtype, device=device)


def bounds_of(case: ShapeCase, device: torch.device) -> CaseBounds:
    """Slots without a sequence repeat the last bound."""
    ends = [0, *accumulate(case.seqlens)]
    ends += ends[-1:] * (case.num_sequences + 1 - len(ends))
    return CaseBounds(torch.tensor(ends, dtype=torch.int32, device=device), case.seqlens, case.max_seqlen)


def forward_of(backend: AttentionBackend, case: ShapeCase, qkv: torch.Tensor) -> Callable[[], torch.Tensor]:
    """One plan and the attention of NUM_BLOCKS blocks."""
    bounds = bounds_of(case, qkv.device)
    q_PHd, k_PHd, v_PHd = qkv.unbind(1)

    def run() -> torch.Tensor:
        planned = backend.plan(bounds, q_PHd.shape, q_PHd.dtype)
        out_PHd = q_PHd
        for _ in range(NUM_BLOCKS):
            out_PHd = backend.attend(q_PHd, k_PHd, v_PHd, planned)
        return out_PHd

    return run


def deviation(backend: AttentionBackend, case: ShapeCase, qkv: torch.Tensor) -> float:
    """Relative Frobenius error of the sequences' rows against float32. Raises WrongResult beyond the
    tolerance, and for padding that is not finite."""
    bounds = bounds_of(case, qkv.device)
    q_PHd, k_PHd, v_PHd = qkv.unbind(1)
    out_PHd = backend.attend(q_PHd, k_PHd, v_PHd, backend.plan(bounds, q_PHd.shape, q_PHd.dtype))
    total = sum(case.seqlens)
    q_PHd, k_PHd, v_PHd = qkv[:total].float().unbind(1)
    expected = SdpaAttention().attend(q_PHd, k_PHd, v_PHd, bounds)
    error = float((out_PHd[:total].float() - expected).norm() / expected.norm())
    limit = TOLERANCES[qkv.dtype]
    if not error <= limit:
        raise WrongResult(
            f"relative error {error:.1e} against float32 on {case.name}, at most {limit:.0e} passes"
        )
    if not bool(out_PHd[total:].isfinite().all()):
        raise WrongResult(f"padding is not finite on {case.name}")
    return error


def check_invariance(backend: AttentionBackend, case: ShapeCase, qkv: torch.Tensor) -> None:
    """Raises WrongResult if the first sequence's rows differ between the batch and the sequence alone."""
    length = case.seqlens[0]
    q_PHd, k_PHd, v_PHd = qkv.unbind(1)
    batched = backend.attend(q_PHd, k_PHd, v_PHd, bounds_of(case, qkv.device))[:length]
    single = backend.attend(
        q_PHd[:length],
        k_PHd[:length],
        v_PHd[:length],
        bounds_of(ShapeCase("alone", (length,), length, 1, length), qkv.device),
    )
    differing = int((batched != single).sum())
    if differing:
        raise WrongResult(f"{differing} values of a sequence depend on the batch around it")


def wall_time_ms(run: Callable[[], object], *, repeats: int = 5) -> float:
    """Median of a few runs by the clock, after one that warms up: for devices without graphs."""
    run()
    samples = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        samples.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(samples)


def graph_time_ms(run: Callable[[], object], *, repeats: int = 5) -> float:
    """Median of a few replays of a CUDA graph of the run, by device events, after one that warms up."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    samples = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(float(start.elapsed_time(end)))
    return statistics.median(samples)
