"""The fused tower computes the plain tower's rows: stills, clips, mixed, padded to a bucket, alone."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_service.checkpoints.synthetic import FAMILIES, make_checkpoint
from encoder_service.errors import GridMismatch
from encoder_service.scheduler.buckets import Bucket
from encoder_service.towers import load_tower
from encoder_service.towers.attention import SdpaAttention
from encoder_service.towers.fused import FusedTower
from encoder_service.towers.gemm import STEPS, TorchGemm, Weights
from encoder_service.towers.selection import Choices
from encoder_service.types import Grid
from tests.parity.tower_cases import (
    config_with,
    errors,
    fresh_seed,
    report,
    vision_weights,
    write_published,
)
from tests.unit.kernels.pair_gemm import PairGemm

pytest.importorskip("triton")

# Interpreted kernels take seconds for a few dozen patches.
BATCHES = [
    pytest.param([Grid(1, 2, 2), Grid(2, 2, 2)], id="small"),
    pytest.param([Grid(1, 2, 8), Grid(1, 6, 4), Grid(1, 2, 2)], id="stills", marks=pytest.mark.extended),
    pytest.param([Grid(3, 2, 4), Grid(1, 4, 4), Grid(2, 2, 2)], id="clips", marks=pytest.mark.extended),
]
NUM_PADDING = 4


# Qwen3-VL's tower is Qwen3.5's with deepstack levels, and so are those of further families; Kimi-VL's is
# Kimi-K2.5's without time. GLM-5.3-Flash's is GLM-OCR's with a limit in its MLPs.
QUICK = ("qwen3_vl", "kimi_k25", "kimi_k3", "glm4v", "glm5_next", "qwen2_5_vl")


@pytest.fixture(
    scope="module",
    params=[
        *QUICK,
        *(pytest.param(family, marks=pytest.mark.extended) for family in FAMILIES if family not in QUICK),
    ],
)
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> Any:
    path = tmp_path_factory.mktemp("fused") / request.param
    make_checkpoint(path, request.param, "tiny", 3)
    return load_tower(path, device=device, dtype=torch.float32).tower


@torch.inference_mode()
def rows_of(tower: Any, grids: list[Grid], pixels: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = tower(tower.prepare(grids).to(pixels.device).with_pixels(pixels))
    return rows


def pixels_for(tower: Any, grids: list[Grid]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(fresh_seed())
    num_patches = sum(grid.num_patches for grid in grids)
    return torch.randn(num_patches, tower.patch_dim, generator=generator).to(tower.device)


@pytest.mark.parametrize("grids", BATCHES)
def test_p29_p31_rows_equal_the_plain_towers_alone_and_in_a_padded_bucket(
    plain: Any, grids: list[Grid]
) -> None:
    check_rows(plain, grids)


def check_rows(plain: Any, grids: list[Grid]) -> None:
    if plain.merges_time:  # Kimi-VL's tower takes one frame
        grids = [grid._replace(t=min(grid.t, plain.max_frames)) for grid in grids]
    fused = FusedTower(plain, Choices({(64, 64): SdpaAttention()}))
    pixels = pixels_for(plain, grids)
    expected = rows_of(plain, grids, pixels)
    first, size = grids[0], grids[0].num_patches
    alone = rows_of(fused, [first], pixels[:size])
    bucket = Bucket(len(pixels) + NUM_PADDING, len(grids) + 6, 64, plain.max_frames)
    padded = fused.pad(fused.prepare(grids), bucket).to(plain.device)
    # NaN in the padding would spread to any row that read it.
    filler = torch.full((NUM_PADDING, pixels.shape[1]), float("nan"), device=plain.device)
    with torch.inference_mode():
        rows = fused(padded.with_pixels(torch.cat([pixels, filler])))[: len(expected)]
    figures = errors(rows, expected)
    report(f"padded {fused.family}", figures)
    assert figures.relative < 1e-5
    assert errors(alone, rows[: fused.num_rows(first)]).relative < 2e-6


def test_rows_of_frames_of_several_windows_equal_the_plain_towers(
    tmp_path: Path, device: torch.device
) -> None:
    """Whole windows, cut ones, one merge wide and high, in images and clips."""
    make_checkpoint(tmp_path / "windows", "qwen2_5_vl", "tiny", 3)
    plain = load_tower(tmp_path / "windows", device=device, dtype=torch.float32).tower
    check_rows(plain, [Grid(1, 10, 4), Grid(2, 2, 12), Grid(1, 2, 2)])


def test_gated_mlp_of_an_odd_width_is_widened_and_computes_the_same_rows(
    tmp_path: Path, device: torch.device
) -> None:
    """Products of rows that are no whole 16 bytes take a GPU's slow kernels; a second copy of the weights
    would take its memory."""
    config = config_with("qwen2_5_vl", "tiny", {"intermediate_size": 3420 // 45})
    path = write_published(tmp_path / "odd", config, vision_weights(config, fresh_seed()))
    plain: Any = load_tower(path, device=device, dtype=torch.float32).tower
    grids = [Grid(1, 2, 4), Grid(1, 2, 2)]
    pixels = pixels_for(plain, grids)
    before = rows_of(plain, grids, pixels)
    fused = FusedTower(plain, SdpaAttention())
    assert {(block.fc1.weight.shape[0], block.fc2.weight.shape[1]) for block in plain.blocks} == {(160, 80)}
    assert errors(rows_of(fused, grids, pixels), before).relative < 1e-5
    assert errors(rows_of(plain, grids, pixels), before).relative < 1e-6


@pytest.mark.extended
def test_rows_equal_the_plain_towers_through_a_gemm_of_pairs(plain: Any) -> None:
    gemm = PairGemm()
    fused = FusedTower(plain, SdpaAttention(), {step: Choices({(64,): gemm}) for step in STEPS})
    grids = [Grid(1, 2, 4), Grid(1, 2, 2)]
    pixels = pixels_for(plain, grids)
    figures = errors(rows_of(fused, grids, pixels), rows_of(plain, grids, pixels))
    report(f"pairs {plain.family}", figures)
    assert figures.relative < 1e-5
    depth = plain.config.depth
    rotates, activates = not plain.norms_qk, plain.gated is None
    calls = [gemm.calls.count(name) for name in ("rotated", "gelu", "add_to")]
    assert calls == [depth * rotates, depth * activates, 2 * depth]
    if not rotates:
        assert not fused.paired_bytes
        return
    qkv = [block.qkv for block in plain.blocks]
    # A layer without a bias has one of zeros here.
    num_paired = sum(layer.weight.numel() + layer.out_features for layer in qkv)
    assert fused.paired_bytes == num_paired * qkv[0].weight.element_size()
    assert FusedTower(plain, SdpaAttention()).paired_bytes == 0


def test_attention_is_free_before_the_mlp(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph keeps the memory of all tensors that are alive at one time."""
    from encoder_service.towers import kernels
    from encoder_service.towers.kernels import activation

    alive: list[weakref.ref[torch.Tensor]] = []
    checked: list[bool] = []

    class Watched(SdpaAttention):
        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Any) -> torch.Tensor:
            out = super().attend(q, k, v, bounds)
            alive.extend(map(weakref.ref, (q, k, v)))
            return out

    def check() -> None:
        assert alive
        assert all(tensor() is None for tensor in alive)
        checked.append(True)

    class Mlp(TorchGemm):
        def gelu(self, rows: torch.Tensor, weights: Weights) -> torch.Tensor:
            check()
            return super().gelu(rows, weights)

    def swiglu(packed: torch.Tensor, limit: float | None) -> torch.Tensor:
        check()
        return activation.swiglu(packed, limit)

    monkeypatch.setattr(kernels, "swiglu", swiglu)

    fused = FusedTower(plain, Watched(), {step: Choices({(64,): Mlp()}) for step in STEPS})
    grids = [Grid(1, 2, 2)]
    rows_of(fused, grids, pixels_for(plain, grids))
    assert len(checked) >= plain.config.depth


def test_grids_that_the_plain_tower_refuses_are_refused(plain: Any) -> None:
    with pytest.raises(GridMismatch):
        FusedTower(plain, SdpaAttention()).prepare([Grid(1, 3, 4)])
