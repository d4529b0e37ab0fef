"""The matrix products of a fused block, each with the form of input that it reads.

Owns the seam between the fused tower and the libraries that multiply: what stands before a product (a norm, a
GELU, the attention) writes the product's own input form, so that quantising costs no pass of its own where a
row is written anyway. Two implementations: ``WideProduct`` in the weights' own type, ``Fp8Product`` with a
scale per row of the input and per output of the weight. Which block uses which is ``precision``'s.

A product's result is what is still to be added to the residual; None would say that the product has added it
itself, and every kernel that takes a delta takes None.

The kernels are imported where they are called: they import triton, which only the fused path needs.

Shape legend: P patches, K input width, N output width.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.nn.functional import linear

from encoder_service.towers.gemm import Gemm, NormParameters, Rotary, Weights, fold_norm, pair_rows
from encoder_service.towers.gemm.per_rows import TORCH_CHOICES, GemmChoices, PerRows
from encoder_service.towers.layers import Block
from encoder_service.towers.precision import Precision, ProductName

# What a product reads: its rows [P, K], in the form that only the product itself knows.
Rows = TypeVar("Rows")
# e4m3 [P, K] and float32 [P, 1]; row = values * scale.
QuantizedRows = tuple[torch.Tensor, torch.Tensor]


class Product(abc.ABC, Generic[Rows]):
    """One linear layer: ways to make its input, and the product itself with its bias."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Device memory of what is packed beside the plain tower's weights."""

    @abc.abstractmethod
    def input_of_rows(self, x_PK: torch.Tensor) -> Rows:
        """From rows that are written already, in the tower's type."""

    @abc.abstractmethod
    def input_of_norm(self, x_PK: torch.Tensor, delta_PK: torch.Tensor | None, norm: NormParameters) -> Rows:
        """x += delta in place, then LayerNorm of x. The input may hold x itself, which has to stay as it is
        until the product has read it."""

    def input_of_normed(self, x_PK: torch.Tensor, h_PK: torch.Tensor, norm: NormParameters) -> Rows:  # noqa: ARG002
        """From x whose LayerNorm h is written already, in the tower's type; x stays as ``input_of_norm``
        says."""
        return self.input_of_rows(h_PK)

    @abc.abstractmethod
    def input_of_gelu(self, before: Product[Any], rows: Any) -> Rows:
        """tanh-GELU of the product ``before`` of ``rows``, which are of its form."""

    @abc.abstractmethod
    def gelu(self, rows: Rows) -> torch.Tensor:
        """tanh-GELU of this product, [P, N] in the tower's type."""

    def rotated(self, rows: Rows, rotary: Rotary) -> torch.Tensor:
        """q, k and v [P, 3 * H * d], q and k turned by their positions; see ``gemm.Gemm.rotated``."""
        from encoder_service.towers import kernels

        return kernels.rotate_qkv_(
            self(rows), rotary.coords, rotary.cos, rotary.sin, rotary.layout, rotary.num_heads
        )

    def add_to(self, residual_PN: torch.Tensor, rows: Rows) -> torch.Tensor | None:  # noqa: ARG002
        """What is still to be added to the residual; None: the product has been added in place."""
        return self(rows)

    @abc.abstractmethod
    def __call__(self, rows: Rows) -> torch.Tensor:
        """[P, N] in the tower's type, bias added."""


@dataclass(frozen=True)
class WideRows:
    """What multiplies, and its own form of the rows: a plain tensor unless a norm is folded in."""

    gemm: Gemm
    rows: Any


class WideProduct(Product[WideRows]):
    """In the weights' own type, on the layer's own tensors.

    gemms: by number of rows, what multiplies. norm: before the layer, where its input comes from one; the
    layer is then kept a second time with the norm folded in, when one of the gemms reads that. num_heads: of
    a packed q, k, v projection, whose folded form is in pairs.
    """

    def __init__(
        self,
        layer: torch.nn.Linear,
        gemms: PerRows,
        *,
        norm: NormParameters | None = None,
        num_heads: int | None = None,
    ) -> None:
        self._gemms = gemms
        folded = None
        if norm is not None and gemms.folds_norm:
            parameters: tuple[torch.Tensor, torch.Tensor] = layer.weight, layer.bias
            if num_heads is not None:
                parameters = pair_rows(layer.weight, num_heads), pair_rows(layer.bias, num_heads)
            folded = fold_norm(*parameters, norm)
        self._weights = Weights(layer.weight, layer.bias, folded)

    @property
    def num_bytes(self) -> int:
        """Of what the plain tower does not have: the layer with its norm folded in."""
        folded = self._weights.folded
        return folded.num_bytes if folded is not None else 0

    def input_of_rows(self, x_PK: torch.Tensor) -> WideRows:
        return WideRows(self._gemms.choose(x_PK.shape[0]), x_PK)

    def input_of_norm(
        self, x_PK: torch.Tensor, delta_PK: torch.Tensor | None, norm: NormParameters
    ) -> WideRows:
        gemm = self._gemms.choose(x_PK.shape[0])
        return WideRows(gemm, gemm.normed(x_PK, delta_PK, norm))

    def input_of_normed(self, x_PK: torch.Tensor, h_PK: torch.Tensor, norm: NormParameters) -> WideRows:
        gemm = self._gemms.choose(x_PK.shape[0])
        return WideRows(gemm, gemm.normed(x_PK, None, norm) if gemm.folds_norm else h_PK)

    def input_of_gelu(self, before: Product[Any], rows: Any) -> WideRows:
        return self.input_of_rows(before.gelu(rows))

    def rotated(self, rows: WideRows, rotary: Rotary) -> torch.Tensor:
        return rows.gemm.rotated(rows.rows, self._weights, rotary)

    def gelu(self, rows: WideRows) -> torch.Tensor:
        return rows.gemm.gelu(rows.rows, self._weights)

    def add_to(self, residual_PN: torch.Tensor, rows: WideRows) -> torch.Tensor | None:
        return rows.gemm.add_to(residual_PN, rows.rows, self._weights)

    def __call__(self, rows: WideRows) -> torch.Tensor:
        """Of plain rows, by torch: with no step after it, no other gemm gains anything."""
        return linear(rows.rows, self._weights.weight, self._weights.bias)


