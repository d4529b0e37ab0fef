"""Every kernel in one CUDA graph: replays follow new inputs in the same memory."""

from __future__ import annotations

import pytest
import torch

from encoder_service.scheduler.buckets import Bucket
from encoder_service.towers.fused_inputs import FusedInputBuilder
from encoder_service.towers.kernels import (
    add_norm,
    embed_norm,
    expand_items,
    gelu_,
    merge_frames_norm,
    patchify_items,
    rotate_qkv_,
)
from encoder_service.towers.layers import Norm
from encoder_service.types import Grid
from tests.unit.kernels.references import EPS

WIDTH, HEADS, PATCHES = 144, 2, 16
# Frames cut, a still and a clip, a batch that fills its bucket with clips, and room left over.
BATCHES = ([Grid(1, 4, 4)], [Grid(1, 2, 2), Grid(2, 2, 2)], [Grid(2, 2, 4)], [Grid(1, 2, 2)])


def load_batch(items: torch.Tensor, sources: torch.Tensor, pixels: torch.Tensor, batch: int) -> None:
    """One of BATCHES into the memory that graphs read, with random pixels."""
    pixels.random_(256)
    build = FusedInputBuilder(lambda grid: None, merge_size=2, merges_time=True)
    inputs = build.prepare(BATCHES[batch])
    items.copy_(build.pad(inputs, Bucket(PATCHES, len(items), PATCHES, 2)).items)
    sources[:, 0] = items[:, 0] * (14 * 14 * 3)
    sources[:, 1] = items[:, 2]


@pytest.mark.gpu
def test_replays_equal_eager_launches(device: torch.device) -> None:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    norm = Norm(randn(WIDTH), randn(WIDTH), EPS)
    table, cos, sin = randn(36, WIDTH), torch.rand(4, 18, device=device), torch.rand(4, 18, device=device)
    items = torch.zeros(3, 5, dtype=torch.int32, device=device)
    sources = torch.zeros(3, 2, dtype=torch.int64, device=device)
    projection = randn(588, WIDTH) * 0.05
    qkv_weight, mlp_weight = randn(WIDTH, 3 * WIDTH) * 0.05, randn(WIDTH, 96) * 0.05
    half = (0.5, 0.5, 0.5)

    def step(pixels: torch.Tensor, patches: torch.Tensor) -> list[torch.Tensor]:
        patchify_items(
            pixels,
            items,
            sources,
            patches,
            half,
            half,
            1 / 255,
            patch_size=14,
            merge_size=2,
            temporal_patch_size=1,
            merges_time=True,
        )
        coords, _, index, weight = expand_items(
            items, PATCHES, merge_size=2, merges_time=True, num_merged=PATCHES, num_frames=2
        )
        assert index is not None
        assert weight is not None
        x = patches @ projection
        h = embed_norm(x, table, coords, *norm, mode="cubic", table_height=6, table_width=6)
        qkv = rotate_qkv_(h @ qkv_weight, coords, cos, sin, "interleaved", HEADS)
        delta = qkv[:, :WIDTH].contiguous()
        hidden = add_norm(x, delta, *norm) @ mlp_weight
        gelu_(hidden)
        merged = merge_frames_norm(x, delta, index, weight, norm, norm)
        return [hidden, merged, qkv]

    pixels = torch.empty(56 * 56 * 3, dtype=torch.uint8, device=device)
    patches = torch.empty(PATCHES, 588, device=device, dtype=torch.bfloat16)
    load_batch(items, sources, pixels, 0)
    step(pixels, patches)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(pixels, patches)
    for batch in range(len(BATCHES)):
        load_batch(items, sources, pixels, batch)
        graph.replay()
        replayed = [result.clone() for result in captured]
        for found, expected in zip(replayed, step(pixels, torch.empty_like(patches)), strict=True):
            assert torch.isfinite(expected).all()
            assert torch.equal(found, expected)
