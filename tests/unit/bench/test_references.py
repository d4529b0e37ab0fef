"""The reference's variants give the tower's rows: packed attention, precomputed tables, operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from checkpoints import random_checkpoint
from references import eager, operator_of, with_tables

from encoder_service.towers import Tower, load_tower
from encoder_service.towers.synthetic import FAMILIES
from encoder_service.types import Grid
from tests.parity.reference import ReferenceTower, register_varlen_attention

CPU = torch.device("cpu")
PACKED, OPERATOR = "flash_test_packed", "flash_test_operator"
BATCHES = {"stills": [Grid(1, 8, 6), Grid(1, 4, 4), Grid(1, 2, 2)], "clips": [Grid(2, 4, 6)] * 2}
calls: list[tuple[int, int]] = []


def packed_attention(
    q_PHd: torch.Tensor,
    k_PHd: torch.Tensor,
    v_PHd: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    """What FlashAttention-3 computes, sequence by sequence."""
    lengths = cu_seqlens.diff().tolist()
    assert max(lengths) == max_seqlen
    assert sum(lengths) == q_PHd.shape[0]
    calls.append((len(lengths), max_seqlen))
    parts = zip(*(states.split(lengths) for states in (q_PHd, k_PHd, v_PHd)), strict=True)
    out = [
        torch.nn.functional.scaled_dot_product_attention(
            *(states.transpose(0, 1)[None] for states in part), scale=scale
        )[0].transpose(0, 1)
        for part in parts
    ]
    return torch.cat(out)


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register_varlen_attention(PACKED, packed_attention)
    register_varlen_attention(OPERATOR, operator_of(packed_attention, "test_attention"))


@pytest.fixture(scope="module", params=FAMILIES)
def towers(request: pytest.FixtureRequest) -> Iterator[tuple[Tower, ReferenceTower]]:
    with random_checkpoint(request.param, "tiny", 3, CPU) as path:
        yield (
            load_tower(path, device=CPU, dtype=torch.float32).tower,
            ReferenceTower(path, device=CPU, dtype=torch.float32),
        )


@torch.inference_mode()
@pytest.mark.parametrize("batch", BATCHES)
def test_every_form_of_the_reference_gives_the_towers_rows(
    towers: tuple[Tower, ReferenceTower], batch: str
) -> None:
    tower, reference = towers
    grids = BATCHES[batch]
    pixels = torch.randn(sum(grid.num_patches for grid in grids), tower.patch_dim)
    expected = tower(tower.prepare(grids).with_pixels(pixels))
    calls.clear()
    runs = {
        "sdpa": eager(reference, pixels, grids, "sdpa"),
        "packed": eager(reference, pixels, grids, PACKED),
        "tables": with_tables(reference, pixels, grids, PACKED),
        "operator": with_tables(reference, pixels, grids, OPERATOR),
    }
    # Each variant selects its own attention, in any order.
    for name in ("packed", "sdpa", "tables", "operator", "sdpa"):
        before = len(calls)
        error = (runs[name]() - expected).norm() / expected.norm()
        assert error < 1e-5, name
        assert (len(calls) > before) == (name != "sdpa")
    sequences = len(grids) if tower.merges_time else sum(grid.t for grid in grids)
    assert {count for count, _ in calls} == {sequences}


@torch.inference_mode()
def test_with_tables_the_forward_reads_no_value_on_the_host(
    towers: tuple[Tower, ReferenceTower], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph cannot hold a forward that reads values of grids or bounds."""
    tower, reference = towers
    grids = BATCHES["stills"]
    pixels = torch.randn(sum(grid.num_patches for grid in grids), tower.patch_dim)
    register_varlen_attention("flash_test_blind", lambda q, k, v, cu_seqlens, longest, scale: v.clone())
    run = with_tables(reference, pixels, grids, "flash_test_blind")
    eager_run = eager(reference, pixels, grids, "flash_test_blind")

    def refused(self: torch.Tensor, *_arguments: object) -> None:
        raise AssertionError("the host reads a value of the device")

    for name in ("tolist", "item", "__bool__", "__int__", "cpu", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    run()
    with pytest.raises(AssertionError, match="the host reads"):
        eager_run()
