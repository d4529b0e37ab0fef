"""A gemm in plain torch with the contract of those that fold the norm, rotate neighbours and add in place."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, linear

from encoder_service.towers.gemm import (
    STEPS,
    FoldedWeights,
    NormParameters,
    Rotary,
    UnnormedRows,
    Weights,
)

TURN = 2 * torch.pi


class PairGemm:
    """Formulas of quack_gemm's epilogues, in float32."""

    name = "pairs"
    steps = frozenset(STEPS)
    folds_norm = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def normed(self, x_PK: torch.Tensor, delta_PK: torch.Tensor | None, norm: NormParameters) -> UnnormedRows:
        from encoder_service.towers import kernels

        self.calls.append("normed")
        return UnnormedRows(x_PK, *kernels.row_statistics(x_PK, delta_PK, norm[2]))

    def rotated(self, rows: UnnormedRows, layer: Weights, rotary: Rotary) -> torch.Tensor:
        self.calls.append("rotated")
        assert layer.folded is not None
        assert rotary.turns is not None
        qkv = product_of_unnormed(rows, layer.folded)
        turns = rotary.positions.t() @ rotary.turns
        # Both neighbours of a pair turn alike.
        assert torch.equal(turns[:, ::2], turns[:, 1::2])
        angle = turns[:, ::2] * TURN
        first, second = qkv[:, ::2], qkv[:, 1::2]
        pairs = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
        return torch.stack(pairs, dim=-1).flatten(1).to(rows.x_PK.dtype)

    def gelu(self, rows: UnnormedRows, layer: Weights) -> torch.Tensor:
        self.calls.append("gelu")
        assert layer.folded is not None
        return gelu(product_of_unnormed(rows, layer.folded), approximate="tanh").to(rows.x_PK.dtype)

    def add_to(self, residual_PN: torch.Tensor, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor | None:
        self.calls.append("add_to")
        residual_PN += linear(x_PK, layer.weight, layer.bias)
        return None


def product_of_unnormed(rows: UnnormedRows, folded: FoldedWeights) -> torch.Tensor:
    """float32 [P, N]: the layer behind its norm, in the order in which an epilogue computes it."""
    acc = rows.x_PK.float() @ folded.weight.float().t()
    return (acc - rows.mean_P[:, None] * folded.column_sums) * rows.rstd_P[:, None] + folded.bias
