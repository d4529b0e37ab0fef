"""Gemms with a step in their epilogue: the tower's rows stay the same, and only what is right and faster
is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from encoder_service.towers import load_tower
from encoder_service.towers.attention import SdpaAttention
from encoder_service.towers.fused import FusedTower
from encoder_service.towers.gemm import (
    TORCH_GEMM,
    FoldedWeights,
    Gemm,
    NormParameters,
    Rotary,
    UnnormedRows,
    Weights,
    fold_norm,
    pair_rows,
    turns_of,
)
from encoder_service.towers.gemm.per_rows import GemmChoices, PerRows
from encoder_service.towers.gemm.select import (
    BlockShape,
    choose_gemms,
    find_gemms,
    make_trial,
    random_layer,
    relative_error,
)
from encoder_service.towers.precision import Precision
from encoder_service.towers.products import packed_bytes
from encoder_service.towers.rope import inverse_frequencies
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.types import Grid
from tests.parity.tower_cases import errors, fresh_seed, report
from tests.unit.kernels.pair_gemm import PairGemm, product_of_unnormed
from tests.unit.kernels.references import EPS, norm_float32

pytest.importorskip("triton")

GRIDS = [Grid(1, 2, 8), Grid(1, 6, 4), Grid(2, 2, 2)]
# Two calls instead of eight: the interpreter takes its time.
FEW_CALLS = 2
SHAPE = BlockShape(hidden_size=32, intermediate_size=48, num_heads=2, rope_theta=100.0, layout="blocked")


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.towers.gemm.select.NUM_CALLS", FEW_CALLS)


def choices_of(gemm: Gemm) -> GemmChoices:
    return GemmChoices(*(PerRows({64: gemm}) for _ in range(4)))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "kimi_k25"])
def test_rows_equal_the_plain_tower_through_a_gemm_of_pairs(
    family: str, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> None:
    path = tmp_path_factory.mktemp("pairs") / family
    make_checkpoint(path, family, "tiny", 3)
    plain = load_tower(path, device=device, dtype=torch.float32).tower
    gemm = PairGemm()
    fused = FusedTower(plain, SdpaAttention(), gemms=choices_of(gemm))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(fresh_seed())
    num_patches = sum(grid.num_patches for grid in GRIDS)
    pixels = torch.randn(num_patches, plain.patch_dim, generator=generator).to(device)
    with torch.inference_mode():
        found = fused(fused.prepare(GRIDS).to(device).with_pixels(pixels))
        expected = plain(plain.prepare(GRIDS).to(device).with_pixels(pixels))
    figures = errors(found, expected)
    report(f"pairs {family}", figures)
    assert figures.relative < 1e-5
    assert {name: gemm.calls.count(name) for name in ("normed", "rotated", "gelu", "add_to")} == {
        "normed": 2 * plain.config.depth,  # type: ignore[attr-defined]
        "rotated": plain.config.depth,  # type: ignore[attr-defined]
        "gelu": plain.config.depth,  # type: ignore[attr-defined]
        "add_to": 2 * plain.config.depth,  # type: ignore[attr-defined]
    }


def test_one_step_may_fold_its_norm_and_the_next_not(
    tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> None:
    """Every way from one gemm's addition to another's norm."""
    path = tmp_path_factory.mktemp("mixed") / "qwen"
    make_checkpoint(path, "qwen3_vl", "tiny", 3)
    plain: Any = load_tower(path, device=device, dtype=torch.float32).tower
    pixels = torch.randn(GRIDS[0].num_patches, plain.patch_dim).to(device)
    torch_only, pairs = PerRows({64: TORCH_GEMM}), PerRows({64: PairGemm()})
    with torch.inference_mode():
        expected = plain(plain.prepare(GRIDS[:1]).to(device).with_pixels(pixels))
        for choices in (
            GemmChoices(pairs, torch_only, torch_only, torch_only),
            GemmChoices(torch_only, pairs, torch_only, pairs),
        ):
            fused = FusedTower(plain, SdpaAttention(), gemms=choices)
            found = fused(fused.prepare(GRIDS[:1]).to(device).with_pixels(pixels))
            assert errors(found, expected).relative < 1e-5


def test_weights_with_their_norm_are_kept_only_for_a_gemm_that_reads_them(
    tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> None:
    path = tmp_path_factory.mktemp("packed") / "qwen"
    make_checkpoint(path, "qwen3_vl", "tiny", 3)
    plain: Any = load_tower(path, device=device, dtype=torch.bfloat16).tower
    assert FusedTower(plain, SdpaAttention()).packed_bytes == 0
    fused = FusedTower(plain, SdpaAttention(), gemms=choices_of(PairGemm()))
    layers = [layer for block in plain.blocks for layer in (block.qkv, block.fc1)]
    assert fused.packed_bytes == packed_bytes(fused._blocks)
    # The weight in its own type; the column sums and the bias in float32.
    assert fused.packed_bytes == sum(layer.weight.nbytes + 8 * layer.out_features for layer in layers)


def test_an_fc1_whose_gelu_belongs_to_an_fp8_product_folds_nothing(
    tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> None:
    path = tmp_path_factory.mktemp("fp8") / "qwen"
    make_checkpoint(path, "qwen3_vl", "tiny", 3)
    plain: Any = load_tower(path, device=device, dtype=torch.bfloat16).tower
    gemm = PairGemm()
    tower = FusedTower(plain, SdpaAttention(), Precision(frozenset({"fc2"})), choices_of(gemm))
    block = tower._blocks[0]
    assert block.qkv.num_bytes
    assert not block.fc1.num_bytes
    x = torch.randn(5, block.fc1._weights.weight.shape[1]).bfloat16().to(device)  # type: ignore[attr-defined]
    with torch.inference_mode():
        found = block.fc2(block.fc2.input_of_gelu(block.fc1, block.fc1.input_of_norm(x, None, block.norm2)))
        own = plain.blocks[0]
        hidden = torch.nn.functional.gelu(own.fc1(own.norm2(x)), approximate="tanh")
        assert relative_error(found, own.fc2(hidden).float()) < 0.08
    assert not gemm.calls


# Standard deviations: of the rows' means, and of the channels that stand out.
RESIDUALS = [(0.0, 1.0), (2.0, 20.0), (50.0, 1.0), (2.0, 300.0)]


@pytest.mark.parametrize(("mean_size", "channel_size"), RESIDUALS)
@pytest.mark.parametrize("norm_bias_size", [0.0, 0.3])
def test_folding_a_norm_into_bfloat16_weights_loses_no_more_than_rounding_the_normed_rows(
    mean_size: float, channel_size: float, norm_bias_size: float, generator: torch.Generator
) -> None:
    """Both in float32 between the roundings that each of the two has: of the normed rows, or of the weight
    times the norm's. What cancels in the folded form, a row's mean and a channel's size, stays harmless."""
    num_rows, width_in, width_out = 64, 1152, 192
    x = torch.randn(num_rows, width_in, generator=generator)
    x[:, ::300] *= channel_size
    x = (x + mean_size * torch.randn(num_rows, 1, generator=generator)).bfloat16()
    weight, bias = random_layer(width_in, width_out, torch.bfloat16, torch.device("cpu"))
    norm: NormParameters = (
        (1 + 0.2 * torch.randn(width_in, generator=generator)).bfloat16(),
        (norm_bias_size * torch.randn(width_in, generator=generator)).bfloat16(),
        EPS,
    )
    exact = x.double()
    centred = exact - exact.mean(1, keepdim=True)
    rstd = (centred.square().mean(1, keepdim=True) + EPS).rsqrt()
    expected = linear(centred * rstd * norm[0] + norm[1], weight.double(), bias.double())
    rows = UnnormedRows(x, exact.mean(1).float(), rstd[:, 0].float())
    folded = product_of_unnormed(rows, fold_norm(weight, bias, norm))
    unfused = linear(norm_float32(x, *norm).bfloat16().float(), weight.float(), bias.float())
    found = [relative_error(one.double(), expected) for one in (folded, unfused)]
    print(f"mean {mean_size}, channels {channel_size}: folded {found[0]:.2e}, unfused {found[1]:.2e}")
    assert found[0] < 1.5 * found[1]


