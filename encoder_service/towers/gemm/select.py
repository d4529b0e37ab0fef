"""Chooses the gemm of each product and number of rows: checked against float32, then timed on the device.

Owns the candidates, the measurement and the choice. A product is timed together with the pass that its
epilogue may save, as the blocks run them: the rotation after qkv, the norm after proj and fc2.

Shape legend: P patches, K input width, N output width, H heads, d head_dim.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog
import torch
from torch.nn.functional import gelu, linear

from encoder_service.errors import ConfigurationError
from encoder_service.towers.attention.available import require_capability
from encoder_service.towers.gemm import (
    STEPS,
    TORCH_GEMM,
    Gemm,
    Rotary,
    Step,
    Weights,
    pair_rows,
    turns_of,
)
from encoder_service.towers.gemm.per_rows import GemmChoices
from encoder_service.towers.layers import BlockShape
from encoder_service.towers.rope import inverse_frequencies

log = structlog.get_logger(__name__)

TimeMs = Callable[[Callable[[], object]], float]

# Largest relative Frobenius error against float32 on normal random values. Rounding gives 2e-3 to 4e-3.
TOLERANCE = 1e-2
# A library replaces torch if it is faster by more than this share.
TIE_SHARE = 0.01
# Calls in a timed run. Each has its own weights, because a block's weights are not in the cache in a tower
# either.
NUM_CALLS = 8
NUM_ROUNDS = 3
SIDE = 64


@dataclass(frozen=True)
class Trial:
    """One step at one number of rows. ``run(gemm)`` calls the gemm NUM_CALLS times, as blocks do.
    ``error(gemm)`` is its relative error against float32."""

    run: Callable[[Gemm], None]
    error: Callable[[Gemm], float]


def find_gemms(device: torch.device) -> list[Gemm]:
    """Every gemm that works on this device, torch's first."""
    found: list[Gemm] = [TORCH_GEMM]
    # An optional library may fail to import with any error; unusable_kernels gives the reason.
    with contextlib.suppress(Exception):
        found += quack_gemms(device)
    return found


def quack_gemms(device: torch.device) -> list[Gemm]:
    """Raises ConfigurationError for a device that quack does not support, or the error of its import."""
    require_capability(device, (9,))
    from encoder_service.towers.attention.fa4 import import_interface

    import_interface()  # puts the DSL's packages on the path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as import_interface does
        from encoder_service.towers.gemm.quack_gemm import TILES, QuackGemm

    return [QuackGemm(tile, steps) for tile, steps in TILES.items()]


def choose_gemms(
    candidates: Sequence[Gemm],
    shape: BlockShape,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    time_ms: TimeMs,
) -> GemmChoices:
    """The fastest correct candidate for each step and number of rows. The first candidate, which must be
    torch's, is kept unless another is faster by more than TIE_SHARE. A candidate that raises or gives wrong
    results is excluded from the step, with a warning, at every number of rows, because a choice is also used
    for numbers between the measured ones. torch's own remains a candidate if it could be timed."""
    measured: dict[tuple[Step, int], dict[str, float]] = {}
    excluded: set[tuple[str, str]] = set()
    for num_rows, step in itertools.product(sizes, STEPS):
        trial = make_trial(step, shape, num_rows, dtype, device)
        samples: dict[str, list[float]] = {}
        # The candidates alternate, because later runs find the device warmer and slower.
        for gemm in [gemm for gemm in candidates if step in gemm.steps] * NUM_ROUNDS:
            if (gemm.name, step) in excluded:
                continue
            try:
                samples.setdefault(gemm.name, []).append(checked_time_ms(trial, gemm, time_ms))
            except Exception as error:  # a library may raise any error
                excluded.add((gemm.name, step))
                reason = str(error).strip().splitlines()[:1]
                log.warning("gemm_excluded", gemm=gemm.name, step=step, num_rows=num_rows, reason=reason)
        measured[step, num_rows] = {
            name: statistics.median(values) for name, values in samples.items() if values
        }
    chosen: dict[Step, dict[int, Gemm]] = {step: {} for step in STEPS}
    for (step, num_rows), times in measured.items():
        others = [gemm for gemm in candidates[1:] if (gemm.name, step) not in excluded]
        chosen[step][num_rows] = fastest([candidates[0], *others], times)
        log.info(
            "gemm_selected",
            step=step,
            num_rows=num_rows,
            gemm=chosen[step][num_rows].name,
            microseconds={name: round(ms * 1e3, 1) for name, ms in times.items()},
        )
    return GemmChoices(chosen)


