"""Layouts and tables of M-RoPE, and what is refused; the rotation itself is in tests/unit/kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lm_adapter.errors import InvalidRequest, MissingDependency
from lm_adapter.prefill import rotary
from lm_adapter.prefill.rotary import MRopeLayout, RotaryTable, apply_mrope, choose_backend

LAYOUT = MRopeLayout((4, 2, 2), interleaved=True)
TABLE = RotaryTable.build(LAYOUT, torch.ones(8), max_positions=10)


def config(**rope: Any) -> dict[str, Any]:
    parameters = {"mrope_section": [4, 2, 2], "rope_theta": 100.0, **rope}
    return {"hidden_size": 64, "num_attention_heads": 4, "rope_parameters": parameters}


def test_a_table_from_a_config() -> None:
    table = RotaryTable.from_config(config(mrope_interleaved=True), max_positions=5)
    assert table.layout == LAYOUT
    angles = torch.arange(5.0)[:, None] / 100.0 ** (torch.arange(8) / 8)
    torch.testing.assert_close(table.cos_sin, torch.cat([angles.cos(), angles.sin()], dim=1))
    assert table.axes.tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    # Files of earlier releases: rope_scaling beside rope_theta, chunked by default.
    older = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "rope_theta": 100.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
    }
    chunked = RotaryTable.from_config(older, max_positions=5)
    assert not chunked.layout.interleaved
    assert torch.equal(chunked.cos_sin, table.cos_sin)
    partial = RotaryTable.from_config({**config(partial_rotary_factor=0.25), "head_dim": 64}, max_positions=5)
    assert partial.layout.rotary_dim == 16


def test_scaling_reaches_both_halves() -> None:
    table = RotaryTable.build(LAYOUT, torch.ones(8), max_positions=10, scaling=2.0)
    torch.testing.assert_close(table.cos_sin, 2 * TABLE.cos_sin)


@pytest.mark.parametrize(
    ("make", "figures"),
    [
        (lambda: MRopeLayout((4, 2), True), r"\[4, 2\]"),  # type: ignore[arg-type]
        (lambda: MRopeLayout((4, -1, 2), True), r"-1"),
        (lambda: MRopeLayout((0, 0, 0), True), r"not all 0"),
        (lambda: RotaryTable.build(LAYOUT, torch.ones(7), max_positions=3), r"\[7\].*\[8\]"),
        (lambda: RotaryTable.build(LAYOUT, torch.ones(8), max_positions=0), r"got 0"),
        (lambda: RotaryTable.from_config(config(rope_type="yarn"), max_positions=3), r"'yarn'"),
        (lambda: RotaryTable.from_config({"rope_parameters": {}}, max_positions=3), r"no mrope_section"),
        (lambda: RotaryTable.from_config(config(mrope_section=[8, 8, 8]), max_positions=3), r"\[8\].*\[24\]"),
        (lambda: TABLE.require(10), r"position 10 .* 10 positions"),
        (lambda: TABLE.require(-1), r"position -1 .* 10 positions"),
    ],
)
def test_tables_that_cannot_be(make: Any, figures: str) -> None:
    with pytest.raises(InvalidRequest, match=figures):
        make()


def test_the_last_position_of_the_table_is_inside() -> None:
    TABLE.require(9)


@pytest.mark.parametrize(
    ("q", "k", "positions", "figures"),
    [
        ((3, 2, 16), (4, 1, 16), (3, 3), r"\[3, 2, 16\].*\[4, 1, 16\]"),
        ((3, 2, 16), (3, 1, 18), (3, 3), r"\[3, 1, 18\]"),
        ((3, 32), (3, 16), (3, 3), r"\[3, 32\]"),
        ((3, 2, 16), (3, 1, 16), (3, 4), r"\[3, 4\], need \[3, 3\]"),
        ((3, 2, 16), (3, 1, 16), (3,), r"\[3\], need \[3, 3\]"),
        ((3, 2, 8), (3, 1, 8), (3, 3), r"8 elements, the table rotates 16"),
    ],
)
def test_shapes_are_checked_before_anything_turns(q: Any, k: Any, positions: Any, figures: str) -> None:
    held = torch.ones(q)
    with pytest.raises(InvalidRequest, match=figures):
        apply_mrope(held, torch.ones(k), torch.ones(positions, dtype=torch.int64), TABLE)
    assert (held == 1).all()


def test_heads_whose_elements_lie_apart_are_refused() -> None:
    """By both backends alike: the kernel takes neighbours."""
    apart, k = torch.ones(3, 16, 2).transpose(1, 2), torch.ones(3, 1, 16)
    for backend in ("torch", "triton"):
        with pytest.raises(InvalidRequest, match="are 2 apart in q and 1 in k"):
            apply_mrope(apart, k, torch.ones(3, 3, dtype=torch.int64), TABLE, backend=backend)
    assert (apart == 1).all()


def test_p08_positions_are_integers_and_never_bfloat16() -> None:
    """Above 256 bfloat16 skips integers: positions in a floating dtype are refused, not rounded."""
    q, k = torch.ones(3, 2, 16), torch.ones(3, 1, 16)
    for dtype in (torch.bfloat16, torch.float32, torch.int16):
        with pytest.raises(InvalidRequest, match=f"positions are {dtype}"):
            apply_mrope(q, k, torch.ones(3, 3, dtype=dtype), TABLE)
    with pytest.raises(InvalidRequest, match=r"q is torch.float32 and k torch.bfloat16"):
        apply_mrope(q, k.bfloat16(), torch.ones(3, 3, dtype=torch.int64), TABLE)
    with pytest.raises(InvalidRequest, match=r"float64"):
        apply_mrope(q.double(), k.double(), torch.ones(3, 3, dtype=torch.int64), TABLE)
    assert TABLE.cos_sin.dtype == torch.float32


def test_backends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = torch.zeros(1)
    assert choose_backend("auto", on_cpu) == "torch"
    with pytest.raises(InvalidRequest, match="'cuda'"):
        choose_backend("cuda", on_cpu)  # type: ignore[arg-type]
    monkeypatch.setattr(rotary, "_has_triton", lambda: False)
    with pytest.raises(MissingDependency, match="triton"):
        choose_backend("triton", on_cpu)