def test_a_folded_layer_is_the_layer_behind_its_norm(generator: torch.Generator) -> None:
    weight, bias = (torch.randn(*shape, generator=generator) for shape in ((24, 16), (24,)))
    norm: NormParameters = (
        torch.randn(16, generator=generator),
        torch.randn(16, generator=generator),
        0.5,
    )
    folded = fold_norm(weight.bfloat16(), bias.bfloat16(), norm)
    assert folded.weight.dtype == torch.bfloat16
    assert folded.column_sums.dtype == folded.bias.dtype == torch.float32
    # Of what was rounded: a row of equal values is all mean.
    assert torch.allclose(folded.column_sums, folded.weight.float().sum(1), atol=1e-5)
    assert torch.allclose(folded.bias, linear(norm[1], weight.bfloat16().float(), bias.bfloat16().float()))
    x = torch.randn(5, 16, generator=generator)
    mean, variance = x.mean(1), x.var(1, correction=0)
    found = product_of_unnormed(
        UnnormedRows(x, mean, (variance + 0.5).rsqrt()), fold_norm(weight, bias, norm)
    )
    assert torch.allclose(found, linear(norm_float32(x, *norm), weight, bias), atol=1e-4)


def test_pairs_stand_side_by_side_and_v_stays() -> None:
    # 2 heads of 4: elements 0 1 | 2 3 of a head, where 0 turns with 2 and 1 with 3.
    rows = torch.arange(24)
    assert pair_rows(rows, 2).tolist() == [
        0,
        2,
        1,
        3,
        4,
        6,
        5,
        7,
        8,
        10,
        9,
        11,
        12,
        14,
        13,
        15,
        *range(16, 24),
    ]


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
def test_a_right_gemm_passes_the_check_and_a_wrong_one_does_not(step: str, layout: str) -> None:
    shape = BlockShape(32, 48, 2, 100.0, layout)  # type: ignore[arg-type]
    trial = make_trial(step, shape, 24, torch.float32, torch.device("cpu"))
    assert trial.error(TORCH_GEMM) < 1e-6
    assert trial.error(PairGemm()) < 1e-5
    assert trial.error(WrongGemm()) > 1e-2
    if not step.startswith("add"):
        assert trial.error(MeanGemm()) > 1e-2


