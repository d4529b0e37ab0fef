"""The fused CUDA path of the towers: the plain tower's weights and results, with fewer passes over memory.

Owns the order of the fused operations. The plain towers (such as qwen3_vl.py) are the readable form of
the same computation, and tests compare the two. ``gemm`` chooses the library of the blocks' matrix products.

These operations are fused: bias and tanh-GELU with the products, the addition to the residual with the next
norm, rotary positions with the packed projection (in place), and position interpolation with the first norm.
The device computes positions from each patch's coordinates, and the coordinates from one row per item. So a
batch transfers a few bytes per item instead of tables of angles and weights.

Shape legend: P patches, S attention sequences, R rows, F frames averaged into one row, H heads, d head_dim,
E tower width, M = E * merge^2, D language-model width, L deepstack levels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn
from torch.nn.functional import linear, pad

from encoder_service.towers.attention import AttentionBackend
from encoder_service.towers.attention.backend import SequenceBounds
from encoder_service.towers.fused_inputs import (
    BucketShape,
    FusedInputBuilder,
    FusedInputs,
)
from encoder_service.towers.gemm import (
    TORCH_CHOICES,
    Gemm,
    GemmChoices,
    Rotary,
    Weights,
    aligned,
    pair_rows,
    turns_of,
)
from encoder_service.towers.layers import Block, Gated, GatedMerger, Merger, Norm, PlainTower, norm_of
from encoder_service.towers.positions import MAX_SIDE
from encoder_service.towers.rope import inverse_frequencies
from encoder_service.towers.selection import Choices
from encoder_service.towers.tower import Tower
from encoder_service.types import Grid

if TYPE_CHECKING:
    from encoder_service.towers.kernels import PatchTables

# Attention of queries, keys and values [P, H, d] within the sequences of a batch.
Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Batches up to this size leave part of the device idle, so mergers that run beside the blocks cost no time.
SIDE_STREAM_PATCHES = 8192


@dataclass(frozen=True)
class FusedBlock:
    """Parameters of one block. ``qkv`` may also hold its weight in pairs."""

    norm1: Norm
    qkv: Weights
    proj: Weights
    norm2: Norm
    fc1: Weights
    fc2: Weights
    gated: Gated | None
    qk_norms: tuple[Norm, Norm] | None

    @classmethod
    def of(cls, block: Block, num_paired_heads: int | None) -> FusedBlock:
        """num_paired_heads: heads of the qkv weight, which is copied into pairs; None for no copy. Widens the
        block's gated MLP in place, see ``align_gated``."""
        if block.gated is not None:
            align_gated(block)
        qkv, proj, fc1, fc2 = map(weights_of, (block.qkv, block.proj, block.fc1, block.fc2))
        if num_paired_heads is not None:
            paired = pair_rows(qkv.weight, num_paired_heads), pair_rows(qkv.bias, num_paired_heads)
            qkv = replace(qkv, paired=paired)
        qk_norms = None
        if block.q_norm is not None and block.k_norm is not None:
            qk_norms = norm_of(block.q_norm), norm_of(block.k_norm)
        norm1, norm2 = norm_of(block.norm1), norm_of(block.norm2)
        return cls(norm1, qkv, proj, norm2, fc1, fc2, block.gated, qk_norms)


def weights_of(layer: nn.Linear) -> Weights:
    """A layer without a bias gets one of zeros: the libraries add it in the epilogue, where it costs no
    time."""
    bias = layer.bias if layer.bias is not None else layer.weight.new_zeros(layer.out_features)
    return Weights(layer.weight, bias)


def align_gated(block: Block) -> None:
    """Widens a gated MLP with zeros to ``aligned`` width, in the block itself, so that no weight
    exists twice. Exact: silu(0) * 0 is 0, and so are its weights in fc2."""
    fc1, fc2 = block.fc1, block.fc2
    width = fc2.in_features
    missing = aligned(width) - width
    if not missing:
        return
    gates_and_ups = fc1.weight.view(2, width, -1)
    fc1.weight = nn.Parameter(pad(gates_and_ups, (0, 0, 0, missing)).flatten(0, 1), requires_grad=False)
    if fc1.bias is not None:
        biases = pad(fc1.bias.view(2, width), (0, missing)).flatten()
        fc1.bias = nn.Parameter(biases, requires_grad=False)
    fc2.weight = nn.Parameter(pad(fc2.weight, (0, missing)), requires_grad=False)
    fc1.out_features, fc2.in_features = 2 * (width + missing), width + missing


