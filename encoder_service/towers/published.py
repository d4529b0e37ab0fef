"""A tower's tensors as they are published: the record that maps a checkpoint's tensor to a parameter.

Owns the record and the conversions that families share. Each family's file lists its tensors, and
``checkpoint.py`` reads the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

Conversion: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PublishedTensor:
    """One vision tensor of a checkpoint. name: as published, without a varying prefix. shape: as published.
    parameter: the tower's parameter that takes its values. convert: applied to the values first. part: where
    several tensors make one parameter, the place of this one among them."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    convert: Conversion | None = None
    part: int = 0

    def to_parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.convert(tensor) if self.convert else tensor


def joined(parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """A parameter of its tensors, by part: their outputs one after the other."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    return torch.cat([parts[part] for part in sorted(parts)])


def flatten_patch(weight: torch.Tensor) -> torch.Tensor:
    """A convolution whose stride is its kernel, as the equal product over flattened patches."""
    return weight.flatten(1)


def layer(name: str, parameter: str, *shape: int, has_bias: bool = True) -> Iterator[PublishedTensor]:
    """The weight of this shape, and the bias, of a linear layer [out, in] or a norm [width]."""
    yield PublishedTensor(f"{name}.weight", shape, f"{parameter}.weight")
    if has_bias:
        yield PublishedTensor(f"{name}.bias", shape[:1], f"{parameter}.bias")


def gated_mlp(
    name: str, parameter: str, width: int, mlp_width: int, *, has_bias: bool
) -> Iterator[PublishedTensor]:
    """A gated MLP, which is published as ``gate_proj``, ``up_proj`` and ``down_proj``. In the parameters
    ``fc1`` and ``fc2`` the gate comes before the up projection."""
    layers = (
        ("gate_proj", "fc1", (mlp_width, width), 0),
        ("up_proj", "fc1", (mlp_width, width), 1),
        ("down_proj", "fc2", (width, mlp_width), 0),
    )
    for published, fc, shape, part in layers:
        yield PublishedTensor(f"{name}.{published}.weight", shape, f"{parameter}.{fc}.weight", part=part)
        if has_bias:
            yield PublishedTensor(f"{name}.{published}.bias", shape[:1], f"{parameter}.{fc}.bias", part=part)