class WrongGemm(PairGemm):
    """Forgets the bias."""

    name = "wrong"

    def rotated(self, rows: UnnormedRows, layer: Weights, rotary: Rotary) -> torch.Tensor:
        return super().rotated(rows, replace(layer, folded=self.spoil(layer.folded)), rotary)

    def gelu(self, rows: UnnormedRows, layer: Weights) -> torch.Tensor:
        return super().gelu(rows, replace(layer, folded=self.spoil(layer.folded)))

    def spoil(self, folded: FoldedWeights | None) -> FoldedWeights:
        assert folded is not None
        return replace(folded, bias=torch.zeros_like(folded.bias))

    def add_to(self, residual_PN: torch.Tensor, x_PK: torch.Tensor, layer: Weights) -> torch.Tensor | None:
        return super().add_to(residual_PN, x_PK, Weights(layer.weight, torch.zeros_like(layer.bias)))


class MeanGemm(WrongGemm):
    """Forgets the mean."""

    def spoil(self, folded: FoldedWeights | None) -> FoldedWeights:
        assert folded is not None
        return replace(folded, column_sums=torch.zeros_like(folded.column_sums))


class RaisingGemm(PairGemm):
    name = "raises"

    def gelu(self, rows: UnnormedRows, layer: Weights) -> torch.Tensor:
        raise RuntimeError(f"no tile for {list(rows.x_PK.shape)}")


def timed_by(milliseconds: dict[str, float]) -> tuple[Callable[[Callable[[], object]], float], list[Gemm]]:
    """A clock that recognises a gemm by what it calls."""
    gemms: list[Gemm] = [TORCH_GEMM, *(kind() for kind in (PairGemm, WrongGemm, RaisingGemm))]
    pairs = gemms[1]
    assert isinstance(pairs, PairGemm)

    def time_ms(run: Callable[[], object]) -> float:
        before = len(pairs.calls)
        run()
        return milliseconds["pairs" if len(pairs.calls) > before else "torch"]

    return time_ms, gemms


@pytest.mark.parametrize(("pairs_ms", "expected"), [(0.5, "pairs"), (0.995, "torch"), (2.0, "torch")])
def test_the_fastest_right_gemm_is_chosen_and_ties_stay_with_torch(pairs_ms: float, expected: str) -> None:
    time_ms, gemms = timed_by({"pairs": pairs_ms, "torch": 1.0})
    choices = choose_gemms(
        gemms, SHAPE, [4, 8], dtype=torch.float32, device=torch.device("cpu"), time_ms=time_ms
    )
    assert choices.names["rotate"] == {4: expected, 8: expected}
    assert choices.names["add_mlp"] == {4: expected, 8: expected}
    assert "wrong" not in str(choices.names)
    assert choices.rotate.folds_norm == (expected == "pairs")


def test_a_gemm_that_raises_is_left_out_of_that_step_only() -> None:
    raising = RaisingGemm()
    choices = choose_gemms(
        [TORCH_GEMM, raising],
        SHAPE,
        [8],
        dtype=torch.float32,
        device=torch.device("cpu"),
        time_ms=counting_down(),
    )
    assert choices.names == {
        "rotate": {8: "raises"},
        "gelu": {8: "torch"},
        "add_attention": {8: "raises"},
        "add_mlp": {8: "raises"},
    }


def counting_down() -> Callable[[Callable[[], object]], float]:
    """Every later candidate is faster."""
    left = [1024.0]

    def time_ms(run: Callable[[], object]) -> float:
        run()
        left[0] /= 2
        return left[0]

    return time_ms


def test_numbers_of_rows_take_the_nearest_choice_by_ratio() -> None:
    pairs = PairGemm()
    choices = PerRows({1024: TORCH_GEMM, 16384: pairs})
    assert [choices.choose(rows).name for rows in (1, 1024, 4000, 4200, 100_000)] == [
        "torch",
        "torch",
        "torch",
        "pairs",
        "pairs",
    ]


def test_a_cpu_has_torch_only() -> None:
    assert find_gemms(torch.device("cpu")) == [TORCH_GEMM]


def test_rotation_frequencies_are_those_of_the_tower() -> None:
    frequencies = inverse_frequencies(72, 10_000.0)
    turns = turns_of(frequencies, "blocked", 16)
    assert turns.shape == (2, 3 * 16 * 72)
    assert torch.allclose(turns[0, 0] * 2 * torch.pi, torch.tensor(1.0))
