"""What gemms are measured on: each product of a block with the step that follows it, at a number of rows.

Owns the random inputs, the timed run and the expected result. A product is timed together with the pass that
its epilogue may save, as the blocks run them: the rotation after qkv, the norm after proj and fc2.
``available.py`` gives the gemms, ``selection.py`` measures them.

Shape legend: P patches, K input width, N output width, H heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn.functional import gelu, linear

from encoder_service.towers.gemm import STEPS, Gemm, Rotary, Step, Weights, aligned, pair_rows, turns_of
from encoder_service.towers.layers import BlockShape
from encoder_service.towers.rope import inverse_frequencies
from encoder_service.towers.selection import Case, Selection, Trial, relative_error

# Largest error on normal random values. Rounding gives 2e-3 to 4e-3.
TOLERANCE = 1e-2
# A library replaces torch if it is faster by more than this share.
TIE_SHARE = 0.01
# Calls in a timed run. Each has its own weights, because a block's weights are not in the cache in a tower
# either.
NUM_CALLS = 8
NUM_ROUNDS = 3
SIDE = 64


def gemm_selections(
    gemms: Sequence[Gemm], rows: Sequence[int], block: BlockShape, dtype: torch.dtype, device: torch.device
) -> dict[Step, Selection[Gemm]]:
    """For each step, chooses among the gemms that are tried for it, by number of rows. gemms: torch's first,
    which is also the fallback. Torch alone stands for a step that the block does not have: "gelu" if it
    is gated, "rotate" if it norms q and k first."""
    has_step = {"gelu": not block.is_gated, "rotate": not block.norms_qk}
    return {
        step: Selection(
            step,
            [gemm for gemm in gemms if step in gemm.steps] if has_step.get(step, True) else gemms[:1],
            [Case((count,), partial(make_trial, step, block, count, dtype, device)) for count in rows],
            TIE_SHARE,
            num_rounds=NUM_ROUNDS,
            fallback=gemms[0],
        )
        for step in STEPS
    }


def make_trial(
    step: Step, shape: BlockShape, num_rows: int, dtype: torch.dtype, device: torch.device
) -> Trial[Gemm]:
    """A trial of the product that ``step`` belongs to, with random weights and rows."""
    from encoder_service.towers import kernels  # needs triton, which only the fused path requires

    hidden, attention, intermediate = shape.hidden_size, shape.attention_width, shape.intermediate_size
    width_in, width_out = {
        "rotate": (hidden, 3 * attention),
        "gelu": (hidden, intermediate),
        "add_attention": (attention, hidden),
        "add_mlp": (aligned(intermediate) if shape.is_gated else intermediate, hidden),
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
        product = call(gemm, layers[0], residual)
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
            product = residual if product is None else residual + product
        assert product is not None
        return relative_error(product, expected)

    return Trial(error, run, TOLERANCE, NUM_CALLS)


def layer_of(weight: torch.Tensor, bias: torch.Tensor, step: Step, shape: BlockShape) -> Weights:
    if step != "rotate":
        return Weights(weight, bias)
    return Weights(weight, bias, (pair_rows(weight, shape.num_heads), pair_rows(bias, shape.num_heads)))


def rotary_of(shape: BlockShape, num_rows: int, device: torch.device) -> Rotary:
    """The positions of consecutive square frames."""
    index = torch.arange(num_rows, device=device) % SIDE**2
    sides = torch.full_like(index, SIDE)
    coords = torch.stack([index // SIDE, index % SIDE, sides, sides], dim=1).to(torch.int32)
    frequencies = inverse_frequencies(shape.head_dim, shape.rope_theta)
    angles = torch.arange(SIDE, dtype=torch.float32)[:, None] * frequencies
    return Rotary(
        coords,
        angles.cos().to(device),
        angles.sin().to(device),
        shape.layout,
        shape.num_heads,
        turns_of(frequencies, shape.layout, shape.num_heads).to(device),
    )
