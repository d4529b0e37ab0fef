"""The fused M-RoPE kernel and the torch version against the definition in float64.

The table of angles is part of both sides; that it is the reference's is seen in tests/parity/test_rotary.py.
"""

from __future__ import annotations

import pytest
import torch

from lm_adapter.prefill.rotary import MRopeLayout, RotaryTable, apply_mrope
from tests.unit.kernels.references import assert_near, randn

# q heads, k heads, head_dim, layout: Qwen3-VL 8B, Qwen3.5, Qwen2.5-VL 7B, shapes that divide by nothing.
CASES = {
    "qwen3_vl": (32, 8, 128, MRopeLayout((24, 20, 20), interleaved=True)),
    "qwen3_5": (16, 2, 256, MRopeLayout((11, 11, 10), interleaved=True)),
    "qwen2_5_vl": (28, 4, 128, MRopeLayout((16, 24, 24), interleaved=False)),
    "odd": (3, 1, 50, MRopeLayout((3, 5, 2), interleaved=False)),
    "interleaved_tail": (5, 5, 24, MRopeLayout((6, 2, 4), interleaved=True)),
    "one_axis": (1, 1, 8, MRopeLayout((4, 0, 0), interleaved=True)),
}
MAX_POSITIONS = 300


def table_of(layout: MRopeLayout, device: torch.device, max_positions: int = MAX_POSITIONS) -> RotaryTable:
    half = layout.rotary_dim // 2
    inv_freq = 1.0 / 1e6 ** (torch.arange(half) / half)
    return RotaryTable.build(layout, inv_freq, max_positions=max_positions, device=device)


def expected_rotation(x: torch.Tensor, positions: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Element by element, in float64, from the definition."""
    layout = table.layout
    half = layout.rotary_dim // 2
    cos_sin = table.cos_sin.cpu().double()
    rotated = x.double().clone()
    t, h, w = layout.sections
    for pair in range(half):
        if layout.interleaved:
            axis = {1: 1 if pair < 3 * h else 0, 2: 2 if pair < 3 * w else 0}.get(pair % 3, 0)
        else:
            axis = 0 if pair < t else 1 if pair < t + h else 2
        at = positions[axis].long()
        cos, sin = cos_sin[at, pair][:, None], cos_sin[at, pair + half][:, None]
        first, second = x[..., pair].double(), x[..., pair + half].double()
        rotated[..., pair] = first * cos - second * sin
        rotated[..., pair + half] = second * cos + first * sin
    return rotated.float()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.bfloat16) for case in CASES), ("odd", torch.float32), ("odd", torch.float16)],
)
def test_rotation_follows_its_definition(
    case: str, dtype: torch.dtype, backend: str, device: torch.device, generator: torch.Generator
) -> None:
    num_q_heads, num_k_heads, head_dim, layout = CASES[case]
    num_tokens = 7
    q = randn(generator, num_tokens, num_q_heads, head_dim).to(dtype)
    k = randn(generator, num_tokens, num_k_heads, head_dim).to(dtype)
    positions = torch.randint(MAX_POSITIONS, (3, num_tokens), generator=generator)
    table = table_of(layout, device)
    held_q, held_k = q.to(device, copy=True), k.to(device, copy=True)
    result = apply_mrope(held_q, held_k, positions.to(device), table, backend=backend)  # type: ignore[arg-type]
    assert result[0] is held_q
    assert result[1] is held_k
    assert_near(held_q, expected_rotation(q, positions, table))
    assert_near(held_k, expected_rotation(k, positions, table))
    rest = slice(layout.rotary_dim, None)
    assert torch.equal(held_q[..., rest].cpu(), q[..., rest])
    assert torch.equal(held_k[..., rest].cpu(), k[..., rest])