class Fp8Product(Product[QuantizedRows]):
    """e4m3 times e4m3, summed wider, scaled by row and by output, bias added, rounded to the bias's type.

    The weight is packed once: each output's largest magnitude becomes 448. K and N are multiples of 16
    (``precision.check_fp8_sizes``); on a GPU the layer's type is bfloat16.
    """

    def __init__(self, layer: torch.nn.Linear, *, fast_accumulation: bool) -> None:
        from encoder_service.towers import kernels

        values_NK, scale_N1 = kernels.quantize_rows(layer.weight)
        # Column-major [K, N], which is what the product takes, is the packed weight seen from the other side.
        self._weight_KN = values_NK.t()
        self._scale_1N = scale_N1.t()
        self._bias_N = layer.bias
        self._fast_accumulation = fast_accumulation

    @property
    def num_bytes(self) -> int:
        """Of the packed weight and its scales."""
        return self._weight_KN.nbytes + self._scale_1N.nbytes

    def input_of_rows(self, x_PK: torch.Tensor) -> QuantizedRows:
        from encoder_service.towers import kernels

        return kernels.quantize_rows(x_PK)

    def input_of_norm(
        self, x_PK: torch.Tensor, delta_PK: torch.Tensor | None, norm: NormParameters
    ) -> QuantizedRows:
        from encoder_service.towers import kernels

        return kernels.add_norm_quantize(x_PK, delta_PK, *norm)

    def input_of_gelu(self, before: Product[Any], rows: Any) -> QuantizedRows:
        from encoder_service.towers import kernels

        return kernels.gelu_quantize(before(rows), "tanh")

    def gelu(self, rows: QuantizedRows) -> torch.Tensor:
        from encoder_service.towers import kernels

        return kernels.gelu_(self(rows), "tanh")

    def __call__(self, rows: QuantizedRows) -> torch.Tensor:
        values_PK, scale_P1 = rows
        return torch._scaled_mm(
            values_PK,
            self._weight_KN,
            scale_P1,
            self._scale_1N,
            bias=self._bias_N,
            out_dtype=self._bias_N.dtype,
            use_fast_accum=self._fast_accumulation,
        )


@dataclass(frozen=True)
class BlockProducts:
    """A block as the fused tower runs it: its products and its norms' parameters."""

    norm1: NormParameters
    qkv: Product[Any]
    proj: Product[Any]
    norm2: NormParameters
    fc1: Product[Any]
    fc2: Product[Any]

    def products(self) -> tuple[Product[Any], ...]:
        return self.qkv, self.proj, self.fc1, self.fc2


def pack_blocks(
    blocks: Iterable[Block], precision: Precision, gemms: GemmChoices, *, num_heads: int
) -> list[BlockProducts]:
    """Every block's products under the policy; weights in fp8 and weights with a norm folded in are packed
    here, beside the blocks' own."""
    given = list(blocks)

    def pack(name: ProductName, layer: torch.nn.Linear, index: int) -> Product[Any]:
        block, depth = given[index], len(given)
        if precision.is_fp8(name, index, depth):
            return Fp8Product(layer, fast_accumulation=precision.fast_accumulation)
        if name == "qkv":
            return WideProduct(layer, gemms.rotate, norm=norm_of(block.norm1), num_heads=num_heads)
        if name == "fc1":
            # fc2 in fp8 takes the GELU into its own input: fc1 is then a product with no step after it.
            is_plain = precision.is_fp8("fc2", index, depth)
            chosen = TORCH_CHOICES.gelu if is_plain else gemms.gelu
            return WideProduct(layer, chosen, norm=norm_of(block.norm2))
        return WideProduct(layer, gemms.add_attention if name == "proj" else gemms.add_mlp)

    return [
        BlockProducts(
            norm1=norm_of(block.norm1),
            qkv=pack("qkv", block.qkv, index),
            proj=pack("proj", block.proj, index),
            norm2=norm_of(block.norm2),
            fc1=pack("fc1", block.fc1, index),
            fc2=pack("fc2", block.fc2, index),
        )
        for index, block in enumerate(given)
    ]


def packed_bytes(blocks: Iterable[BlockProducts]) -> int:
    """Device memory of packed weights, which stand beside the plain tower's."""
    return sum(product.num_bytes for block in blocks for product in block.products())


def norm_of(norm: torch.nn.LayerNorm) -> NormParameters:
    """Weight, bias and epsilon."""
    return norm.weight, norm.bias, norm.eps
