"""Every installed attention backend against float32, in bfloat16 on a GPU: mixed lengths, one-row sequences,
empty slots, padding."""

from __future__ import annotations

import pytest
import torch

from encoder_service.towers.attention import AttentionBackend, available_backends
from encoder_service.towers.attention.available import NAMES
from tests.unit.towers.attention_cases import bounds_of, exact, packed, relative_error

MIXED = (70, 1, 16, 33, 1, 64)
# Relative Frobenius error. bfloat16 rounds probabilities and output to 8 bits: 2e-3 to 4e-3 on random data.
LIMIT = 8e-3
pytestmark = pytest.mark.gpu


def installed(name: str, device: torch.device, *, deterministic: bool = False) -> AttentionBackend:
    if device.type != "cuda":
        pytest.skip("runs with --device cuda")
    backends = {backend.name: backend for backend in available_backends(device, deterministic=deterministic)}
    if name not in backends:
        pytest.skip(f"{name} is not installed")
    return backends[name]


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("name", NAMES)
def test_installed_backends(device: torch.device, name: str, head_dim: int, planned: bool) -> None:
    """Rows near float32, padding finite, under a baked max_seqlen beyond every length."""
    backend = installed(name, device)
    for seqlens, num_patches in [(MIXED, 200), (MIXED, 185), ((1,), 8), ((300, 1, 784), 2000)]:
        total = sum(seqlens)
        q, k, v = packed(num_patches, 2, head_dim, dtype=torch.bfloat16, device=device)
        bounds = bounds_of(seqlens, empty=3, max_seqlen=num_patches, device=device)
        found = backend.attend(q, k, v, backend.plan(bounds, q.shape, q.dtype) if planned else bounds)
        assert found.shape == q.shape
        assert found.dtype == q.dtype
        assert relative_error(found[:total], exact(q, k, v, seqlens)) < LIMIT
        assert bool(found[total:].isfinite().all())


@pytest.mark.parametrize("name", NAMES)
def test_p31_rows_are_bit_equal_in_any_batch(device: torch.device, name: str) -> None:
    backend = installed(name, device, deterministic=True)
    q, k, v = packed(2048, 4, 72, dtype=torch.bfloat16, device=device)
    alone = backend.attend(q[:784], k[:784], v[:784], bounds_of((784,), device=device))
    batch = bounds_of((784, 1, 900, 64), empty=12, max_seqlen=2048, device=device)
    assert torch.equal(backend.attend(q, k, v, batch)[:784], alone)
