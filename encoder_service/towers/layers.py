"""The parts of the towers: blocks, mergers, learned positions, and the towers' base class.

Owns the plain, readable form of each part, and the host tables of a frame. Each tower's ``prepare`` and
``forward`` arrange the parts.

Shape legend: P patches, R rows (visual tokens), K position taps, E tower width, M = E * merge^2,
D language-model width, H heads, d head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.functional import embedding_bag, gelu, silu

from encoder_service.towers.attention import AttentionBackend, SdpaAttention
from encoder_service.towers.config import VisionConfig
from encoder_service.towers.positions import (
    FrameTables,
    centred_linear_taps,
    check_sides,
    cubic_taps,
    grid_taps,
    linear_taps,
    merge_order,
    raster_coordinates,
)
from encoder_service.towers.rope import RotaryLayout, rotary_tables, rotate
from encoder_service.towers.tower import Tower, TowerInputs
from encoder_service.types import Grid

AnyNorm: TypeAlias = nn.LayerNorm | nn.RMSNorm
PositionMode: TypeAlias = Literal["linear", "centred_linear", "cubic"]
TAPS = {"linear": linear_taps, "centred_linear": centred_linear_taps, "cubic": cubic_taps}
# A norm over rows of a width, such as ``partial(nn.LayerNorm, eps=1e-6)``.
MakeNorm: TypeAlias = Callable[[int], AnyNorm]


class Norm(NamedTuple):
    """A norm's weight and bias [E], and its epsilon. Without a bias it is an RMSNorm, which does not subtract
    the mean."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float


def norm_of(norm: AnyNorm) -> Norm:
    assert norm.eps is not None
    return Norm(norm.weight, norm.bias if isinstance(norm, nn.LayerNorm) else None, norm.eps)


def interpolate_positions(
    table: torch.Tensor, position_index: torch.Tensor, position_weight: torch.Tensor
) -> torch.Tensor:
    """For each patch the weighted sum of K rows of a learned table [table rows, E]: float32 [P, E].

    Summed in float32 regardless of the table's dtype, because bicubic weights alternate in sign.
    """
    return embedding_bag(position_index, table.float(), per_sample_weights=position_weight, mode="sum")


