"""Which gemm serves which product: only one that is right and faster is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from encoder_service.errors import ConfigurationError
from encoder_service.towers.gemm import TORCH_GEMM, Gemm, Rotary, Weights, pair_rows, turns_of
from encoder_service.towers.gemm.cases import gemm_selections, make_trial
from encoder_service.towers.layers import BlockShape
from encoder_service.towers.selection import Choices, TimeMs
from tests.unit.kernels.pair_gemm import PairGemm

pytest.importorskip("triton")

SHAPE = BlockShape(hidden_size=32, intermediate_size=48, num_heads=2, rope_theta=100.0, layout="blocked")


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
@pytest.mark.parametrize("layout", ["blocked", "interleaved"])
def test_a_right_gemm_passes_the_check_and_a_wrong_one_does_not(
    step: Any, layout: str, device: torch.device
) -> None:
    shape = BlockShape(32, 48, 2, 100.0, layout)  # type: ignore[arg-type]
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


class WrongFromGemm(PairGemm):
    """Right below ``num_rows``, its GELU forgets the bias from there on."""

    name = "wrong_from"

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows

    def gelu(self, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor:
        bias = layer.bias if x_PK.shape[0] < self._num_rows else torch.zeros_like(layer.bias)
        return super().gelu(x_PK, Weights(layer.weight, bias))


def chosen_of(
    gemms: list[Gemm], rows: list[int], time_ms: TimeMs, device: torch.device
) -> dict[str, dict[str, str]]:
    """The names of the choices by step and number of rows."""
    selections = gemm_selections(gemms, rows, SHAPE, torch.float32, device)
    return {step: selection.measure(time_ms).names for step, selection in selections.items()}


def timed_by(milliseconds: dict[str, float]) -> tuple[TimeMs, list[Gemm]]:
    """A clock that recognises a gemm by what it calls."""
    gemms: list[Gemm] = [TORCH_GEMM, *(kind() for kind in (PairGemm, WrongGemm, RaisingGemm))]
    pairs = gemms[1]
    assert isinstance(pairs, PairGemm)

    def time_ms(run: Callable[[], object]) -> float:
        before = len(pairs.calls)
        run()
        return milliseconds["pairs" if len(pairs.calls) > before else "torch"]

    return time_ms, gemms


@pytest.mark.parametrize(("pairs_ms", "expected"), [(0.5, "pairs"), (0.995, "torch")])
def test_the_fastest_right_gemm_is_chosen_and_ties_stay_with_torch(
    pairs_ms: float, expected: str, device: torch.device
) -> None:
    time_ms, gemms = timed_by({"pairs": pairs_ms, "torch": 1.0})
    names = chosen_of(gemms, [8], time_ms, device)
    assert names["rotate"] == {"8": expected}
    assert names["add_mlp"] == {"8": expected}
    assert "wrong" not in str(names)


def test_p45_saved_gemms_are_checked_and_not_timed(device: torch.device) -> None:
    _, gemms = timed_by({})
    selection = gemm_selections(gemms, [8], SHAPE, torch.float32, device)["gelu"]
    assert selection.check({"8": "pairs"}).names == {"8": "pairs"}
    for names in ({"8": "absent"}, {"16": "pairs"}, {"8": "wrong"}, {"8": "raises"}):
        with pytest.raises(ConfigurationError, match=r"^gelu "):
            selection.check(names)


def test_a_gemm_that_raises_is_left_out_of_that_step_only(device: torch.device) -> None:
    raising = RaisingGemm()
    assert chosen_of([TORCH_GEMM, raising], [8], counting_down(), device) == {
        "rotate": {"8": "raises"},
        "gelu": {"8": "torch"},
        "add_attention": {"8": "raises"},
        "add_mlp": {"8": "raises"},
    }


def test_a_gemm_that_is_wrong_at_one_number_of_rows_serves_none(device: torch.device) -> None:
    names = chosen_of([TORCH_GEMM, WrongFromGemm(8)], [4, 8], counting_down(), device)
    assert names["gelu"] == {"4": "torch", "8": "torch"}
    assert names["add_mlp"] == {"4": "wrong_from", "8": "wrong_from"}


def test_torch_serves_where_no_gemm_is_left(device: torch.device) -> None:
    def broken(run: Callable[[], object]) -> float:
        raise RuntimeError("no events")

    assert chosen_of([TORCH_GEMM, PairGemm()], [4], broken, device)["gelu"] == {"4": "torch"}


def counting_down() -> TimeMs:
    """Every later candidate is faster."""
    left = [1024.0]

    def time_ms(run: Callable[[], object]) -> float:
        run()
        left[0] /= 2
        return left[0]

    return time_ms


def test_numbers_of_rows_take_the_nearest_choice_by_ratio() -> None:
    pairs = PairGemm()
    choices: Choices[Gemm] = Choices({(1024,): TORCH_GEMM, (16384,): pairs})
    names = [choices.nearest(rows).name for rows in (0, 1, 1024, 4000, 4200, 100_000)]
    assert names == ["torch"] * 4 + ["pairs"] * 2
