"""Our own attention kernel: head dims such as 72 and 80, an explicit list of tiles, no padding of the work.

Owns the launches and the tile table; triton_kernels.py has the device code. The list of tiles has one entry
for each tile of queries there is, longest sequences first, written on the device: a large baked max_seqlen or
many empty slots launch nothing but programs that leave at once, and the last tiles to finish are short ones.
Within a sequence the programs of one head are neighbours: its keys and values stay in cache.

A head dim is served as one power of two, its upper columns masked (72 and 80 run as 128). The device code
also knows a split into two parts, 64 + 16 for 72 and 80, which does less work and is right in the
interpreter; compiled by Triton 3.6 for sm_90 its second part came out wrong (relative error 0.1 in columns 64
to 72, NaN in other tilings; cause not found), so that it is not used.

A tile walks all keys of its sequence in order, whole tiles without a row mask and one masked tail, in float32
with the scale folded into exp2. Nothing is split and tiles do not follow the batch: results are batch
invariant. Nothing outside the sequence is read, so NaN in padding or in a neighbour stays there.

Importing this module imports triton.

Shape legend: P patches of the batch, S sequences, H heads, d head_dim, T tiles (an upper bound of them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from encoder_service.towers.attention.plan import AttentionPlan, output_of, plan_output
from encoder_service.towers.attention.triton_kernels import attend_kernel, list_tiles_kernel

if TYPE_CHECKING:
    from encoder_service.towers.attention import SequenceBounds

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class TileConfig:
    """Queries and keys of a tile, warps of a program, stages of the key and value pipeline."""

    queries: int = 128
    keys: int = 64
    num_warps: int = 8
    num_stages: int = 3

    @property
    def label(self) -> str:
        return f"{self.queries}x{self.keys}w{self.num_warps}s{self.num_stages}"


# Largest head dim served by each; shared memory holds num_stages key and value tiles.
TILE_CONFIGS = {
    64: TileConfig(128, 128, 8, 3),
    96: TileConfig(128, 64, 8, 3),
    256: TileConfig(128, 64, 8, 2),
}
# float32 holds half as many values in the same memory and has no tensor cores here.
FLOAT32_CONFIG = TileConfig(32, 32, 4, 2)


class TritonVarlenAttention:
    """The kernel behind AttentionBackend. config: the tile for every head dim; None takes TILE_CONFIGS."""

    static_lengths = False
    batch_invariant = True

    def __init__(self, config: TileConfig | None = None) -> None:
        self._config = config
        self.name = "triton" if config is None else f"triton-{config.label}"

    def plan(self, bounds: SequenceBounds, shape: Sequence[int], dtype: torch.dtype) -> SequenceBounds:
        """The bounds with the output buffer and the tiles that all blocks share. One launch."""
        plan = plan_output(bounds, shape, dtype)
        config = self.config_for(shape[-1], dtype)
        tiles = list_tiles(bounds.cu_seqlens, shape[0], config.queries)
        return AttentionPlan(plan.cu_seqlens, plan.seqlens, plan.max_seqlen, plan.out_PHd, tiles)

    def attend(
        self, q_PHd: torch.Tensor, k_PHd: torch.Tensor, v_PHd: torch.Tensor, bounds: SequenceBounds
    ) -> torch.Tensor:
        """See AttentionBackend. float32, float16 or bfloat16, any head_dim to 256. The output of padding is
        zero. Raises ValueError if q, k and v are not strided alike or their last dimension is not contiguous.
        """
        num_patches, num_heads, head_dim = q_PHd.shape
        if not q_PHd.stride() == k_PHd.stride() == v_PHd.stride() or q_PHd.stride(2) != 1:
            raise ValueError(
                f"q, k, v need one stride with a contiguous last dimension, have {q_PHd.stride()}, "
                f"{k_PHd.stride()}, {v_PHd.stride()}"
            )
        out_PHd = output_of(q_PHd, bounds)
        config = self.config_for(head_dim, q_PHd.dtype)
        tiles = bounds.tiles if isinstance(bounds, AttentionPlan) else None
        if tiles is None:
            tiles = list_tiles(bounds.cu_seqlens, num_patches, config.queries)
        main, rest = split_head_dim(head_dim)
        attend_kernel[(tiles.shape[0] * num_heads,)](
            q_PHd,
            k_PHd,
            v_PHd,
            out_PHd,
            tiles,
            LOG2_E * head_dim**-0.5,
            num_heads,
            ROW_STRIDE=q_PHd.stride(0),
            HEAD_STRIDE=q_PHd.stride(1),
            OUT_ROW_STRIDE=out_PHd.stride(0),
            OUT_HEAD_STRIDE=out_PHd.stride(1),
            DIM=head_dim,
            MAIN=main,
            REST=rest,
            QUERIES=config.queries,
            KEYS=config.keys,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        return out_PHd

    def config_for(self, head_dim: int, dtype: torch.dtype) -> TileConfig:
        """The tile of a head dim and dtype. Raises ValueError above the largest head dim of TILE_CONFIGS."""
        if self._config is not None:
            return self._config
        if head_dim > max(TILE_CONFIGS):
            raise ValueError(f"head_dim {head_dim} is over the largest served, {max(TILE_CONFIGS)}")
        if dtype == torch.float32:
            return FLOAT32_CONFIG
        return TILE_CONFIGS[min(limit for limit in TILE_CONFIGS if head_dim <= limit)]


def list_tiles(cu_seqlens: torch.Tensor, num_patches: int, queries: int) -> torch.Tensor:
    """int32 [T, 3] on the device: first row, end row and first entry of each tile's sequence, longest
    sequence first. T = ceil(P / queries) + S bounds the tiles of any lengths; unused entries are zero."""
    num_sequences = cu_seqlens.shape[0] - 1
    max_tiles = -(-num_patches // queries) + num_sequences
    tiles = torch.empty(max_tiles, 3, dtype=torch.int32, device=cu_seqlens.device)
    slots = next_power_of_two(max(num_sequences, 2))
    options: dict[str, Any] = {"num_warps": 1 if slots <= 256 else 4}
    list_tiles_kernel[(num_sequences + 1,)](
        cu_seqlens, tiles, num_sequences, max_tiles, QUERIES=queries, SLOTS=slots, **options
    )
    return tiles


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """The widths of a head's two parts: a power of two of at least 16 that holds it, and nothing.

    72 -> (128, 0), 64 -> (64, 0), 8 -> (16, 0).
    """
    return max(16, next_power_of_two(head_dim)), 0


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
