"""Products with custom epilogues in CuTe DSL, through quack (package quack-kernels), on Hopper.

Owns the three epilogues and the tiles. quack's warp-specialised kernel takes a Python function as its
epilogue and compiles it in the first call, which takes about 1.5 s for each function and tile; other numbers
of rows reuse the kernel. Importing this module imports quack; ``available.py`` handles a failure.
flash-attn 4 depends on quack, so one installation provides both.

Source: Dao-AILab/quack, quack/epilogue/frontend.py (the contract of an epilogue function), 0.6.5. The angle
is reduced to a fraction of a turn before the fast sine, as in quack's rotary epilogues.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import torch
from quack.activation import gelu_tanh_approx
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import pack, unpack
from quack.epilogue.ops import ColVecLoad, RowVecLoad
from quack.gemm_config import GemmConfig

from encoder_service.towers.gemm import Rotary, Step, Weights

# Adding and subtracting it rounds a float32 below 2^22 to the nearest integer.
ROUNDING = 12582912.0
TURN = 6.283185307179586


# Every vector is declared as one over rows or over outputs. By the shape alone quack could not distinguish
# them when there are as many rows as outputs.


@gemm_epilogue(
    ops={
        "row": ColVecLoad("row"),
        "column": ColVecLoad("column"),
        "row_turns": RowVecLoad("row_turns"),
        "column_turns": RowVecLoad("column_turns"),
        "bias": RowVecLoad("bias"),
    },
    mode="acc_pair",
)
def rotate(acc, row, column, row_turns, column_turns, bias):
    first, second = unpack(acc + bias)
    row_turn, _ = unpack(row_turns)
    column_turn, _ = unpack(column_turns)
    # One of the two summands is zero, so the sum is exact.
    turns = cute.math.fma(row, row_turn, column * column_turn)
    whole = cute.math.fma(turns, 1.0, ROUNDING) - ROUNDING
    angle = (turns - whole) * TURN
    sine = cute.math.sin(angle, fastmath=True)
    cosine = cute.math.cos(angle, fastmath=True)
    return {"D": pack(first * cosine - second * sine, second * cosine + first * sine)}


@gemm_epilogue(ops={"bias": RowVecLoad("bias")})
def activate(acc, bias):
    return {"D": gelu_tanh_approx(acc + bias)}


@gemm_epilogue(ops={"bias": RowVecLoad("bias")})
def add(acc, c, bias):
    return {"D": acc + c + bias}


@dataclass(frozen=True)
class QuackTile:
    """Rows and columns of a tile, the cluster, and whether two warp groups alternate between tiles."""

    rows: int
    columns: int
    cluster: tuple[int, int]
    pingpong: bool = True

    @property
    def label(self) -> str:
        cluster = "x".join(map(str, self.cluster))
        return f"{self.rows}x{self.columns}-{cluster}{'' if self.pingpong else '-cooperative'}"

    def config(self) -> GemmConfig:
        return GemmConfig(
            tile_m=self.rows,
            tile_n=self.columns,
            pingpong=self.pingpong,
            cluster_m=self.cluster[0],
            cluster_n=self.cluster[1],
            swap_ab=False,
            is_dynamic_persistent=False,
        )


# The fastest of sixteen tiles for the towers' products from 4096 rows on, on an H200. Each is compiled once
# per step that it is tried for.
TILES: dict[QuackTile, frozenset[Step]] = {
    QuackTile(128, 192, (1, 2)): frozenset({"rotate", "add_attention", "add_mlp"}),
    QuackTile(128, 160, (2, 1)): frozenset({"rotate", "gelu"}),
    QuackTile(192, 128, (1, 2)): frozenset({"gelu"}),
}


class QuackGemm:
    """See ``gemm.Gemm``. Needs 16-bit types; K and N must be multiples of 8. Rounds once, after the step."""

    wants_pairs = True

    def __init__(self, tile: QuackTile, steps: Set[Step]) -> None:
        self.steps = steps
        self.name = f"quack-{tile.label}"
        # quack identifies a configuration by object identity, so it is created once.
        self._config: Any = tile.config()

    def rotated(self, x_PK: torch.Tensor, layer: Weights, rotary: Rotary) -> torch.Tensor:
        assert layer.paired is not None
        assert rotary.turns is not None
        weight, bias = layer.paired
        out = x_PK.new_empty(x_PK.shape[0], weight.shape[0])
        positions, turns = rotary.positions, rotary.turns
        rotate(
            x_PK,
            weight.t(),
            None,
            out={"D": out},
            config=self._config,
            tuned=False,
            row=positions[0:1],
            column=positions[1:2],
            row_turns=turns[0:1],
            column_turns=turns[1:2],
            bias=bias[None],
        )
        return out

    def gelu(self, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor:
        out = x_PK.new_empty(x_PK.shape[0], layer.weight.shape[0])
        activate(
            x_PK,
            layer.weight.t(),
            None,
            out={"D": out},
            config=self._config,
            tuned=False,
            bias=layer.bias[None],
        )
        return out

    def add_to(self, residual_PN: torch.Tensor, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor | None:
        """Adds in place: each tile of the residual is read before the same tile is written."""
        add(
            x_PK,
            layer.weight.t(),
            residual_PN,
            out={"D": residual_PN},
            config=self._config,
            tuned=False,
            bias=layer.bias[None],
        )
        return None
