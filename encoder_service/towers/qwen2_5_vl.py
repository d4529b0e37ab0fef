"""The tower of Qwen2.5-VL.

Owns the order of the parts, the sizes in config.json and the names of the tensors. Patches arrive in merge
order and are moved to window order (``windows.py``): most blocks attend within windows, a few within the
whole frame. Rows go back to merge order after the merger. There are no learned positions.

Shape legend: P patches, R rows, E tower width, D language-model width.

Reference: Qwen2.5-VL Technical Report (arXiv 2502.13923); transformers' ``qwen2_5_vl`` model, which the
parity tests compare with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from encoder_service.json_reader import JsonReader
from encoder_service.towers.config import Family, VisionConfig, block_numbers, rope_theta
from encoder_service.towers.layers import Gated, Merger, PlainTower
from encoder_service.towers.positions import merge_order, pack_frames
from encoder_service.towers.published import PublishedTensor, flatten_patch, gated_mlp, layer
from encoder_service.towers.windows import WindowedInputs, patches_of, window_order
from encoder_service.types import Grid

QWEN2_5_VL = "qwen2_5_vl"
NORM = partial(nn.RMSNorm, eps=1e-6)
# Of all published checkpoints.
FULL_BLOCKS = (7, 15, 23, 31)


@dataclass(frozen=True, kw_only=True)
class Qwen25VisionConfig(VisionConfig):
    """Sizes of a Qwen2.5-VL tower. window: merged positions of a window's side. full_blocks: blocks that
    attend within the whole frame."""

    prefixes: ClassVar[Sequence[tuple[str, ...]]] = [("visual.",), ("model.visual.",)]

    temporal_patch_size: int
    window: int
    full_blocks: tuple[int, ...]

    @property
    def patch_dim(self) -> int:
        """Elements of one flattened patch, in [channel, frame, row, column] order."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    def published_tensors(self) -> Iterator[PublishedTensor]:
        width, patch = self.hidden_size, self.patch_size
        merged_width = width * self.merge_size**2
        yield PublishedTensor(
            "patch_embed.proj.weight",
            (width, self.in_channels, self.temporal_patch_size, patch, patch),
            "patch_embed.weight",
            flatten_patch,
        )
        for index in range(self.depth):
            block = f"blocks.{index}"
            yield from layer(f"{block}.norm1", f"{block}.norm1", width, has_bias=False)
            yield from layer(f"{block}.attn.qkv", f"{block}.qkv", 3 * width, width)
            yield from layer(f"{block}.attn.proj", f"{block}.proj", width, width)
            yield from layer(f"{block}.norm2", f"{block}.norm2", width, has_bias=False)
            yield from gated_mlp(f"{block}.mlp", block, width, self.intermediate_size, has_bias=True)
        yield from layer("merger.ln_q", "merger.norm", width, has_bias=False)
        yield from layer("merger.mlp.0", "merger.fc1", merged_width, merged_width)
        yield from layer("merger.mlp.2", "merger.fc2", self.out_width, merged_width)


class Qwen25VLTower(PlainTower):
    """Qwen2.5-VL's tower."""

    family = QWEN2_5_VL
    num_deepstack_levels = 0
    merges_time = False
    rotary_layout = "blocked"
    config: Qwen25VisionConfig

    def __init__(self, config: Qwen25VisionConfig) -> None:
        super().__init__(config, None, NORM, gated=Gated())
        self.temporal_patch_size = config.temporal_patch_size
        self.window = config.window
        self.full_blocks = frozenset(config.full_blocks)
        self.patch_embed = nn.Linear(config.patch_dim, config.hidden_size, bias=False)
        self.merger = Merger(config.hidden_size, config.merge_size, config.out_width, NORM)

    def patch_order(self, height: int, width: int) -> torch.Tensor:
        order = window_order(height, width, self.merge_size, self.window)
        return merge_order(height, width, self.merge_size)[patches_of(order, self.merge_size)]

    def prepare(self, grids: Sequence[Grid]) -> WindowedInputs:
        seqlens = [grid.h * grid.w for grid in grids for _ in range(grid.t)]
        inputs = pack_frames(self.frame_tables(grids), seqlens)
        return WindowedInputs.of(inputs, grids, self.merge_size, self.window)

    def forward(self, inputs: WindowedInputs) -> torch.Tensor:  # type: ignore[override]
        x_PE, _ = self.embed(inputs)
        x_PE = x_PE[inputs.patch_order]
        windows = inputs.within_windows()
        for index, block in enumerate(self.blocks):
            x_PE = block(x_PE, inputs if index in self.full_blocks else windows, self.attention)
        rows_RD: torch.Tensor = self.merger(x_PE)[inputs.row_order]
        return rows_RD


def parse_sizes(config: JsonReader) -> Qwen25VisionConfig:
    """The sizes in config.json. The published one of Qwen2.5-VL-32B leaves out what is the same in all, which
    are the defaults here. Raises UnsupportedCheckpoint."""
    vision = config.section("vision_config")
    vision.require("hidden_act", "silu")
    depth = vision.count("depth", "num_hidden_layers", default=32)
    patch_size, merge_size = vision.square("patch_size", 14), vision.count("spatial_merge_size", default=2)
    window_size = vision.count("window_size", default=112)
    # A window is whole merges, as in the reference, which rounds down.
    window = window_size // merge_size // patch_size
    if not window:
        raise vision.refuse("window_size", window_size, f"at least {merge_size * patch_size}: one merge")
    return Qwen25VisionConfig(
        depth=depth,
        hidden_size=vision.count("hidden_size"),
        num_heads=vision.count("num_heads", "num_attention_heads", default=16),
        intermediate_size=vision.count("intermediate_size"),
        patch_size=patch_size,
        temporal_patch_size=vision.square("temporal_patch_size", 2),
        in_channels=vision.count("in_channels", "in_chans", default=3),
        merge_size=merge_size,
        out_width=vision.count("out_hidden_size"),
        rope_theta=rope_theta(vision),
        window=window,
        full_blocks=block_numbers(vision, "fullatt_block_indexes", depth, FULL_BLOCKS),
    )


FAMILY = Family(QWEN2_5_VL, ("qwen2_5_vl",), "Qwen2.5-VL", parse_sizes, Qwen25VLTower)
