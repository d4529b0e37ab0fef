"""The fused CUDA path of both towers: the plain tower's weights and numbers, in fewer passes over memory.

Owns the order of fused operations and the per-patch metadata they read. The plain towers
(qwen3_vl.py, moonvit.py) are the readable form of the same computation, and tests hold the two equal.

What is fused: bias and tanh-GELU into the products, residual addition with the next LayerNorm, rotary
positions into the packed projection in place, position interpolation with the first LayerNorm. Positions are
computed on the device from each patch's coordinates, so that a batch needs a few bytes per patch from the
host instead of tables of angles and weights.

Shape legend: P patches, S attention sequences, R rows, F frames averaged into one row, H heads, d head_dim,
E tower width, M = E * merge^2, D language-model width, L deepstack levels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch.nn.functional import gelu, linear

from encoder_service.errors import GridMismatch
from encoder_service.towers.attention import AttentionBackend, SequenceBounds
from encoder_service.towers.layers import Block, Merger
from encoder_service.towers.moonvit import MoonViTTower, frame_rows, merge_tables
from encoder_service.towers.positions import FrameTableCache, FrameTables, merge_order, raster_coordinates
from encoder_service.towers.qwen3_vl import Qwen3VLTower
from encoder_service.towers.rope import inverse_frequencies
from encoder_service.towers.tower import Tower
from encoder_service.types import Grid

# Longest side, in patches, that the rotary table covers.
MAX_SIDE = 32_768
COORDINATE_CACHE_BYTES = 64 << 20
PADDING_COORDINATES = (0, 0, 1, 1)


class BucketShape(Protocol):
    """What a bucket fixes; ``scheduler.buckets.Bucket`` is one."""

    @property
    def num_patches(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def max_seqlen(self) -> int: ...
    @property
    def num_frames(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class FusedInputs:
    """Metadata of one packed batch; the device computes everything else from it.

    coords: int32 [P, 4], row, column, height and width of each patch's frame; padding is (0, 0, 1, 1).
    cu_seqlens: int32 [S + 1]; padded slots repeat the last real bound. seqlens: the real lengths on the host.
    max_seqlen: their maximum, or the bucket's bound. frame_index: int32 [P], merge_index: int32
    [R * merge^2, F], merge_weight: float32 of the same shape (MoonViT only, otherwise None).
    pixel_values: [P, patch_dim], or None until ``with_pixels``.
    """

    coords: torch.Tensor
    cu_seqlens: torch.Tensor
    seqlens: tuple[int, ...]
    max_seqlen: int
    frame_index: torch.Tensor | None = None
    merge_index: torch.Tensor | None = None
    merge_weight: torch.Tensor | None = None
    pixel_values: torch.Tensor | None = None

    @property
    def num_patches(self) -> int:
        return self.coords.shape[0]

    @property
    def num_frames(self) -> int:
        """F, 1 where frames are not averaged."""
        return 1 if self.merge_index is None else self.merge_index.shape[1]

    def with_pixels(self, pixel_values: torch.Tensor) -> FusedInputs:
        """The same batch with its pixels [P, patch_dim]."""
        return dataclasses.replace(self, pixel_values=pixel_values)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by field name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device, *, non_blocking: bool = False) -> FusedInputs:
        """The same batch with every tensor on ``device``."""
        moved = {name: value.to(device, non_blocking=non_blocking) for name, value in self.tensors().items()}
        return dataclasses.replace(self, **moved)  # type: ignore[arg-type]


class FusedTower(Tower):
    """A plain tower's weights behind the fused forward pass. The plain tower stays usable beside it."""

    def __init__(self, plain: Qwen3VLTower | MoonViTTower, attention: AttentionBackend) -> None:
        super().__init__()
        from encoder_service.towers import kernels  # triton, which only this path needs

        self._kernels = kernels
        self.plain = plain
        self.attention = attention
        self.family = plain.family
        self.patch_size = plain.patch_size
        self.merge_size = plain.merge_size
        self.temporal_patch_size = plain.temporal_patch_size
        self.patch_dim = plain.patch_dim
        self.out_width = plain.out_width
        self.num_deepstack_levels = plain.num_deepstack_levels
        self.merges_time = plain.merges_time
        self.num_heads = plain.config.num_heads
        frequencies = inverse_frequencies(plain.config.hidden_size // self.num_heads, plain.config.rope_theta)
        angles = torch.arange(MAX_SIDE, dtype=torch.float32)[:, None] * frequencies
        self.rope_cos: torch.Tensor
        self.rope_sin: torch.Tensor
        self.register_buffer("rope_cos", angles.cos().to(plain.device), persistent=False)
        self.register_buffer("rope_sin", angles.sin().to(plain.device), persistent=False)
        self._coordinates = FrameTableCache(self._build_coordinates, COORDINATE_CACHE_BYTES)

    # -- host ------------------------------------------------------------------------------------------

    def check_grid(self, grid: Grid) -> None:
        self.plain.check_grid(grid)
        if max(grid.h, grid.w) > MAX_SIDE:
            raise GridMismatch(
                f"grid {list(grid)} has a side of {max(grid.h, grid.w)} patches, the longest is {MAX_SIDE}",
                found=max(grid.h, grid.w),
                limit=MAX_SIDE,
            )

    def prepare(self, grids: Sequence[Grid]) -> FusedInputs:  # type: ignore[override]
        """Coordinates and bounds of a packed batch, items in the order given. Raises GridMismatch."""
        if not grids:
            raise GridMismatch("the batch has 0 items, needs at least 1", found=0)
        for grid in grids:
            self.check_grid(grid)
        tables = [self._coordinates.get(grid.h, grid.w) for grid in grids]
        coords = torch.cat(
            [table.position_index.repeat(grid.t, 1) for grid, table in zip(grids, tables, strict=True)]
        )
        if self.merges_time:
            seqlens = [grid.num_patches for grid in grids]
            index, weight = merge_tables(grids, tables)
            merge = {
                "frame_index": torch.cat([frame_rows(grid) for grid in grids]).to(torch.int32),
                "merge_index": index.to(torch.int32),
                "merge_weight": weight.float(),
            }
        else:
            seqlens = [grid.h * grid.w for grid in grids for _ in range(grid.t)]
            merge = {}
        return FusedInputs(
            coords=coords,
            cu_seqlens=torch.tensor(list(accumulate(seqlens, initial=0)), dtype=torch.int32),
            seqlens=tuple(seqlens),
            max_seqlen=max(seqlens),
            **merge,
        )

    def pad(self, inputs: FusedInputs, bucket: BucketShape) -> FusedInputs:
        """The batch in a bucket's static shapes, still on the host. Padding patches belong to no sequence
        and to no row that is returned. The batch must fit the bucket."""
        num_patches, num_sequences = inputs.num_patches, len(inputs.seqlens)
        assert num_patches <= bucket.num_patches
        assert num_sequences <= bucket.num_sequences
        assert inputs.max_seqlen <= bucket.max_seqlen
        extra = bucket.num_patches - num_patches
        padding = torch.tensor(PADDING_COORDINATES, dtype=torch.int32).expand(extra, 4)
        tail = inputs.cu_seqlens[-1:].expand(bucket.num_sequences - num_sequences)
        padded = dataclasses.replace(
            inputs,
            coords=torch.cat([inputs.coords, padding]),
            cu_seqlens=torch.cat([inputs.cu_seqlens, tail]),
            max_seqlen=bucket.max_seqlen,
        )
        if inputs.merge_index is None or inputs.merge_weight is None or inputs.frame_index is None:
            return padded
        assert inputs.num_frames <= bucket.num_frames
        # A merge reads its own first patch wherever it has no frame, and so does all padding: row zero.
        # The bucket has a place for every patch, which is what stills need; clips leave some unused.
        index = torch.zeros(bucket.num_patches, bucket.num_frames, dtype=torch.int32)
        weight = torch.zeros(bucket.num_patches, bucket.num_frames)
        used, frames = inputs.merge_index.shape
        index[:used] = inputs.merge_index[:, :1]
        index[:used, :frames] = inputs.merge_index
        weight[:used, :frames] = inputs.merge_weight
        return dataclasses.replace(
            padded,
            frame_index=torch.nn.functional.pad(inputs.frame_index, (0, extra)),
            merge_index=index,
            merge_weight=weight,
        )

    def _build_coordinates(self, height: int, width: int) -> FrameTables:
        """int32 [N, 4] in the order patches arrive; MoonViT's merge order beside it."""
        rows, columns = raster_coordinates(height, width)
        order = merge_order(height, width, self.merge_size)
        if not self.merges_time:
            rows, columns = rows[order], columns[order]
        sides = torch.tensor([height, width]).expand(height * width, 2)
        coords = torch.cat([rows[:, None], columns[:, None], sides], dim=1).to(torch.int32)
        empty = torch.empty(0)
        return FrameTables(coords, empty, empty, empty, order if self.merges_time else None)

    # -- device ----------------------------------------------------------------------------------------

    def forward(self, inputs: FusedInputs) -> torch.Tensor:  # type: ignore[override]
        assert inputs.pixel_values is not None
        plain, kernels = self.plain, self._kernels
        blocks: list[Block] = list(plain.blocks)  # type: ignore[arg-type]
        x_PE = linear(inputs.pixel_values.to(self.dtype), plain.patch_embed.weight, plain.patch_embed.bias)
        h_PE = self._embed(x_PE, inputs, blocks[0])
        head_dim = x_PE.shape[1] // self.num_heads
        bounds = self.attention.plan(inputs, (x_PE.shape[0], self.num_heads, head_dim), x_PE.dtype)
        levels_RD: list[torch.Tensor] = []
        for index, block in enumerate(blocks):
            delta_PE = self._attend(h_PE, block, inputs.coords, bounds)
            h_PE = kernels.add_norm(x_PE, delta_PE, *norm_of(block.norm2))
            delta_PE = linear(linear_gelu(h_PE, block.fc1), block.fc2.weight, block.fc2.bias)
            if index + 1 < len(blocks):
                h_PE = kernels.add_norm(x_PE, delta_PE, *norm_of(blocks[index + 1].norm1))
            else:
                h_PE = self._last_norm(x_PE, delta_PE, inputs)
            # From here on x_PE holds the block's output.
            if isinstance(plain, Qwen3VLTower) and index in plain.config.deepstack_visual_indexes:
                level = plain.config.deepstack_visual_indexes.index(index)
                levels_RD.append(self._merge_level(x_PE, plain.deepstack_mergers[level]))  # type: ignore[arg-type]
        merger = plain.merger if isinstance(plain, Qwen3VLTower) else plain.projector
        main_RD = self._merge(h_PE, merger)
        return main_RD if not levels_RD else torch.cat([main_RD, *levels_RD], dim=-1)

    def _embed(self, x_PE: torch.Tensor, inputs: FusedInputs, first: Block) -> torch.Tensor:
        """Adds the learned positions to x in place; the first block's normed input."""
        plain = self.plain
        norm = norm_of(first.norm1)
        if isinstance(plain, Qwen3VLTower):
            side = plain.config.position_side
            return self._kernels.embed_norm(
                x_PE,
                plain.pos_embed,
                inputs.coords,
                *norm,
                mode="linear",
                table_height=side,
                table_width=side,
            )
        return self._kernels.embed_norm(
            x_PE,
            plain.pos_embed,
            inputs.coords,
            *norm,
            mode="cubic",
            table_height=plain.config.position_height,
            table_width=plain.config.position_width,
            frame_table=plain.frame_embed,
            frame_index=inputs.frame_index,
        )

    def _attend(
        self, h_PE: torch.Tensor, block: Block, coords: torch.Tensor, bounds: SequenceBounds
    ) -> torch.Tensor:
        qkv = linear(h_PE, block.qkv.weight, block.qkv.bias)
        layout: Literal["blocked", "interleaved"] = "interleaved" if self.merges_time else "blocked"
        self._kernels.rotate_qkv_(qkv, coords, self.rope_cos, self.rope_sin, layout, self.num_heads)
        q_PHd, k_PHd, v_PHd = qkv.view(qkv.shape[0], 3, self.num_heads, -1).unbind(1)
        out_PHd = self.attention.attend(q_PHd, k_PHd, v_PHd, bounds)
        return linear(out_PHd.flatten(1), block.proj.weight, block.proj.bias)

    def _last_norm(self, x_PE: torch.Tensor, delta_PE: torch.Tensor, inputs: FusedInputs) -> torch.Tensor:
        """The merger's normed input [R * merge^2, E], after adding the last block's delta."""
        plain = self.plain
        if isinstance(plain, Qwen3VLTower):
            return self._kernels.add_norm(x_PE, delta_PE, *norm_of(plain.merger.norm))
        assert inputs.merge_index is not None
        assert inputs.merge_weight is not None
        return self._kernels.merge_frames_norm(
            x_PE,
            delta_PE,
            inputs.merge_index,
            inputs.merge_weight,
            self._kernels.Norm(*norm_of(plain.final_norm)),
            self._kernels.Norm(*norm_of(plain.projector.norm)),
        )

    def _merge(self, h_PE: torch.Tensor, merger: Merger) -> torch.Tensor:
        """Rows [R, D] of normed patches in merge order."""
        u_RM = linear(h_PE.view(-1, merger.merged_width), merger.fc1.weight, merger.fc1.bias)
        return linear(self._kernels.gelu_(u_RM, "none"), merger.fc2.weight, merger.fc2.bias)

    def _merge_level(self, x_PE: torch.Tensor, merger: Merger) -> torch.Tensor:
        """Rows [R, D] of one deepstack level; its norm spans the merged patches."""
        x_RM = x_PE.view(-1, merger.merged_width)
        return self._merge(self._kernels.layer_norm(x_RM, *norm_of(merger.norm)), merger)


def norm_of(norm: torch.nn.LayerNorm) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Weight, bias and epsilon."""
    return norm.weight, norm.bias, norm.eps


def linear_gelu(x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
    """tanh-GELU of a linear layer: on a GPU in the product's epilogue (cuBLASLt's GELU is the tanh form)."""
    if x.is_cuda:
        return torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
    return gelu(linear(x, layer.weight, layer.bias), approximate="tanh")
