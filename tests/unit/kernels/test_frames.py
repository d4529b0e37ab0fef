"""MoonViT's tail against the plain tower's steps, stills and clips mixed."""

from __future__ import annotations

import pytest
import torch

from encoder_service.towers.kernels import merge_frames_norm
from encoder_service.towers.layers import Norm
from tests.unit.kernels.references import assert_near, norm_float32, padded_rows, randn


def mixed_merge(num_frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """index and weight [7, F]: a clip of F frames of 4 patches, then a still of 3 whose unused entries repeat
    its own patch with weight zero."""
    clip = torch.arange(4)[:, None] + 4 * torch.arange(num_frames)
    still = (4 * num_frames + torch.arange(3)[:, None]).expand(3, num_frames)
    weight = torch.zeros(7, num_frames)
    weight[:4], weight[4:, 0] = 1 / num_frames, 1
    return torch.cat([clip.flip(0), still]), weight


def plain_merge(
    x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, final: Norm, pre: Norm | None
) -> torch.Tensor:
    """MoonViTTower's steps with their roundings, up to the last norm; float32."""
    normed = norm_float32(x, *final).to(x.dtype)
    merged = (normed[index].float() * weight[..., None]).sum(1).to(x.dtype)
    return merged.float() if pre is None else norm_float32(merged, *pre)


def on(device: torch.device, norm: Norm) -> Norm:
    bias = None if norm.bias is None else norm.bias.to(device)
    return Norm(norm.weight.to(device), bias, norm.eps)


@pytest.mark.parametrize(
    ("width", "dtype"), [(64, torch.float32), (64, torch.float16), (1152, torch.bfloat16)]
)
@pytest.mark.parametrize(("num_frames", "has_delta"), [(1, True), (3, True), (2, False)])
@pytest.mark.parametrize("is_k3", [False, True])
def test_merge_equals_the_plain_steps(
    is_k3: bool,
    num_frames: int,
    has_delta: bool,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    """is_k3: an RMSNorm, and no norm after the mean."""
    index, weight = mixed_merge(num_frames)
    num_patches = 4 * num_frames + 3
    x, delta = (randn(generator, num_patches, width).to(dtype) for _ in range(2))
    final = Norm(randn(generator, width).to(dtype), randn(generator, width).to(dtype), 1e-5)
    pre: Norm | None = Norm(randn(generator, width).to(dtype), randn(generator, width).to(dtype), 1e-6)
    if is_k3:
        final, pre = final._replace(bias=None), None
    held, held_delta = padded_rows(x, device), padded_rows(delta, device)
    merged = merge_frames_norm(
        held,
        held_delta if has_delta else None,
        index.int().to(device),
        weight.to(device),
        on(device, final),
        None if pre is None else on(device, pre),
    )
    assert torch.equal(held.cpu(), x)
    assert torch.equal(held_delta.cpu(), delta)
    expected = plain_merge(x + delta if has_delta else x, index, weight, final, pre)
    if dtype is torch.float32:
        assert_near(merged, expected)
    else:
        # A last bit of a norm or a mean that rounds the other way moves its own element by a step and its
        # row by far less: hardly any element may differ by more than one step of the result.
        merged = merged.cpu()
        step = torch.finfo(dtype).eps * expected.abs().clamp(min=1)
        error = (merged.float() - expected).abs()
        assert (error > step).float().mean() < 0.01
        assert (error < 8 * step).all()
