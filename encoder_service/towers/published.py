"""A tower's tensors as they are published: the record that maps a checkpoint's tensor to a parameter.

Owns the record and the conversions that families share. Each family's file lists its tensors, and
``checkpoint.py`` reads the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

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


def flatten_patch(weight: torch.Tensor) -> torch.Tensor:
    """A convolution whose stride is its kernel, as the equal product over flattened patches."""
    return weight.flatten(1)


def layer(name: str, parameter: str, *shape: int, has_bias: bool = True) -> Iterator[PublishedTensor]:
    """The weight of this shape, and the bias, of a linear layer [out, in] or a norm [width]."""
    yield PublishedTensor(f"{name}.weight", shape, f"{parameter}.weight")
    if has_bias:
        yield PublishedTensor(f"{name}.bias", shape[:1], f"{parameter}.bias")
