"""A gemm in plain torch with the contract of those that rotate neighbours and add in place."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, linear

from encoder_service.towers.gemm import STEPS, Rotary, Weights

TURN = 2 * torch.pi


class PairGemm:
    """Formulas of quack_gemm's epilogues, in float32."""

    name = "pairs"
    steps = frozenset(STEPS)
    wants_pairs = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def rotated(self, x_PK: torch.Tensor, layer: Weights, rotary: Rotary) -> torch.Tensor:
        self.calls.append("rotated")
        assert layer.paired is not None
        assert rotary.turns is not None
        qkv = linear(x_PK, *layer.paired).float()
        turns = rotary.positions.t() @ rotary.turns
        # Both neighbours of a pair turn alike.
        assert torch.equal(turns[:, ::2], turns[:, 1::2])
        angle = turns[:, ::2] * TURN
        first, second = qkv[:, ::2], qkv[:, 1::2]
        pairs = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
        return torch.stack(pairs, dim=-1).flatten(1).to(x_PK.dtype)

    def gelu(self, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor:
        self.calls.append("gelu")
        return gelu(linear(x_PK, layer.weight, layer.bias), approximate="tanh")

    def add_to(self, residual_PN: torch.Tensor, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor | None:
        self.calls.append("add_to")
        residual_PN += linear(x_PK, layer.weight, layer.bias)
        return None
