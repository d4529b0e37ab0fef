"""The matrix products of a fused block, each with the form of input that it reads.

Owns the seam between the fused tower and the libraries that multiply: what stands before a product (a norm, a
GELU, the attention) writes the product's own input form, so that quantising costs no pass of its own where a
row is written anyway. Two implementations: ``WideProduct`` in the weights' own type, ``Fp8Product`` with a
scale per row of the input and per output of the weight. Which block uses which is ``precision``'s.

A product's result is what is still to be added to the residual; None would say that the product has added it
itself, and every kernel that takes a delta takes None.

Shape legend: P patches, K input width, N output width.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.nn.functional import gelu, linear

from encoder_service.towers.layers import Block
from encoder_service.towers.precision import Precision, ProductName

# What a product reads: its rows [P, K], in the form that only the product itself knows.
Rows = TypeVar("Rows")
NormParameters = tuple[torch.Tensor, torch.Tensor, float]
# e4m3 [P, K] and float32 [P, 1]; row = values * scale.
QuantizedRows = tuple[torch.Tensor, torch.Tensor]


class Product(abc.ABC, Generic[Rows]):
    """One linear layer: ways to make its input, and the product itself with its bias."""

    def __init__(self) -> None:
        from encoder_service.towers import kernels  # triton, which only the fused path needs

        self._kernels = kernels

    @abc.abstractmethod
    def input_of_rows(self, x_PK: torch.Tensor) -> Rows:
        """From rows that are written already, in the tower's type."""

    @abc.abstractmethod
    def input_of_norm(self, x_PK: torch.Tensor, delta_PK: torch.Tensor | None, norm: NormParameters) -> Rows:
        """x += delta in place, then LayerNorm of x."""

    @abc.abstractmethod
    def input_of_gelu(self, before: Product[Any], rows: Any) -> Rows:
        """tanh-GELU of the product ``before`` of ``rows``, which are of its form."""

    @abc.abstractmethod
    def gelu(self, rows: Rows) -> torch.Tensor:
        """tanh-GELU of this product, [P, N] in the tower's type."""

    @abc.abstractmethod
    def __call__(self, rows: Rows) -> torch.Tensor:
        """[P, N] in the tower's type, bias added."""


class WideProduct(Product[torch.Tensor]):
    """In the weights' own type, on the layer's own tensors."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self._weight_NK = layer.weight
        self._bias_N = layer.bias

    def input_of_rows(self, x_PK: torch.Tensor) -> torch.Tensor:
        return x_PK

    def input_of_norm(
        self, x_PK: torch.Tensor, delta_PK: torch.Tensor | None, norm: NormParameters
    ) -> torch.Tensor:
        return self._kernels.add_norm(x_PK, delta_PK, *norm)

    def input_of_gelu(self, before: Product[Any], rows: Any) -> torch.Tensor:
        return before.gelu(rows)

    def gelu(self, rows: torch.Tensor) -> torch.Tensor:
        """On a GPU in the product's epilogue: cuBLASLt's GELU is the tanh form."""
        if rows.is_cuda:
            return torch._addmm_activation(self._bias_N, rows, self._weight_NK.t(), use_gelu=True)
        return gelu(self(rows), approximate="tanh")

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self._weight_NK, self._bias_N)


class Fp8Product(Product[QuantizedRows]):
    """e4m3 times e4m3, summed wider, scaled by row and by output, bias added, rounded to the bias's type.

    The weight is packed once: each output's largest magnitude becomes 448. K and N are multiples of 16
    (``precision.check_fp8_sizes``); on a GPU the layer's type is bfloat16.
    """

    def __init__(self, layer: torch.nn.Linear, *, fast_accumulation: bool) -> None:
        super().__init__()
        values_NK, scale_N1 = self._kernels.quantize_rows(layer.weight)
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
        return self._kernels.quantize_rows(x_PK)

    def input_of_norm(
        self, x_PK: torch.Tensor, delta_PK: torch.Tensor | None, norm: NormParameters
    ) -> QuantizedRows:
        return self._kernels.add_norm_quantize(x_PK, delta_PK, *norm)

    def input_of_gelu(self, before: Product[Any], rows: Any) -> QuantizedRows:
        return self._kernels.gelu_quantize(before(rows), "tanh")

    def gelu(self, rows: QuantizedRows) -> torch.Tensor:
        return self._kernels.gelu_(self(rows), "tanh")

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


def pack_blocks(blocks: Iterable[Block], precision: Precision) -> list[BlockProducts]:
    """Every block's products under the policy; fp8 weights are packed here, beside the blocks' own."""
    given = list(blocks)

    def pack(name: ProductName, layer: torch.nn.Linear, index: int) -> Product[Any]:
        if precision.is_fp8(name, index, len(given)):
            return Fp8Product(layer, fast_accumulation=precision.fast_accumulation)
        return WideProduct(layer)

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
    """Device memory of fp8 weights, which stand beside the plain tower's."""
    return sum(
        product.num_bytes
        for block in blocks
        for product in block.products()
        if isinstance(product, Fp8Product)
    )


def norm_of(norm: torch.nn.LayerNorm) -> NormParameters:
    """Weight, bias and epsilon."""
    return norm.weight, norm.bias, norm.eps