def check_gemms(
    names: Mapping[str, Mapping[str, str]],
    candidates: Sequence[Gemm],
    shape: BlockShape,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> GemmChoices:
    """The gemm that ``names`` states for each step and number of rows: checked against float32, but not
    timed. Raises ConfigurationError for a product without a known gemm and for a gemm that fails."""
    by_name = {gemm.name: gemm for gemm in candidates}
    chosen: dict[Step, dict[int, Gemm]] = {step: {} for step in STEPS}
    for num_rows, step in itertools.product(sizes, STEPS):
        name = names.get(step, {}).get(str(num_rows), "")
        if name not in by_name or step not in by_name[name].steps:
            raise ConfigurationError(
                f"no such gemm for {step} of {num_rows} rows: {name!r}; available are {sorted(by_name)}"
            )
        try:
            check_error(make_trial(step, shape, num_rows, dtype, device), by_name[name])
        except Exception as error:  # a library may raise any error
            raise ConfigurationError(f"gemm {name} fails for {step} of {num_rows} rows: {error}") from error
        chosen[step][num_rows] = by_name[name]
    return GemmChoices(chosen)


def checked_time_ms(trial: Trial, gemm: Gemm, time_ms: TimeMs) -> float:
    """Milliseconds of one call. Raises ValueError for an error above TOLERANCE."""
    check_error(trial, gemm)
    return time_ms(lambda: trial.run(gemm)) / NUM_CALLS


def check_error(trial: Trial, gemm: Gemm) -> None:
    """Raises ValueError for an error above TOLERANCE."""
    error = trial.error(gemm)
    if not error <= TOLERANCE:
        raise ValueError(f"relative error {error:.1e} against float32, at most {TOLERANCE:.0e} passes")


def fastest(candidates: Sequence[Gemm], times: dict[str, float]) -> Gemm:
    """The fastest candidate; the first one unless another is faster by more than TIE_SHARE."""
    first = candidates[0]
    best = min(candidates, key=lambda gemm: times.get(gemm.name, float("inf")))
    limit = times.get(first.name, float("inf")) * (1 - TIE_SHARE)
    return best if times.get(best.name, float("inf")) < limit else first


def make_trial(
    step: Step, shape: BlockShape, num_rows: int, dtype: torch.dtype, device: torch.device
) -> Trial:
    """A trial of the product that ``step`` belongs to, with random weights and rows."""
    from encoder_service.towers import kernels  # needs triton, which only the fused path requires

    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    width_in, width_out = {
        "rotate": (hidden, 3 * hidden),
        "gelu": (hidden, intermediate),
        "add_attention": (hidden, hidden),
        "add_mlp": (intermediate, hidden),
    }[step]

    def random(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*sizes, device=device) * scale).to(dtype)

    x_PK = random(num_rows, width_in)
    layers = [
        layer_of(random(width_out, width_in, scale=width_in**-0.5), random(width_out), step, shape)
        for _ in range(NUM_CALLS)
    ]
    residual_PN = random(num_rows, width_out)
    ones = torch.ones(width_out, dtype=dtype, device=device)
    rotary = rotary_of(shape, num_rows, device) if step == "rotate" else None
    wide = linear(x_PK.float(), layers[0].weight.float(), layers[0].bias.float())

    def call(gemm: Gemm, layer: Weights, residual: torch.Tensor) -> torch.Tensor | None:
        if rotary is not None:
            return gemm.rotated(x_PK, layer, rotary)
        return gemm.gelu(x_PK, layer) if step == "gelu" else gemm.add_to(residual, x_PK, layer)

    def run(gemm: Gemm) -> None:
        residual = residual_PN.clone()
        for layer in layers:
            delta = call(gemm, layer, residual)
            if step.startswith("add"):
                kernels.add_norm(residual, delta, ones, ones, 1e-6)

    def error(gemm: Gemm) -> float:
        residual = residual_PN.clone()
        found = call(gemm, layers[0], residual)
        if rotary is not None:
            expected = kernels.rotate_qkv_(
                wide.clone(), rotary.coords, rotary.cos, rotary.sin, rotary.layout, rotary.num_heads
            )
            if gemm.wants_pairs:
                expected = pair_rows(expected.t(), shape.num_heads).t()
        elif step == "gelu":
            expected = gelu(wide, approximate="tanh")
        else:
            expected = residual_PN.float() + wide
            found = residual if found is None else residual + found
        assert found is not None
        return float((found.float() - expected).norm() / expected.norm())

    return Trial(run, error)


def layer_of(weight: torch.Tensor, bias: torch.Tensor, step: Step, shape: BlockShape) -> Weights:
    if step != "rotate":
        return Weights(weight, bias)
    return Weights(weight, bias, (pair_rows(weight, shape.num_heads), pair_rows(bias, shape.num_heads)))


def rotary_of(shape: BlockShape, num_rows: int, device: torch.device) -> Rotary:
    """The positions of consecutive square frames."""
    place = torch.arange(num_rows, device=device) % SIDE**2
    sides = torch.full_like(place, SIDE)
    coords = torch.stack([place // SIDE, place % SIDE, sides, sides], dim=1).to(torch.int32)
    frequencies = inverse_frequencies(shape.hidden_size // shape.num_heads, shape.rope_theta)
    angles = torch.arange(SIDE, dtype=torch.float32)[:, None] * frequencies
    return Rotary(
        coords,
        angles.cos().to(device),
        angles.sin().to(device),
        shape.layout,
        shape.num_heads,
        turns_of(frequencies, shape.layout, shape.num_heads).to(device),
    )
