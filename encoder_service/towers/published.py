"""The names and layouts of the towers' tensors in checkpoints on the hub.

Owns the mapping from published name and shape to the tower's parameter, with one function per family, and the
conversions: patch convolutions become matrix products, and MoonViT's q and k rows are permuted from adjacent
pairs to half-split order. ``checkpoint.py`` reads the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from encoder_service.towers.config import MoonViTConfig, QwenVisionConfig, VisionConfig
from encoder_service.towers.rope import permute_pairs

Conversion: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PublishedTensor:
    """One vision tensor of a checkpoint. name: as published, without a varying prefix. shape: as published.
    parameter: the tower's parameter that takes its values. convert: applied to the values first."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    convert: Conversion | None = None

    def to_parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.convert(tensor) if self.convert else tensor


def published_tensors(config: VisionConfig) -> list[PublishedTensor]:
    """Every vision tensor of a checkpoint with these sizes."""
    if isinstance(config, MoonViTConfig):
        return list(moonvit_tensors(config))
    return list(qwen_tensors(config))


def vision_prefixes(config: VisionConfig) -> Sequence[tuple[str, ...]]:
    """The alternatives for the prefixes of vision tensors. If an alternative is a single prefix, it is
    stripped from the names. If it has two, they distinguish parts of the family's tower and are kept."""
    if isinstance(config, MoonViTConfig):
        return [("vision_tower.", "mm_projector.")]
    return [("model.visual.",), ("visual.",)]


def flatten_patch(weight: torch.Tensor) -> torch.Tensor:
    """A convolution whose stride is its kernel, as the equal product over flattened patches."""
    return weight.flatten(1)


def flatten_table(weight: torch.Tensor) -> torch.Tensor:
    """Reshapes [height, width, E] to [height * width, E]."""
    return weight.flatten(0, 1)


def half_split_qk(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """wqkv [3 * E, ...] with q and k permuted for the half-split rotation; v is unchanged."""
    q, k, v = tensor.chunk(3)
    return torch.cat([permute_pairs(q, num_heads), permute_pairs(k, num_heads), v])


def layer(name: str, parameter: str, *shape: int) -> Iterator[PublishedTensor]:
    """The weight of this shape and the bias of a linear layer [out, in] or a norm [width]."""
    yield PublishedTensor(f"{name}.weight", shape, f"{parameter}.weight")
    yield PublishedTensor(f"{name}.bias", shape[:1], f"{parameter}.bias")


def qwen_tensors(config: QwenVisionConfig) -> Iterator[PublishedTensor]:
    """The tensors of Qwen3-VL and Qwen3.5, whose names begin with ``model.visual.`` or ``visual.``."""
    width, mlp_width, patch = config.hidden_size, config.intermediate_size, config.patch_size
    merged_width = width * config.merge_size**2
    yield PublishedTensor(
        "patch_embed.proj.weight",
        (width, config.in_channels, config.temporal_patch_size, patch, patch),
        "patch_embed.weight",
        flatten_patch,
    )
    yield PublishedTensor("patch_embed.proj.bias", (width,), "patch_embed.bias")
    yield PublishedTensor("pos_embed.weight", (config.position_side**2, width), "pos_embed")
    for index in range(config.depth):
        block = f"blocks.{index}"
        yield from layer(f"{block}.norm1", f"{block}.norm1", width)
        yield from layer(f"{block}.attn.qkv", f"{block}.qkv", 3 * width, width)
        yield from layer(f"{block}.attn.proj", f"{block}.proj", width, width)
        yield from layer(f"{block}.norm2", f"{block}.norm2", width)
        yield from layer(f"{block}.mlp.linear_fc1", f"{block}.fc1", mlp_width, width)
        yield from layer(f"{block}.mlp.linear_fc2", f"{block}.fc2", width, mlp_width)
    mergers = [("merger", "merger", width)] + [
        (f"deepstack_merger_list.{level}", f"deepstack_mergers.{level}", merged_width)
        for level in range(len(config.deepstack_visual_indexes))
    ]
    for name, parameter, norm_width in mergers:
        yield from layer(f"{name}.norm", f"{parameter}.norm", norm_width)
        yield from layer(f"{name}.linear_fc1", f"{parameter}.fc1", merged_width, merged_width)
        yield from layer(f"{name}.linear_fc2", f"{parameter}.fc2", config.out_width, merged_width)


def moonvit_tensors(config: MoonViTConfig) -> Iterator[PublishedTensor]:
    """The tensors of Kimi-K2.5, whose names begin with ``vision_tower.`` or ``mm_projector.``."""
    width, mlp_width, patch = config.hidden_size, config.intermediate_size, config.patch_size
    merged_width = width * config.merge_size**2
    half_split = partial(half_split_qk, num_heads=config.num_heads)
    embed = "vision_tower.patch_embed"
    yield PublishedTensor(
        f"{embed}.proj.weight", (width, config.in_channels, patch, patch), "patch_embed.weight", flatten_patch
    )
    yield PublishedTensor(f"{embed}.proj.bias", (width,), "patch_embed.bias")
    yield PublishedTensor(
        f"{embed}.pos_emb.weight",
        (config.position_height, config.position_width, width),
        "pos_embed",
        flatten_table,
    )
    for index in range(config.depth):
        name, block = f"vision_tower.encoder.blocks.{index}", f"blocks.{index}"
        yield from layer(f"{name}.norm0", f"{block}.norm1", width)
        yield PublishedTensor(f"{name}.wqkv.weight", (3 * width, width), f"{block}.qkv.weight", half_split)
        yield PublishedTensor(f"{name}.wqkv.bias", (3 * width,), f"{block}.qkv.bias", half_split)
        yield from layer(f"{name}.wo", f"{block}.proj", width, width)
        yield from layer(f"{name}.norm1", f"{block}.norm2", width)
        yield from layer(f"{name}.mlp.fc0", f"{block}.fc1", mlp_width, width)
        yield from layer(f"{name}.mlp.fc1", f"{block}.fc2", width, mlp_width)
    yield from layer("vision_tower.encoder.final_layernorm", "final_norm", width)
    yield from layer("mm_projector.pre_norm", "merger.norm", width)
    yield from layer("mm_projector.proj.0", "merger.fc1", merged_width, merged_width)
    yield from layer("mm_projector.proj.2", "merger.fc2", config.out_width, merged_width)
