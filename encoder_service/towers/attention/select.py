"""Chooses the attention backend of each bucket: checked against float32, then timed on the device.

Owns the measurement and the choice. ``available.py`` gives the candidates. The engine gives the buckets and
uses the choice. One bucket takes about as long as a few hundred attention calls, before the service is ready.

Shape legend: P patches of the batch, S sequences, H heads, d head_dim.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import structlog
import torch

from encoder_service.errors import ConfigurationError
from encoder_service.towers.attention.backend import AttentionBackend, AttentionPlan
from encoder_service.towers.attention.sdpa import SdpaAttention

log = structlog.get_logger(__name__)

TimeMs = Callable[[Callable[[], object]], float]

# Largest relative Frobenius error against float32 on normal random values. Rounding probabilities and output
# to bfloat16 gives 2e-3 to 4e-3; a wrong mask, scale or bound gives 1e-1 and more.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Backends within this share of the fastest count as equally fast: repeats differ by about as much.
TIE_SHARE = 0.02
# Attention calls with one plan in a timed run; towers have 27 blocks.
NUM_BLOCKS = 8
# Every backend is checked on this batch before it is timed: mixed lengths, single rows, no whole tile.
CHECK_SEQLENS = (200, 1, 77, 1, 300, 64, 130)


@dataclass(frozen=True)
class ShapeCase:
    """A batch to measure: sequences of ``seqlens`` in num_patches rows and num_sequences slots, with the
    bound max_seqlen. The choice is looked up by ``name``."""

    name: str
    seqlens: tuple[int, ...]
    num_patches: int
    num_sequences: int
    max_seqlen: int

    @classmethod
    def mixed(cls, name: str, num_patches: int, num_sequences: int, max_seqlen: int) -> ShapeCase:
        """A bucket filled in three equal parts with sequences of max_seqlen, three quarters and one quarter
        of it. If a third of the bucket cannot hold max_seqlen: as many sequences of max_seqlen as fit, and
        one for the remainder."""
        lengths = [max_seqlen * quarters // 4 for quarters in (4, 3, 1)]
        if num_patches // len(lengths) >= max_seqlen and min(lengths) >= 1:
            seqlens = [length for length in lengths for _ in range(num_patches // len(lengths) // length)]
        else:
            seqlens = [max_seqlen] * (num_patches // max_seqlen)
            if num_patches % max_seqlen:
                seqlens.append(num_patches % max_seqlen)
        return cls(name, tuple(seqlens[:num_sequences]), num_patches, num_sequences, max_seqlen)


class WrongResult(Exception):
    """A backend gives wrong rows. Raised and caught in this module."""


def measure_backends(
    backends: Sequence[AttentionBackend],
    cases: Sequence[ShapeCase],
    *,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    time_ms: TimeMs,
    deterministic: bool = False,
) -> dict[str, AttentionBackend]:
    """The fastest correct backend for each case, by the case's name. Among backends within TIE_SHARE of the
    fastest, the earliest is chosen.

    backends: none with static_lengths, because a bucket must work for any lengths. time_ms: returns the
    milliseconds of one run of a function. A backend that raises is excluded from the case; one that deviates
    from float32 by more than TOLERANCES is excluded from all cases. deterministic: only backends whose rows
    for a sequence are bit-equal alone and in a batch, and one backend for all cases, because two backends
    round differently. Raises ConfigurationError if no backend is left for a case.
    """
    assert not any(backend.static_lengths for backend in backends)
    qkv_of = functools.partial(random_qkv, num_heads, head_dim, dtype, device)
    measured: dict[str, dict[str, float | str]] = {}
    for backend in backends:
        found = measure_one(backend, cases, qkv_of, time_ms, deterministic=deterministic)
        measured[backend.name] = found
        for case, outcome in found.items():
            if isinstance(outcome, str):
                log.warning("attention_backend_excluded", backend=backend.name, case=case, reason=outcome)
    names = [case.name for case in cases]
    groups = [names] if deterministic else [[name] for name in names]
    choices = {name: choose(backends, group, measured) for group in groups for name in group}
    for name in names:
        times = {backend: ms for backend in measured if isinstance(ms := measured[backend][name], float)}
        log.info("attention_selected", case=name, backend=choices[name].name, milliseconds=times)
    return choices


def check_backends(
    names: Mapping[str, str],
    backends: Sequence[AttentionBackend],
    cases: Sequence[ShapeCase],
    *,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool = False,
) -> dict[str, AttentionBackend]:
    """The backend that ``names`` states for each case, by the case's name: checked as in measure_backends,
    but not timed. Raises ConfigurationError for a case without a known backend, and for a backend that
    fails."""
    by_name = {backend.name: backend for backend in backends}
    unknown = {case.name: names.get(case.name) for case in cases if names.get(case.name) not in by_name}
    if unknown:
        raise ConfigurationError(f"no such attention backend: {unknown}; available are {sorted(by_name)}")
    choices = {case.name: by_name[names[case.name]] for case in cases}
    if deterministic and len(set(choices.values())) > 1:
        raise ConfigurationError(f"one attention backend must serve all cases, the choices are {dict(names)}")
    qkv_of = functools.partial(random_qkv, num_heads, head_dim, dtype, device)
    for backend in dict.fromkeys(choices.values()):
        own = [case for case in cases if choices[case.name] is backend]
        found = measure_one(backend, own, qkv_of, lambda _: 0.0, deterministic=deterministic)
        failed = {case: outcome for case, outcome in found.items() if isinstance(outcome, str)}
        if failed:
            raise ConfigurationError(f"attention backend {backend.name} fails: {failed}")
    return choices


def random_qkv(
    num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, case: ShapeCase
) -> torch.Tensor:
    """[P, 3, H, d] of normal values. Zeros would run faster than a real batch."""
    return torch.randn(case.num_patches, 3, num_heads, head_dim, dtype=dtype, device=device)


def measure_one(
    backend: AttentionBackend,
    cases: Sequence[ShapeCase],
    qkv_of: Callable[[ShapeCase], torch.Tensor],
    time_ms: TimeMs,
    *,
    deterministic: bool,
) -> dict[str, float | str]:
    """By case: the milliseconds of one attention call, or why the backend is excluded; see
    measure_backends."""
    total = sum(CHECK_SEQLENS)
    check = ShapeCase("check", CHECK_SEQLENS, total + 27, len(CHECK_SEQLENS) + 3, total)
    found: dict[str, float | str] = {}
    try:
        qkv = qkv_of(check)
        deviation(backend, check, qkv)
        if deterministic:
            check_invariance(backend, check, qkv)
        for case in cases:
            try:
                qkv = qkv_of(case)
                deviation(backend, case, qkv)
                found[case.name] = time_ms(forward_of(backend, case, qkv)) / NUM_BLOCKS
            except WrongResult:
                raise
            except Exception as error:
                found[case.name] = describe(error)
    except Exception as error:
        reason = str(error) if isinstance(error, WrongResult) else describe(error)
        return {case.name: reason for case in cases}
    return found


def describe(error: Exception) -> str:
    """The error's type and first line. Libraries append pages of generated code."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def choose(
    backends: Sequence[AttentionBackend],
    cases: Sequence[str],
    measured: Mapping[str, Mapping[str, float | str]],
) -> AttentionBackend:
    """The backend with the least total time over these cases, among those that run all of them; the earliest
    within TIE_SHARE. measured: by backend, then by case. Raises ConfigurationError if there is none."""
    times: dict[str, float] = {}
    for name, outcomes in measured.items():
        own = [ms for case in cases if isinstance(ms := outcomes[case], float)]
        if len(own) == len(cases):
            times[name] = sum(own)
    if not times:
        reasons = "; ".join(
            sorted(
                {
                    f"{name}: {outcome}"
                    for name, outcomes in measured.items()
                    for outcome in outcomes.values()
                    if isinstance(outcome, str)
                }
            )
        )
        what = f"case {cases[0]}" if len(cases) == 1 else f"all {len(cases)} cases"
        raise ConfigurationError(
            f"0 of {len(backends)} attention backends serve {what}: {reasons}", found=0, tried=len(backends)
        )
    limit = min(times.values()) * (1 + TIE_SHARE)
    return next(backend for backend in backends if times.get(backend.name, float("inf")) <= limit)


def bounds_of(case: ShapeCase, device: torch.device) -> AttentionPlan:
    """The bounds of a case. Slots without a sequence repeat the last bound."""
    ends = [0, *accumulate(case.seqlens)]
    ends += ends[-1:] * (case.num_sequences + 1 - len(ends))
    return AttentionPlan(torch.tensor(ends, dtype=torch.int32, device=device), case.seqlens, case.max_seqlen)


def forward_of(backend: AttentionBackend, case: ShapeCase, qkv: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that runs one plan and the attention of NUM_BLOCKS blocks."""
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
    """Relative Frobenius error of the sequences' rows against float32. Raises WrongResult above the
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


def graph_time_ms(run: Callable[[], object], *, repeats: int = 5) -> float:
    """Median time of a few replays of a CUDA graph of the run, by device events, after one warm-up replay."""
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
