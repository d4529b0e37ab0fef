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

from encoder_service.towers.gemm import Rotary, Weights, pair_rows
from encoder_service.towers.gemm.per_rows import GemmChoices, PerRows
from encoder_service.towers.layers import Block
from encoder_service.towers.precision import Precision, ProductName

# What a product reads: its rows [P, K], in the form that only the product itself knows.
Rows = TypeVar("Rows")
NormParameters = tuple[torch.Tensor, torch.Tensor, float]
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
        """x += delta in place, then LayerNorm of x."""

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


class WideProduct(Product[torch.Tensor]):
    """In the weights' own type, on the layer's own tensors.

    gemms: by number of rows, what multiplies. num_heads: of a packed q, k, v projection; its weight is then
    kept a second time, in pairs, when one of the gemms reads it.
    """

    def __init__(self, layer: torch.nn.Linear, gemms: PerRows, *, num_heads: int | None = None) -> None:
        self._gemms = gemms
        paired = None
        if num_heads is not None and any(gemm.wants_pairs for gemm in gemms.choices.values()):
            paired = pair_rows(layer.weight, num_heads), pair_rows(layer.bias, num_heads)
        self._weights = Weights(layer.weight, layer.bias, paired)

    @property
    def num_bytes(self) -> int:
        """Of what the plain tower does not have: the weight in pairs."""
        return sum(tensor.nbytes for tensor in self._weights.paired or ())

    def input_of_rows(self, x_PK: torch.Tensor) -> torch.Tensor:
        return x_PK

    def input_of_norm(
        self, x_PK: torch.Tensor, delta_PK: torch.Tensor | None, norm: NormParameters
    ) -> torch.Tensor:
        from encoder_service.towers import kernels

        return kernels.add_norm(x_PK, delta_PK, *norm)

    def input_of_gelu(self, before: Product[Any], rows: Any) -> torch.Tensor:
        return before.gelu(rows)

    def rotated(self, rows: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        return self._gemms.choose(rows.shape[0]).rotated(rows, self._weights, rotary)

    def gelu(self, rows: torch.Tensor) -> torch.Tensor:
        return self._gemms.choose(rows.shape[0]).gelu(rows, self._weights)

    def add_to(self, residual_PN: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        return self._gemms.choose(rows.shape[0]).add_to(residual_PN, rows, self._weights)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self._weights.weight, self._weights.bias)


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
    """Every block's products under the policy; fp8 weights are packed here, beside the blocks' own."""
    given = list(blocks)

    def pack(name: ProductName, layer: torch.nn.Linear, index: int) -> Product[Any]:
        if precision.is_fp8(name, index, len(given)):
            return Fp8Product(layer, fast_accumulation=precision.fast_accumulation)
        if name == "qkv":
            return WideProduct(layer, gemms.rotate, num_heads=num_heads)
        return WideProduct(
            layer, {"proj": gemms.add_attention, "fc1": gemms.gelu, "fc2": gemms.add_mlp}[name]
        )

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
