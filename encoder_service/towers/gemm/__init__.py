"""The matrix products of a block, each with the step that follows it.

Owns the protocol of a library of such products (``Gemm``) and torch's own, which is always there. A library
that computes the step in the product's epilogue saves a pass over its output. ``select.py`` measures which
library is the fastest for each product and number of rows, ``per_rows.py`` looks the choice up.

Shape legend: P patches, K input width, N output width, H heads, d head_dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch.nn.functional import gelu, linear

from encoder_service.towers.rope import RotaryLayout

# The steps after the four products of a block: qkv, fc1, proj, fc2.
Step = Literal["rotate", "gelu", "add_attention", "add_mlp"]
STEPS: tuple[Step, ...] = ("rotate", "gelu", "add_attention", "add_mlp")


@dataclass(frozen=True)
class Rotary:
    """Positions and tables for the rotation of one batch's q and k.

    coords: int32 [P, 4], row and column first. cos, sin: float32 [max_side, d/4] by coordinate and frequency.
    layout: see ``kernels.rotate_qkv_``. turns: float32 [2, 3 * H * d], see ``turns_of``, or None where no
    library reads it.
    """

    coords: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    layout: RotaryLayout
    num_heads: int
    turns: torch.Tensor | None = None

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """float32 [2, P]: rows, then columns. Computed once for all blocks, where a library reads it."""
        return self.coords[:, :2].t().float().contiguous()


@dataclass(frozen=True)
class Weights:
    """A linear layer's weight [N, K] and bias [N]. paired: the same with the outputs of q and k in the order
    of ``pair_rows``, None where no library reads it."""

    weight: torch.Tensor
    bias: torch.Tensor
    paired: tuple[torch.Tensor, torch.Tensor] | None = None


class Gemm(Protocol):
    """x [P, K] times a layer, followed by one of three steps. Sums are float32, rounded to x's type after the
    step, and before it as well where the step is a pass of its own.

    Every method launches on the current stream and can be captured; a library that compiles does so in the
    first call, which must come before a capture.
    """

    @property
    def name(self) -> str: ...

    @property
    def steps(self) -> Set[Step]:
        """The steps that ``select.py`` tries it for."""
        ...

    @property
    def wants_pairs(self) -> bool:
        """Whether ``rotated`` reads Weights.paired and Rotary.turns."""
        ...

    def rotated(self, x_PK: torch.Tensor, layer: Weights, rotary: Rotary) -> torch.Tensor:
        """q, k and v side by side [P, 3 * H * d], q and k turned by their positions. Both have the same order
        of elements within a head, the layer's own or that of its pairs."""
        ...

    def gelu(self, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor:
        """tanh-GELU of the product [P, N]."""
        ...

    def add_to(self, residual_PN: torch.Tensor, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor | None:
        """The product [P, N], still to be added to the residual; None: it has been added in place."""
        ...


class TorchGemm:
    """torch's own: bias and GELU in cuBLAS's epilogue; rotation and addition are passes of their own."""

    name = "torch"
    steps: Set[Step] = frozenset(STEPS)
    wants_pairs = False

    def rotated(self, x_PK: torch.Tensor, layer: Weights, rotary: Rotary) -> torch.Tensor:
        from encoder_service.towers import kernels  # triton, which only the fused path needs

        qkv = linear(x_PK, layer.weight, layer.bias)
        return kernels.rotate_qkv_(
            qkv, rotary.coords, rotary.cos, rotary.sin, rotary.layout, rotary.num_heads
        )

    def gelu(self, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor:
        """On a GPU in the product's epilogue: cuBLASLt's GELU is the tanh form."""
        if x_PK.is_cuda:
            return torch._addmm_activation(layer.bias, x_PK, layer.weight.t(), use_gelu=True)
        return gelu(linear(x_PK, layer.weight, layer.bias), approximate="tanh")

    def add_to(
        self,
        residual_PN: torch.Tensor,  # noqa: ARG002
        x_PK: torch.Tensor,
        layer: Weights,
    ) -> torch.Tensor | None:
        return linear(x_PK, layer.weight, layer.bias)


TORCH_GEMM: Gemm = TorchGemm()


def pair_rows(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Outputs of a packed q, k, v projection so that the two elements that turn together are neighbours.

    tensor: weight [3 * H * d, K] or bias [3 * H * d]. Within a head of q and of k, element i of the first
    half goes to place 2i and its partner i + d/2 to 2i + 1; q.k is a sum over a head's elements, so that the
    same order in both leaves attention as it was. v stays.
    """
    q_k, v = tensor.tensor_split([tensor.shape[0] // 3 * 2])
    by_half = q_k.reshape(2 * num_heads, 2, -1, *tensor.shape[1:])
    return torch.cat([by_half.transpose(1, 2).flatten(0, 2), v])


def turns_of(frequencies: torch.Tensor, layout: RotaryLayout, num_heads: int) -> torch.Tensor:
    """float32 [2, 3 * H * d]: by output of a paired projection, the turns (2 pi each) that one row, and one
    column, of distance makes; zero for v, which does not turn.

    frequencies: float32 [d/4], radians. layout: see ``kernels.rotate_qkv_``.
    """
    turns = frequencies.double() / (2 * math.pi)
    zeros = torch.zeros_like(turns)
    if layout == "blocked":
        of_row, of_column = torch.cat([turns, zeros]), torch.cat([zeros, turns])
    else:
        of_row = torch.stack([zeros, turns], dim=-1).flatten()
        of_column = torch.stack([turns, zeros], dim=-1).flatten()
    heads = torch.stack([of_row, of_column]).repeat_interleave(2, dim=1).repeat(1, 2 * num_heads)
    return torch.nn.functional.pad(heads, (0, heads.shape[1] // 2)).float()
