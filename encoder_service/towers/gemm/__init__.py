"""The matrix products of a block, each with the step that follows it.

Owns the protocol of a library of such products (``Gemm``), and torch's implementation, which is always
available. A library that computes the step in the product's epilogue saves a pass over its output.
``available.py`` lists the libraries of a device, ``cases.py`` says what they are measured on.

Shape legend: P patches, K input width, N output width, H heads, d head_dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch.nn.functional import gelu, linear

from encoder_service.towers.rope import RotaryLayout
from encoder_service.towers.selection import Choices

# The steps after the four products of a block: qkv, fc1, proj, fc2.
Step = Literal["rotate", "gelu", "add_attention", "add_mlp"]
STEPS: tuple[Step, ...] = ("rotate", "gelu", "add_attention", "add_mlp")
# Libraries have their fast kernels for rows of whole 16 bytes, of 16-bit elements.
ALIGNED_WIDTH = 8


@dataclass(frozen=True)
class Rotary:
    """Positions and tables for the rotation of one batch's q and k.

    coords: int32 [P, 4], row and column first. cos, sin: float32 [max_side, d/4] by coordinate and frequency.
    layout: see ``kernels.rotate_qkv_``. turns: float32 [2, 3 * H * d], see ``turns_of``; None if no library
    reads it.
    """

    coords: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    layout: RotaryLayout
    num_heads: int
    turns: torch.Tensor | None = None

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """float32 [2, P]: rows, then columns. Computed once for all blocks, if a library reads it."""
        return self.coords[:, :2].t().float().contiguous()


@dataclass(frozen=True)
class Weights:
    """A linear layer's weight [N, K] and bias [N]. paired: the same, with the outputs of q and k in the order
    of ``pair_rows``; None if no library reads it."""

    weight: torch.Tensor
    bias: torch.Tensor
    paired: tuple[torch.Tensor, torch.Tensor] | None = None


def aligned(width: int) -> int:
    """The width to which a gated MLP is widened with zeros. Qwen2.5-VL's is 3420 wide."""
    return width + -width % ALIGNED_WIDTH


class Gemm(Protocol):
    """x [P, K] times a layer, followed by one of three steps. Sums are computed in float32 and rounded to x's
    dtype after the step. If the step is a separate pass, they are also rounded before it.

    Every method launches on the current stream and can be captured. A library that compiles does so in the
    first call, which must come before a capture.
    """

    @property
    def name(self) -> str: ...

    @property
    def steps(self) -> Set[Step]:
        """The steps for which this gemm is tried."""
        ...

    @property
    def wants_pairs(self) -> bool:
        """Whether ``rotated`` reads Weights.paired and Rotary.turns."""
        ...

    def rotated(self, x_PK: torch.Tensor, layer: Weights, rotary: Rotary) -> torch.Tensor:
        """q, k and v side by side [P, 3 * H * d], with q and k rotated by their positions. The elements
        within a head are in the layer's own order or in that of its pairs, in q and k alike."""
        ...

    def gelu(self, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor:
        """The tanh-GELU of the product [P, N]."""
        ...

    def add_to(self, residual_PN: torch.Tensor, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor | None:
        """The product [P, N], which the caller has to add to the residual; None if it was added in place."""
        ...


class TorchGemm:
    """torch's products: bias and GELU in cuBLAS's epilogue, rotation and addition as separate passes."""

    name = "torch"
    steps: Set[Step] = frozenset(STEPS)
    wants_pairs = False

    def rotated(self, x_PK: torch.Tensor, layer: Weights, rotary: Rotary) -> torch.Tensor:
        from encoder_service.towers import kernels  # needs triton, which only the fused path requires

        qkv = linear(x_PK, layer.weight, layer.bias)
        return kernels.rotate_qkv_(
            qkv, rotary.coords, rotary.cos, rotary.sin, rotary.layout, rotary.num_heads
        )

    def gelu(self, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor:
        """On a GPU, computed in the product's epilogue: cuBLASLt's GELU is the tanh form."""
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

# For the product before each step, the gemm by number of rows.
GemmChoices: TypeAlias = Mapping[Step, Choices[Gemm]]
TORCH_CHOICES: GemmChoices = {step: Choices({(1,): TORCH_GEMM}) for step in STEPS}


def pair_rows(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders the outputs of a packed q, k, v projection so that elements that rotate together are adjacent.

    tensor: weight [3 * H * d, K] or bias [3 * H * d]. Within a head of q and of k, element i of the first
    half moves to row 2i and its partner i + d/2 to 2i + 1. q.k is a sum over a head's elements, so the same
    order in both does not change attention. v is unchanged.
    """
    q_k, v = tensor.tensor_split([tensor.shape[0] // 3 * 2])
    by_half = q_k.reshape(2 * num_heads, 2, -1, *tensor.shape[1:])
    return torch.cat([by_half.transpose(1, 2).flatten(0, 2), v])


def turns_of(frequencies: torch.Tensor, layout: RotaryLayout, num_heads: int) -> torch.Tensor:
    """float32 [2, 3 * H * d]: for each output of a paired projection, the rotation in turns (2 pi each) per
    row and per column of distance. Zero for v, which is not rotated.

    frequencies: float32 [d/4], in radians. layout: see ``kernels.rotate_qkv_``.
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