class FusedTower(Tower):
    """The fused forward pass with a plain tower's weights. The plain tower remains usable.

    attention: a backend, or the choice by number of patches and max_seqlen. gemms: the library for each
    product of a block, by number of rows.
    """

    def __init__(
        self,
        plain: PlainTower,
        attention: AttentionBackend | Choices[AttentionBackend],
        gemms: GemmChoices = TORCH_CHOICES,
    ) -> None:
        super().__init__()
        from encoder_service.towers import kernels  # needs triton, which only this path requires

        self._kernels = kernels
        self.plain = plain
        self.attention = attention
        self.gemms = gemms
        self.family = plain.family
        self.patch_size = plain.patch_size
        self.merge_size = plain.merge_size
        self.temporal_patch_size = plain.temporal_patch_size
        self.patch_dim = plain.patch_dim
        self.out_width = plain.out_width
        self.num_deepstack_levels = plain.num_deepstack_levels
        self.merges_time = plain.merges_time
        self.max_frames = plain.max_frames
        self.num_heads = plain.config.num_heads
        # Normed q and k cannot be rotated in the product's epilogue.
        wants_pairs = not plain.norms_qk and any(
            gemm.wants_pairs for gemm in gemms["rotate"].by_shape.values()
        )
        self._blocks = [
            FusedBlock.of(block, self.num_heads if wants_pairs else None)  # type: ignore[arg-type]
            for block in plain.blocks
        ]
        frequencies = inverse_frequencies(plain.config.head_dim, plain.config.rope_theta)
        angles = torch.arange(MAX_SIDE, dtype=torch.float32)[:, None] * frequencies
        self.rope_cos: torch.Tensor
        self.rope_sin: torch.Tensor
        self.register_buffer("rope_cos", angles.cos().to(plain.device), persistent=False)
        self.register_buffer("rope_sin", angles.sin().to(plain.device), persistent=False)
        self._turns: torch.Tensor | None = None
        if wants_pairs:
            self._turns = turns_of(frequencies, plain.rotary_layout, self.num_heads).to(plain.device)
        self._side_stream: torch.cuda.Stream | None = None
        if plain.device.type == "cuda":
            self._side_stream = torch.cuda.Stream(plain.device)  # type: ignore[no-untyped-call]
        self._inputs = FusedInputBuilder(
            plain.check_grid,
            merge_size=self.merge_size,
            merges_time=self.merges_time,
            window=plain.window,
        )

    @property
    def paired_bytes(self) -> int:
        """Device memory of the weights in pairs, which exist in addition to the plain tower's own."""
        return sum(tensor.nbytes for block in self._blocks for tensor in block.qkv.paired or ())

    # -- host ------------------------------------------------------------------------------------------

    def check_grid(self, grid: Grid) -> None:
        self._inputs.check_grid(grid)

    def prepare(self, grids: Sequence[Grid]) -> FusedInputs:  # type: ignore[override]
        """Item table and sequence bounds of a packed batch, items in the given order. Raises GridMismatch."""
        return self._inputs.prepare(grids)

    def pad(self, inputs: FusedInputs, bucket: BucketShape) -> FusedInputs:
        """The batch in a bucket's static shapes, on the host. See FusedInputBuilder.pad."""
        return self._inputs.pad(inputs, bucket)

    # -- device ----------------------------------------------------------------------------------------

    def forward(self, inputs: FusedInputs) -> torch.Tensor:  # type: ignore[override]
        assert inputs.pixel_values is not None
        plain, blocks = self.plain, self._blocks
        tables = self._kernels.expand_items(
            inputs.items,
            inputs.num_patches,
            merge_size=self.merge_size,
            merges_time=self.merges_time,
            num_merged=inputs.num_rows * self.merge_size**2,
            num_frames=inputs.num_frames,
            window=plain.window,
        )
        x_PE = linear(inputs.pixel_values.to(self.dtype), plain.patch_embed.weight, plain.patch_embed.bias)
        if tables.patch_order is not None:
            x_PE = x_PE.index_select(0, tables.patch_order)
        if plain.patch_norm is not None:
            x_PE = self._kernels.add_norm(x_PE, None, *norm_of(plain.patch_norm))
        h_PE = self._embed(x_PE, tables, blocks[0].norm1)
        full = self._planned(inputs, x_PE)
        windows = self._planned(inputs.windows, x_PE) if plain.window else full
        rotary = Rotary(
            tables.coords, self.rope_cos, self.rope_sin, plain.rotary_layout, self.num_heads, self._turns
        )
        gemms = {step: choices.nearest(x_PE.shape[0]) for step, choices in self.gemms.items()}
        mergers = plain.level_mergers
        levels = Levels(self._side_stream if x_PE.shape[0] <= SIDE_STREAM_PATCHES else None)
        for index, block in enumerate(blocks):
            attend = full if index in plain.full_blocks else windows
            # The delta has still to be added to the residual x_PE; None if the product has added it.
            delta_PE = gemms["add_attention"].add_to(
                x_PE, self._attended(h_PE, block, gemms["rotate"], rotary, attend), block.proj
            )
            h_PE = self._kernels.add_norm(x_PE, delta_PE, *block.norm2)
            delta_PE = gemms["add_mlp"].add_to(x_PE, self._activated(h_PE, block, gemms["gelu"]), block.fc2)
            if index + 1 < len(blocks):
                h_PE = self._kernels.add_norm(x_PE, delta_PE, *blocks[index + 1].norm1)
            else:
                h_PE = self._last_norm(x_PE, delta_PE, tables)
            # From here on, x_PE holds the block's output.
            if (merger := mergers.get(index)) is not None:
                assert merger.norm is not None
                h_RM = self._kernels.add_norm(x_PE.view(-1, merger.merged_width), None, *norm_of(merger.norm))
                levels.start(h_RM, functools.partial(self._merge, h_RM, merger))
        main_RD = self._merge(h_PE, plain.merger)
        if tables.row_order is not None:
            main_RD = main_RD.index_select(0, tables.row_order)
        levels_RD = levels.finish()
        return main_RD if not levels_RD else torch.cat([main_RD, *levels_RD], dim=-1)

    def _planned(self, bounds: SequenceBounds, x_PE: torch.Tensor) -> Attend:
        """Attention within these sequences of the batch, by the backend chosen for their lengths."""
        attention = self.attention
        if isinstance(attention, Choices):
            attention = attention.nearest(x_PE.shape[0], bounds.max_seqlen)
        shape = (x_PE.shape[0], self.num_heads, self.plain.config.head_dim)
        return functools.partial(attention.attend, bounds=attention.plan(bounds, shape, x_PE.dtype))

    def _attended(
        self, h_PE: torch.Tensor, block: FusedBlock, gemm: Gemm, rotary: Rotary, attend: Attend
    ) -> torch.Tensor:
        """The attention of a block's normed input, [P, E]. A separate method, so that q, k and v are freed
        before the MLP allocates memory: a graph permanently reserves the memory of all tensors that are alive
        together."""
        if block.qk_norms is None:
            qkv = gemm.rotated(h_PE, block.qkv, rotary)
        else:
            qkv = self._kernels.rotate_qkv_(
                linear(h_PE, block.qkv.weight, block.qkv.bias),
                rotary.coords,
                rotary.cos,
                rotary.sin,
                rotary.layout,
                rotary.num_heads,
                norms=block.qk_norms,
            )
        q_PHd, k_PHd, v_PHd = qkv.view(h_PE.shape[0], 3, self.num_heads, -1).unbind(1)
        return attend(q_PHd, k_PHd, v_PHd).flatten(1)

    def _activated(self, h_PE: torch.Tensor, block: FusedBlock, gemm: Gemm) -> torch.Tensor:
        """The hidden values of a block's MLP. A gated MLP's are a pass of their own."""
        if block.gated is None:
            return gemm.gelu(h_PE, block.fc1)
        return self._kernels.swiglu(linear(h_PE, block.fc1.weight, block.fc1.bias), block.gated.limit)

    def _embed(self, x_PE: torch.Tensor, tables: PatchTables, norm: Norm) -> torch.Tensor:
        """Adds the learned positions to x in place and returns the first block's normed input."""
        plain = self.plain
        if plain.pos_embed is None or plain.position_sides is None:
            return self._kernels.add_norm(x_PE, None, *norm)
        table_height, table_width = plain.position_sides
        return self._kernels.embed_norm(
            x_PE,
            plain.pos_embed,
            tables.coords,
            *norm,
            mode=plain.position_mode,
            table_height=table_height,
            table_width=table_width,
            frame_table=plain.frame_embed,
            frame_index=tables.frame_index,
        )

    def _last_norm(
        self, x_PE: torch.Tensor, delta_PE: torch.Tensor | None, tables: PatchTables
    ) -> torch.Tensor:
        """The merger's normed input [R * merge^2, E], after the last block's delta was added."""
        merger_norm, final_norm = self.plain.merger.norm, self.plain.final_norm
        if final_norm is None:
            assert merger_norm is not None
            return self._kernels.add_norm(x_PE, delta_PE, *norm_of(merger_norm))
        assert tables.merge_index is not None
        assert tables.merge_weight is not None
        return self._kernels.merge_frames_norm(
            x_PE,
            delta_PE,
            tables.merge_index,
            tables.merge_weight,
            norm_of(final_norm),
            norm_of(merger_norm) if merger_norm is not None else None,
        )

    def _merge(self, h_PE: torch.Tensor, merger: Merger | GatedMerger) -> torch.Tensor:
        """Rows [R, D] from normed patches in merge order."""
        if isinstance(merger, GatedMerger):
            u_RD = linear(
                h_PE.view(-1, merger.merged_width), merger.downsample.weight, merger.downsample.bias
            )
            u_RD = linear(u_RD, merger.proj.weight)
            u_RD = self._kernels.gelu_(self._kernels.add_norm(u_RD, None, *norm_of(merger.proj_norm)))
            return linear(
                self._kernels.swiglu(linear(u_RD, merger.fc1.weight), merger.limit), merger.fc2.weight
            )
        u_RM = linear(h_PE.view(-1, merger.merged_width), merger.fc1.weight, merger.fc1.bias)
        rows_RD = linear(self._kernels.gelu_(u_RM), merger.fc2.weight, merger.fc2.bias)
        if merger.out_norm is None:
            return rows_RD
        return self._kernels.add_norm(rows_RD, None, *norm_of(merger.out_norm))


class Levels:
    """Runs the mergers of the deepstack levels. No block waits for them, so on a separate stream they use the
    part of the device that small batches leave idle. side_stream: None to run them in order with the
    blocks."""

    def __init__(self, side_stream: torch.cuda.Stream | None) -> None:
        self._side_stream = side_stream
        self._rows_RD: list[torch.Tensor] = []
        # Kept until the side stream has read them, because their memory belongs to the main stream.
        self._inputs: list[torch.Tensor] = []

    def start(self, input_RM: torch.Tensor, merge: Callable[[], torch.Tensor]) -> None:
        """Starts ``merge``, which reads ``input_RM`` after the work queued so far in the current stream."""
        if self._side_stream is None:
            self._rows_RD.append(merge())
            return
        self._inputs.append(input_RM)
        self._side_stream.wait_stream(torch.cuda.current_stream(input_RM.device))
        with torch.cuda.stream(self._side_stream):
            self._rows_RD.append(merge())

    def finish(self) -> list[torch.Tensor]:
        """Every level's rows [R, D]. Later work in the current stream may read them."""
        if self._side_stream is not None and self._inputs:
            torch.cuda.current_stream(self._inputs[0].device).wait_stream(self._side_stream)
        self._inputs.clear()
        return self._rows_RD
