"""Every kernel in one CUDA graph: replays follow new inputs in the same memory."""

from __future__ import annotations

import pytest
import torch

from encoder_service.towers.kernels import (
    Norm,
    add_norm,
    add_norm_quantize,
    embed_norm,
    gelu_,
    gelu_quantize,
    merge_frames_norm,
    patchify_packed,
    quantize_rows,
    rotate_qkv_,
)
from tests.unit.kernels.references import EPS

WIDTH, HEADS, PATCHES = 144, 2, 16


@pytest.mark.gpu
def test_replays_equal_eager_launches(device: torch.device) -> None:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    norm = Norm(randn(WIDTH), randn(WIDTH), EPS)
    table, cos, sin = randn(36, WIDTH), torch.rand(4, 18, device=device), torch.rand(4, 18, device=device)
    rows, columns = torch.arange(4).repeat_interleave(4), torch.arange(4).repeat(4)
    coords = torch.stack([rows, columns, torch.full((16,), 4), torch.full((16,), 4)], 1).int().to(device)
    start = torch.zeros(PATCHES, 1, dtype=torch.int64, device=device)
    index = torch.randperm(PATCHES, device=device)[:, None]
    weight = torch.ones(PATCHES, 1, device=device)
    projection = randn(588, WIDTH) * 0.05
    qkv_weight, mlp_weight = randn(WIDTH, 3 * WIDTH) * 0.05, randn(WIDTH, 96) * 0.05
    half = (0.5, 0.5, 0.5)

    def step(pixels: torch.Tensor, patches: torch.Tensor) -> list[torch.Tensor]:
        patchify_packed(pixels, start, coords, patches, half, half, 1 / 255, patch_size=14)
        x = patches @ projection
        h = embed_norm(x, table, coords, *norm, mode="cubic", table_height=6, table_width=6)
        qkv = rotate_qkv_(h @ qkv_weight, coords, cos, sin, "interleaved", HEADS)
        delta = qkv[:, :WIDTH].contiguous()
        hidden = add_norm(x, delta, *norm) @ mlp_weight
        fp8 = [*add_norm_quantize(x, delta, *norm), *gelu_quantize(hidden, "tanh"), *quantize_rows(qkv)]
        gelu_(hidden, "none")
        merged = merge_frames_norm(x, delta, index, weight, norm, norm)
        return [hidden, merged, qkv, *(result.float() for result in fp8)]

    pixels = torch.empty(56 * 56 * 3, dtype=torch.uint8, device=device)
    patches = torch.empty(PATCHES, 588, device=device, dtype=torch.bfloat16)
    pixels.random_(256)
    step(pixels, patches)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(pixels, patches)
    for _ in range(3):
        pixels.random_(256)
        graph.replay()
        replayed = [result.clone() for result in captured]
        for found, expected in zip(replayed, step(pixels, torch.empty_like(patches)), strict=True):
            assert torch.isfinite(expected).all()
            assert torch.equal(found, expected)
