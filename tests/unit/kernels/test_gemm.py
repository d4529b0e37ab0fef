"""Gemms: pairs that rotate, and the check of each step. How one is chosen: towers/test_attention_select."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from encoder_service.errors import ConfigurationError
from encoder_service.towers.gemm import STEPS, TORCH_GEMM, Gemm, Rotary, Weights, pair_rows, turns_of
from encoder_service.towers.gemm.cases import gemm_selections, make_trial
from encoder_service.towers.layers import BlockShape
from tests.unit.kernels.pair_gemm import PairGemm

pytest.importorskip("triton")

SHAPE = BlockShape(32, intermediate_size=48, num_heads=2, head_dim=16, rope_theta=100.0, layout="blocked")


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted here."""
    monkeypatch.setattr("encoder_service.towers.gemm.cases.NUM_CALLS", 1)
    monkeypatch.setattr("encoder_service.towers.gemm.cases.NUM_ROUNDS", 1)


def test_pairs_stand_side_by_side_and_v_stays() -> None:
    # 2 heads of 4: elements 0 1 | 2 3 of a head, where 0 turns with 2 and 1 with 3.
    rows = torch.arange(24)
    pairs = [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15]
    assert pair_rows(rows, 2).tolist() == [*pairs, *range(16, 24)]


@pytest.mark.parametrize(
    ("layout", "of_row", "of_column"),
    [
        ("blocked", [1.0, 0.1, 0.0, 0.0], [0.0, 0.0, 1.0, 0.1]),
        ("interleaved", [0.0, 1.0, 0.0, 0.1], [1.0, 0.0, 0.1, 0.0]),
    ],
)
def test_turns_follow_the_layout(layout: str, of_row: list[float], of_column: list[float]) -> None:
    turns = turns_of(torch.tensor([1.0, 0.1]), layout, num_heads=1) * (2 * torch.pi)  # type: ignore[arg-type]
    expected = torch.tensor([of_row, of_column]).repeat_interleave(2, dim=1).repeat(1, 2)
    assert turns.shape == (2, 24)
    assert torch.allclose(turns[:, :16], expected)
    assert not turns[:, 16:].any()


@pytest.mark.parametrize("step", ["rotate", "gelu", "add_attention", "add_mlp"])
@pytest.mark.parametrize(("layout", "head_dim"), [("blocked", 16), ("interleaved", 24)])
def test_a_right_gemm_passes_the_check_and_a_wrong_one_does_not(
    step: Any, layout: Any, head_dim: int, device: torch.device
) -> None:
    """Heads whose size is not the tower's width over their number are Kimi-K3's."""
    shape = BlockShape(32, 48, 2, head_dim, 100.0, layout)
    trial = make_trial(step, shape, 24, torch.float32, device)
    # A GPU's own tanh is good to a few units of the last place.
    assert trial.error(TORCH_GEMM) < (1e-6 if device.type == "cpu" else 5e-6)
    assert trial.error(PairGemm()) < 1e-5
    assert trial.error(WrongGemm()) > 1e-2


class WrongGemm(PairGemm):
    """Forgets the bias."""

    name = "wrong"

    def rotated(self, x_PK: torch.Tensor, layer: Weights, rotary: Rotary) -> torch.Tensor:
        assert layer.paired is not None
        weight, bias = layer.paired
        return super().rotated(x_PK, Weights(weight, bias, (weight, torch.zeros_like(bias))), rotary)

    def gelu(self, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor:
        return super().gelu(x_PK, Weights(layer.weight, torch.zeros_like(layer.bias)))

    def add_to(self, residual_PN: torch.Tensor, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor | None:
        return super().add_to(residual_PN, x_PK, Weights(layer.weight, torch.zeros_like(layer.bias)))


class RaisingGemm(PairGemm):
    name = "raises"

    def gelu(self, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor:
        raise RuntimeError(f"no tile for {list(x_PK.shape)}")


def test_p45_saved_gemms_are_checked_and_not_timed(device: torch.device) -> None:
    gemms: list[Gemm] = [TORCH_GEMM, PairGemm(), WrongGemm(), RaisingGemm()]
    selection = gemm_selections(gemms, [8], SHAPE, torch.float32, device)["gelu"]
    assert selection.check({"8": "pairs"}).names == {"8": "pairs"}
    for names in ({"8": "absent"}, {"16": "pairs"}, {"8": "wrong"}, {"8": "raises"}):
        with pytest.raises(ConfigurationError, match=r"^gelu "):
            selection.check(names)


def test_torch_serves_where_no_gemm_is_left(device: torch.device) -> None:
    def broken(run: Callable[[], object]) -> float:
        raise RuntimeError("no events")

    selections = gemm_selections([TORCH_GEMM, PairGemm()], [4], SHAPE, torch.float32, device)
    assert {step: selection.measure(broken).names for step, selection in selections.items()} == {
        step: {"4": "torch"} for step in STEPS
    }
