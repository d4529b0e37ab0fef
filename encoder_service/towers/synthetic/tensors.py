"""What a tensor of a synthetic checkpoint is, and how its values are drawn.

Owns the random draws. Each tensor has a generator of its own, seeded by the checkpoint's seed and the
tensor's name: a tensor's values depend on nothing else, not on which other tensors are written.

Scales keep a deep tower healthy: a linear layer has a standard deviation of gain / sqrt(fan_in), norms are
near one, biases small, and the layers that write into the residual stream share one unit of variance.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

NORM_STD = 0.1
BIAS_STD = 0.05


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, shape and distribution.

    num_rows: rows from this one on are zero, where it is given. centred: each row sums to zero.
    """

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float
    dtype: torch.dtype = torch.bfloat16
    num_rows: int | None = None
    centred: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def draw(spec: TensorSpec, seed: int) -> torch.Tensor:
    """The tensor's values on the host, in its dtype; the same for the same name, shape and seed."""
    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.randn(spec.shape, generator=generator).mul_(spec.std).add_(spec.mean)
    if spec.centred:
        values -= values.mean(dim=1, keepdim=True)
    if spec.num_rows is not None:
        values[spec.num_rows :] = 0
    return values.to(spec.dtype)


def weight(name: str, *shape: int, gain: float = 1.0) -> TensorSpec:
    """A linear or convolution weight [out, in, ...]: its outputs vary gain times as much as its inputs."""
    return TensorSpec(name, shape, 0.0, gain / math.sqrt(math.prod(shape[1:])))


def linear(name: str, out_width: int, in_width: int, gain: float = 1.0) -> Iterator[TensorSpec]:
    """Weight [out, in] and bias [out]."""
    yield weight(f"{name}.weight", out_width, in_width, gain=gain)
    yield TensorSpec(f"{name}.bias", (out_width,), 0.0, BIAS_STD)


def linear_after_gelu(name: str, out_width: int, in_width: int, gain: float = 1.0) -> Iterator[TensorSpec]:
    """Weight [out, in] with rows that sum to zero, and bias [out]. GELU leaves a positive mean in every
    unit, which random rows would turn into one large vector common to all patches of all images."""
    yield dataclasses.replace(weight(f"{name}.weight", out_width, in_width, gain=gain), centred=True)
    yield TensorSpec(f"{name}.bias", (out_width,), 0.0, BIAS_STD)


def layer_norm(name: str, width: int) -> Iterator[TensorSpec]:
    """Weight and bias [width]."""
    yield rms_norm(name, width)
    yield TensorSpec(f"{name}.bias", (width,), 0.0, BIAS_STD)


def rms_norm(name: str, width: int, mean: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> TensorSpec:
    """Weight [width] around ``mean``: 0 where the model adds one to it."""
    return TensorSpec(f"{name}.weight", (width,), mean, NORM_STD, dtype)
