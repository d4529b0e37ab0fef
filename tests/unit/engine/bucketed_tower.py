"""A small tower with the fused path's seam: rows that depend on every field, in plain tensor operations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from encoder_service.towers.fused_inputs import BucketShape, FusedInputBuilder, FusedInputs
from encoder_service.types import Grid
from tests.unit.towers.host_tables import grids_of, host_coords, host_frame_index, host_merge

PATCH_DIM = 6
HIDDEN = 8
WIDTH = 5


class SmallTower:
    """Two layers in which each patch takes its sequence's mean. Patches of no sequence become NaN, as
    memory that no kernel writes may be."""

    patch_dim = PATCH_DIM
    merge_size = 2
    width = WIDTH
    dtype = torch.float32

    def __init__(self, *, merges_time: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self.merges_time = merges_time
        self.embed = torch.randn(PATCH_DIM, HIDDEN, generator=generator)
        self.position = torch.randn(4, HIDDEN, generator=generator) / 10
        self.merge = torch.randn(4 * HIDDEN, WIDTH, generator=generator)
        self.forwards: list[FusedInputs] = []
        self.inputs = FusedInputBuilder(lambda grid: None, merge_size=2, merges_time=merges_time)

    def prepare(self, grids: Sequence[Grid]) -> FusedInputs:
        return self.inputs.prepare(grids)

    def pad(self, inputs: FusedInputs, bucket: BucketShape) -> FusedInputs:
        return self.inputs.pad(inputs, bucket)

    def __call__(self, inputs: FusedInputs) -> torch.Tensor:
        self.forwards.append(inputs)
        assert inputs.pixel_values is not None
        grids = grids_of(inputs.items)
        coords = host_coords(grids, inputs.num_patches, self.merge_size, self.merges_time)
        x = inputs.pixel_values @ self.embed + coords.float() @ self.position
        if self.merges_time:
            x = x + host_frame_index(grids, inputs.num_patches)[:, None].float()
        bounds = inputs.cu_seqlens.tolist()
        for _ in range(2):
            mixed = torch.full_like(x, float("nan"))
            for start, end in pairwise(bounds):
                if end > start:
                    assert end - start <= inputs.max_seqlen
                    mixed[start:end] = (x[start:end] + x[start:end].mean(0)).tanh()
            x = mixed
        if self.merges_time:
            num_merged = inputs.num_rows * self.merge_size**2
            index, weight = host_merge(grids, num_merged, inputs.num_frames, self.merge_size)
            x = (x[index.long()] * weight[..., None]).sum(1)
        return x.view(-1, 4 * HIDDEN) @ self.merge
