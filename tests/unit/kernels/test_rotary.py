"""In-place rotation of packed projections against rope.py, in both families' orders."""

from __future__ import annotations

import pytest
import torch

from encoder_service.towers.kernels import rotate_qkv_
from encoder_service.towers.layers import Norm
from encoder_service.towers.rope import RotaryLayout, inverse_frequencies, rotary_tables, rotate
from tests.unit.kernels.references import DTYPES, assert_near, padded_rows, randn

THETA = 10_000.0
MAX_SIDE = 50


def coordinate_tables(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin by coordinate and frequency, float32 [MAX_SIDE, d/4]."""
    angles = torch.arange(MAX_SIDE)[:, None] * inverse_frequencies(head_dim, THETA)
    return angles.cos(), angles.sin()


def random_coords(generator: torch.Generator, num_patches: int) -> torch.Tensor:
    position = torch.randint(MAX_SIDE, (num_patches, 2), generator=generator, dtype=torch.int32)
    return torch.cat([position, position + 1], dim=1)


def rotated(
    qkv: torch.Tensor, coords: torch.Tensor, layout: RotaryLayout, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [P, H, d]; q and k rotated, float32."""
    q, k, v = qkv.view(qkv.shape[0], 3, num_heads, -1).unbind(1)
    cos, sin = rotary_tables(coords[:, 0].long(), coords[:, 1].long(), q.shape[-1], THETA, layout)
    return rotate(q.float(), cos, sin), rotate(k.float(), cos, sin), v


@pytest.mark.parametrize("layout", ["blocked", "interleaved"])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype"),
    [
        *((3, 64, dtype) for dtype in DTYPES),
        (16, 72, torch.bfloat16),
        (2, 80, torch.bfloat16),
        (5, 8, torch.float32),
    ],
)
def test_rotation_equals_the_plain_path(
    num_heads: int,
    head_dim: int,
    layout: RotaryLayout,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    """Rows lie apart; a padding row stands at (0, 0), where nothing turns."""
    num_patches = 9
    qkv = randn(generator, num_patches, 3 * num_heads * head_dim).to(dtype)
    coords = random_coords(generator, num_patches)
    coords[7:] = torch.tensor([0, 0, 1, 1])
    cos, sin = (table.to(device) for table in coordinate_tables(head_dim))
    held = padded_rows(qkv, device)
    result = rotate_qkv_(held, coords.to(device), cos, sin, layout, num_heads)
    assert result is held
    assert torch.equal(held[7:].cpu(), qkv[7:])
    q, k, v = held.cpu().reshape(num_patches, 3, num_heads, head_dim).unbind(1)
    expected_q, expected_k, expected_v = rotated(qkv, coords, layout, num_heads)
    assert_near(q, expected_q)
    assert_near(k, expected_k)
    assert torch.equal(v, expected_v)


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype"), [(3, 64, torch.float32), (4, 72, torch.bfloat16)]
)
def test_q_and_k_are_normed_first(
    num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Each head for itself, q and k with weights of their own; the norm is rounded as the plain tower's."""
    num_patches = 5
    qkv = (randn(generator, num_patches, 3 * num_heads * head_dim) * 3).to(dtype)
    coords = random_coords(generator, num_patches)
    cos, sin = (table.to(device) for table in coordinate_tables(head_dim))
    weights = [(1 + 0.2 * randn(generator, head_dim)).to(dtype) for _ in range(2)]
    norms = tuple(Norm(weight.to(device), None, 1e-5) for weight in weights)
    assert len(norms) == 2
    held = padded_rows(qkv, device)
    rotate_qkv_(held, coords.to(device), cos, sin, "blocked", num_heads, norms=norms)
    q, k, v = qkv.view(num_patches, 3, num_heads, head_dim).unbind(1)
    normed = [
        torch.nn.functional.rms_norm(part.double(), (head_dim,), weight.double(), 1e-5).to(dtype)
        for part, weight in zip((q, k), weights, strict=True)
    ]
    expected_q, expected_k, _ = rotated(torch.stack([*normed, v], 1).flatten(1), coords, "blocked", num_heads)
    found_q, found_k, found_v = held.cpu().reshape(num_patches, 3, num_heads, head_dim).unbind(1)
    assert torch.equal(found_v, v)
    tolerance = 2e-6 if dtype is torch.float32 else 2e-2
    for found, expected in ((found_q, expected_q), (found_k, expected_k)):
        assert (found.float() - expected).abs().max() < tolerance * expected.abs().max()