def swiglu(packed: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """silu(gate) * up [..., M] of gates and ups [..., 2 * M], gates first. limit: the gates are clamped to at
    most the limit, the ups to its absolute value (Glm5Next's ``swiglu_limit``)."""
    gate, up = packed.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return silu(gate) * up


class Gated(NamedTuple):
    """A gated SiLU MLP in place of a GELU MLP: ``fc1`` has the gate's outputs, then as many of the up
    projection. limit: see ``swiglu``."""

    limit: float | None = None


class Block(nn.Module):
    """Pre-norm transformer block: fused qkv with rotary positions, and an MLP: tanh-GELU, or gated SiLU if
    ``gated`` is given.

    has_bias: whether its linear layers have one. norms_qk: each head's q and k are normed before they are
    rotated.
    """

    def __init__(
        self,
        config: VisionConfig,
        make_norm: MakeNorm,
        *,
        has_bias: bool,
        gated: Gated | None = None,
        norms_qk: bool = False,
    ) -> None:
        super().__init__()
        width, mlp_width = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        self.norm1 = make_norm(width)
        self.qkv = nn.Linear(width, 3 * config.attention_width, bias=has_bias)
        self.q_norm = make_norm(config.head_dim) if norms_qk else None
        self.k_norm = make_norm(config.head_dim) if norms_qk else None
        self.proj = nn.Linear(config.attention_width, width, bias=has_bias)
        self.norm2 = make_norm(width)
        self.gated = gated
        self.fc1 = nn.Linear(width, mlp_width if gated is None else 2 * mlp_width, bias=has_bias)
        self.fc2 = nn.Linear(mlp_width, width, bias=has_bias)

    def forward(self, x_PE: torch.Tensor, inputs: TowerInputs, attention: AttentionBackend) -> torch.Tensor:
        x_PE = x_PE + self.attend(self.norm1(x_PE), inputs, attention)
        out_PE: torch.Tensor = x_PE + self.fc2(self.activate(self.fc1(self.norm2(x_PE))))
        return out_PE

    def activate(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.gated is None:
            return gelu(hidden, approximate="tanh")
        return swiglu(hidden, self.gated.limit)

    def attend(self, x_PE: torch.Tensor, inputs: TowerInputs, attention: AttentionBackend) -> torch.Tensor:
        q_PHd, k_PHd, v_PHd = self.qkv(x_PE).view(x_PE.shape[0], 3, self.num_heads, -1).unbind(1)
        if self.q_norm is not None and self.k_norm is not None:
            q_PHd, k_PHd = self.q_norm(q_PHd), self.k_norm(k_PHd)
        q_PHd = rotate(q_PHd, inputs.rope_cos, inputs.rope_sin)
        k_PHd = rotate(k_PHd, inputs.rope_cos, inputs.rope_sin)
        out_PHd = attention.attend(q_PHd, k_PHd, v_PHd, inputs)
        out_PE: torch.Tensor = self.proj(out_PHd.flatten(1))
        return out_PE


class Merger(nn.Module):
    """Merges merge^2 adjacent patches into one row: a norm, two layers, erf-GELU.

    make_norm: None for no norm. norm_after_shuffle: the norm spans the merged patches (in Qwen's deepstack
    levels) instead of each patch. has_bias: whether the layers have one. out_norm: a norm of the rows.
    inner_width: between the two layers; None for the width of the merged patches.
    """

    def __init__(
        self,
        width: int,
        merge_size: int,
        out_width: int,
        make_norm: MakeNorm | None,
        *,
        norm_after_shuffle: bool = False,
        has_bias: bool = True,
        out_norm: AnyNorm | None = None,
        inner_width: int | None = None,
    ) -> None:
        super().__init__()
        self.norm_after_shuffle = norm_after_shuffle
        self.merged_width = width * merge_size**2
        self.norm: AnyNorm | None = None
        if make_norm is not None:
            self.norm = make_norm(self.merged_width if norm_after_shuffle else width)
        inner_width = inner_width or self.merged_width
        self.fc1 = nn.Linear(self.merged_width, inner_width, bias=has_bias)
        self.fc2 = nn.Linear(inner_width, out_width, bias=has_bias)
        self.out_norm = out_norm

    def forward(self, x_PE: torch.Tensor) -> torch.Tensor:
        """Merges patches [P, E] in merge order to rows [R, D]."""
        if self.norm is not None and not self.norm_after_shuffle:
            x_PE = self.norm(x_PE)
        x_RM = x_PE.reshape(-1, self.merged_width)
        if self.norm is not None and self.norm_after_shuffle:
            x_RM = self.norm(x_RM)
        rows_RD: torch.Tensor = self.fc2(gelu(self.fc1(x_RM)))
        return rows_RD if self.out_norm is None else self.out_norm(rows_RD)


class GatedMerger(nn.Module):
    """Merges merge^2 adjacent patches into one row: RMSNorm, a convolution over the patches (as the equal
    product, ``downsample``), a layer, LayerNorm, erf-GELU, and a gated SiLU MLP (GLM-4.1V).

    inner_width: of the gated MLP. limit: see ``swiglu``.
    """

    def __init__(
        self, config: VisionConfig, inner_width: int, make_norm: MakeNorm, limit: float | None = None
    ) -> None:
        super().__init__()
        out_width = config.out_width
        self.limit = limit
        self.merged_width = config.hidden_size * config.merge_size**2
        self.norm = make_norm(config.hidden_size)
        self.downsample = nn.Linear(self.merged_width, out_width)
        self.proj = nn.Linear(out_width, out_width, bias=False)
        self.proj_norm = nn.LayerNorm(out_width)
        self.fc1 = nn.Linear(out_width, 2 * inner_width, bias=False)
        self.fc2 = nn.Linear(inner_width, out_width, bias=False)

    def forward(self, x_PE: torch.Tensor) -> torch.Tensor:
        """Merges patches [P, E] in merge order to rows [R, D]."""
        x_RD = self.proj(self.downsample(self.norm(x_PE).reshape(-1, self.merged_width)))
        x_RD = gelu(self.proj_norm(x_RD))
        rows_RD: torch.Tensor = self.fc2(swiglu(self.fc1(x_RD), self.limit))
        return rows_RD


class BlockShape(NamedTuple):
    """The sizes that the products and the attention of a block depend on. is_gated: the MLP is ``Gated``.
    norms_qk: see ``Block``."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    rope_theta: float
    layout: RotaryLayout
    is_gated: bool = False
    norms_qk: bool = False

    @property
    def attention_width(self) -> int:
        return self.num_heads * self.head_dim


class PlainTower(Tower):
    """A tower in its readable form. A family's subclass adds its merger, ``prepare`` and ``forward``. The
    fused form (``fused.py``) reads the attributes below.

    position_mode: how the learned table, with [height, width] of ``position_sides`` entries, is stretched
    over a frame, see ``kernels.embed_norm``; without sides there is no table. rotary_layout: see
    ``rope.rotary_tables``. Patches are frame by frame in raster order if ``merges_time``, otherwise in merge
    order. patch_norm: the norm before positions are added, or None. has_bias: whether the linear layers of
    the patch embedding and of the blocks have one. gated: the blocks' MLP; None for GELU. norms_qk: see
    ``Block``. frame_embed: float32 [max_frames + 1, E], which is added to the positions by frame, see
    ``moonvit.frame_table``; None if the family has none. final_norm: the norm before patches are averaged
    over frames; None unless ``merges_time``. window: merged positions of a window's side: the blocks attend
    within windows and patches are in their order, see ``windows.py``; 0 for no windows. full_blocks: the
    numbers of the blocks that attend beyond windows nevertheless.
    """

    position_mode: ClassVar[PositionMode]
    rotary_layout: ClassVar[RotaryLayout]
    merger: Merger | GatedMerger
    pos_embed: nn.Parameter | None
    patch_norm: AnyNorm | None
    frame_embed: torch.Tensor | None
    final_norm: AnyNorm | None
    window: int = 0
    full_blocks: frozenset[int] = frozenset()

    def __init__(
        self,
        config: VisionConfig,
        position_sides: tuple[int, int] | None,
        make_norm: MakeNorm,
        *,
        has_bias: bool = True,
        gated: Gated | None = None,
        norms_qk: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.patch_size = config.patch_size
        self.merge_size = config.merge_size
        self.patch_dim = config.patch_dim
        self.out_width = config.out_width
        self.position_sides = position_sides
        self.gated = gated
        self.norms_qk = norms_qk
        self.attention: AttentionBackend = SdpaAttention()
        self.patch_embed = nn.Linear(config.patch_dim, config.hidden_size, bias=has_bias)
        self.pos_embed = None
        if position_sides is not None:
            self.pos_embed = nn.Parameter(torch.empty(math.prod(position_sides), config.hidden_size))
        self.blocks = nn.ModuleList(
            Block(config, make_norm, has_bias=has_bias, gated=gated, norms_qk=norms_qk)
            for _ in range(config.depth)
        )
        self.register_module("patch_norm", None)
        self.register_buffer("frame_embed", None, persistent=False)
        self.register_module("final_norm", None)

    @property
    def level_mergers(self) -> Mapping[int, Merger]:
        """The merger of each deepstack level, by the block that it follows, ascending. Empty without
        levels."""
        return {}

    @property
    def block_shape(self) -> BlockShape:
        config = self.config
        return BlockShape(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.head_dim,
            config.rope_theta,
            self.rotary_layout,
            self.gated is not None,
            self.norms_qk,
        )

    def check_grid(self, grid: Grid) -> None:
        check_sides(grid, self.merge_size)

    def frame_tables(self, grids: Sequence[Grid]) -> list[FrameTables]:
        """The tables of every frame of every item, in the batch's order. Raises GridMismatch."""
        for grid in grids:
            self.check_grid(grid)
        by_size = {size: self._tables_of(*size) for size in {(grid.h, grid.w) for grid in grids}}
        return [by_size[grid.h, grid.w] for grid in grids for _ in range(grid.t)]

    def embed(self, inputs: TowerInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The patches in the tower's dtype and their learned positions in float32, both [P, E]; without a
        table the positions are zeros."""
        assert inputs.pixel_values is not None
        x_PE = self.patch_embed(inputs.pixel_values.to(self.dtype))
        if self.patch_norm is not None:
            x_PE = self.patch_norm(x_PE)
        if self.pos_embed is None:
            return x_PE, torch.zeros_like(x_PE, dtype=torch.float32)
        return x_PE, interpolate_positions(self.pos_embed, inputs.position_index, inputs.position_weight)

    def _tables_of(self, height: int, width: int) -> FrameTables:
        config = self.config
        index, weight = self._taps_of(height, width)
        rows, columns = raster_coordinates(height, width)
        if not self.merges_time:
            order = self.patch_order(height, width)
            index, weight, rows, columns = index[order], weight[order], rows[order], columns[order]
        cos, sin = rotary_tables(rows, columns, config.head_dim, config.rope_theta, self.rotary_layout)
        return FrameTables(index, weight, cos, sin)

    def patch_order(self, height: int, width: int) -> torch.Tensor:
        """Raster index of the patch at each place of a frame, int64 [N]."""
        return merge_order(height, width, self.merge_size)

    def _taps_of(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """position_index and position_weight of a frame in raster order; without a table there are no
        taps."""
        if self.position_sides is None:
            return torch.empty(height * width, 0, dtype=torch.int64), torch.empty(height * width, 0)
        table_height, table_width = self.position_sides
        taps = TAPS[self.position_mode]
        return grid_taps(taps(height, table_height), taps(width, table_width), table_width)
