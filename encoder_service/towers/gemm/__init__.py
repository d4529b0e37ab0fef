"""Matrix products with the steps around them: between the blocks' products and the libraries behind.

Owns what such a library is, and the one that is always there. A library that takes the step after a product
into its epilogue saves a pass over the output; one that takes the norm before it too saves writing the normed
rows and reading them again. Which library serves which product at which number of
rows is measured (select.py) and looked up (per_rows.py).

Shape legend: P patches, K input width, N output width, H heads, d head_dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch.nn.functional import gelu, linear

RotaryLayout = Literal["blocked", "interleaved"]
# What follows the four products of a block: qkv, fc1, proj, fc2.
Step = Literal["rotate", "gelu", "add_attention", "add_mlp"]
STEPS: tuple[Step, ...] = ("rotate", "gelu", "add_attention", "add_mlp")
# Weight [K], bias [K], epsilon.
NormParameters = tuple[torch.Tensor, torch.Tensor, float]


class Rotary:
    """What the rotation of one batch's q and k needs.

    coords: int32 [P, 4], row and column first. cos, sin: float32 [max_side, d/4] by coordinate and frequency.
    layout: see ``kernels.rotate_qkv_``. turns: float32 [2, 3 * H * d], see ``turns_of``, or None where no
    library asks for it.
    """

    def __init__(
        self,
        coords: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layout: RotaryLayout,
        num_heads: int,
        turns: torch.Tensor | None = None,
    ) -> None:
        self.coords = coords
        self.cos = cos
        self.sin = sin
        self.layout = layout
        self.num_heads = num_heads
        self.turns = turns

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """float32 [2, P]: rows, then columns. Made once for all blocks, where a library asks for it."""
        return self.coords[:, :2].t().float().contiguous()


@dataclass(frozen=True)
class FoldedWeights:
    """A linear layer with the LayerNorm before it, for a product that reads rows which are not normed:
    layer(norm(x)) = rstd * (x @ weight.T - mean * column_sums) + bias, with each row's mean and rstd.

    weight: [N, K], the layer's times the norm's by input, in the layer's type. column_sums: float32 [N], over
    K, of the weight as it is rounded, so that a mean leaves no trace. bias: float32 [N], with what the norm's
    bias adds.
    """

    weight: torch.Tensor
    column_sums: torch.Tensor
    bias: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + self.column_sums.nbytes + self.bias.nbytes


@dataclass(frozen=True)
class UnnormedRows:
    """Rows [P, K] and what their LayerNorm needs of each, float32 [P]: mean and 1 / standard deviation."""

    x_PK: torch.Tensor
    mean_P: torch.Tensor
    rstd_P: torch.Tensor


@dataclass(frozen=True)
class Weights:
    """A linear layer's weight [N, K] and bias [N]. folded: the same with the norm before it, the outputs of q
    and k in the order of ``pair_rows``; None where no library asks for it."""

    weight: torch.Tensor
    bias: torch.Tensor
    folded: FoldedWeights | None = None


class Gemm(Protocol):
    """Rows [P, K] times a layer, behind a norm or not, followed by one of three steps. Sums are float32,
    rounded to the rows' type after the step, and before it as well where the step is a pass of its own.

    Every method launches on the current stream and can be captured; a library that compiles does so in the
    first call, which must come before a capture.
    """

    @property
    def name(self) -> str: ...

    @property
    def steps(self) -> Set[Step]:
        """The steps it is worth trying for."""
        ...

    @property
    def folds_norm(self) -> bool:
        """Whether the norm before a product is part of it: ``rotated`` and ``gelu`` read Weights.folded, and
        ``rotated`` Rotary.turns too."""
        ...

    def normed(self, x_PK: torch.Tensor, delta_PK: torch.Tensor | None, norm: NormParameters) -> Any:
        """x += delta in place, then LayerNorm of x in the form that ``rotated`` and ``gelu`` read. The form
        may hold x itself, which has to stay as it is until they have read it."""
        ...

    def rotated(self, rows: Any, layer: Weights, rotary: Rotary) -> torch.Tensor:
        """q, k and v side by side [P, 3 * H * d], q and k turned by their positions; rows: as ``normed``
        gives them. q and k have the same order of elements within a head, the layer's own or that of its
        pairs."""
        ...

    def gelu(self, rows: Any, layer: Weights) -> torch.Tensor:
        """tanh-GELU of the product [P, N]; rows: as ``normed`` gives them."""
        ...

    def add_to(self, residual_PN: torch.Tensor, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor | None:
        """The product [P, N], still to be added to the residual; None: it has been added in place."""
        ...


class TorchGemm:
    """torch's own: bias and GELU in cuBLAS's epilogue; norm, rotation and addition are passes themselves."""

    name = "torch"
    steps: Set[Step] = frozenset(STEPS)
    folds_norm = False

    def normed(self, x_PK: torch.Tensor, delta_PK: torch.Tensor | None, norm: NormParameters) -> torch.Tensor:
        from encoder_service.towers import kernels  # triton, which only the fused path needs

        return kernels.add_norm(x_PK, delta_PK, *norm)

    def rotated(self, rows: torch.Tensor, layer: Weights, rotary: Rotary) -> torch.Tensor:
        from encoder_service.towers import kernels

        qkv = linear(rows, layer.weight, layer.bias)
        return kernels.rotate_qkv_(
            qkv, rotary.coords, rotary.cos, rotary.sin, rotary.layout, rotary.num_heads
        )

    def gelu(self, rows: torch.Tensor, layer: Weights) -> torch.Tensor:
        """On a GPU in the product's epilogue: cuBLASLt's GELU is the tanh form."""
        if rows.is_cuda:
            return torch._addmm_activation(layer.bias, rows, layer.weight.t(), use_gelu=True)
        return gelu(linear(rows, layer.weight, layer.bias), approximate="tanh")

    def add_to(
        self,
        residual_PN: torch.Tensor,  # noqa: ARG002
        x_PK: torch.Tensor,
        layer: Weights,
    ) -> torch.Tensor | None:
        return linear(x_PK, layer.weight, layer.bias)


TORCH_GEMM: Gemm = TorchGemm()


@torch.no_grad()
def fold_norm(weight: torch.Tensor, bias: torch.Tensor, norm: NormParameters) -> FoldedWeights:
    """A layer's weight [N, K] and bias [N] behind a LayerNorm. Sums are made in float64."""
    norm_weight, norm_bias, _ = norm
    folded = (weight.float() * norm_weight.float()).to(weight.dtype)
    return FoldedWeights(
        folded,
        folded.double().sum(1).float(),
        (bias.double() + weight.double() @ norm_bias.double()).float(),
    )


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
