"""The arguments that each wrapper passes to its library, recorded by a stand-in."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from encoder_service.towers.attention import SequenceBounds
from encoder_service.towers.attention.available import BUILDERS, NAMES
from encoder_service.towers.attention.fa3 import OPERATOR_ARGUMENTS, Fa3Attention
from encoder_service.towers.attention.fa4 import Fa4Attention, Fa4Tile, dsl_folder, import_interface
from encoder_service.towers.attention.varlen import TorchVarlenAttention
from tests.unit.towers.attention_cases import bounds_of, exact, packed

SEQLENS = (6, 1, 4)
NUM_PATCHES = 16


class Recorder:
    """A library function: answers the rows of the sequences and leaves padding as uninitialised memory."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def answer(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        self.calls.append(options)
        out = options.get("out")
        if out is None:
            out = torch.full(q.shape, torch.nan)
        out[: sum(SEQLENS)] = exact(q, k, v, SEQLENS)
        return out


def operator(recorder: Recorder, arguments: frozenset[str]) -> Any:
    """A registered operator as torch.ops holds it: callable, with a schema."""

    class Operator:
        default = SimpleNamespace(
            _schema=SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in arguments])
        )

        def __call__(self, *tensors: torch.Tensor, **options: Any) -> Any:
            return recorder.answer(*tensors, **options)

    return Operator()


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = types.ModuleType(name)
    for attribute, value in attributes.items():
        setattr(module, attribute, value)
    monkeypatch.setitem(sys.modules, name, module)


def check(backend: Any, recorder: Recorder, *, planned: bool = False) -> tuple[dict[str, Any], torch.Tensor]:
    """Attends once; the rows are right, padding is zero, the bounds arrive as they are."""
    q, k, v = packed(NUM_PATCHES, 2, 72)
    bounds: SequenceBounds = bounds_of(SEQLENS, empty=3, max_seqlen=32)
    if planned:
        bounds = backend.plan(bounds, q.shape, q.dtype)
    found = backend.attend(q, k, v, bounds)
    torch.testing.assert_close(found[:11], exact(q, k, v, SEQLENS))
    assert torch.equal(found[11:], torch.zeros(5, 2, 72))
    (options,) = recorder.calls
    return options, found


def check_bounds(options: dict[str, Any]) -> None:
    for side in "qk":
        assert options[f"cu_seqlens_{side}"].tolist() == [0, 6, 7, 11, 11, 11, 11]
        assert options[f"cu_seqlens_{side}"].dtype == torch.int32
        assert options[f"max_seqlen_{side}"] == 32
    assert options["softmax_scale"] == pytest.approx(72**-0.5)


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("fa3_fwd_interface", "fa3_fwd_cuda"),
        ("flash_attn_interface", "flash_attn_3_cuda"),
        ("flash_attn_interface", "flash_attn_3_gpu"),
    ],
)
def test_fa3_operator(monkeypatch: pytest.MonkeyPatch, module: str, attribute: str) -> None:
    for name in ("fa3_fwd_interface", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    recorder = Recorder()
    operators = SimpleNamespace(fwd=operator(recorder, OPERATOR_ARGUMENTS | {"seqused_q"}))
    install(monkeypatch, module, **{attribute: operators})
    options, _ = check(Fa3Attention(), recorder)
    check_bounds(options)
    assert options["num_splits"] == 1
    assert options["is_causal"] is False
    assert set(options) | {"q", "k", "v"} == OPERATOR_ARGUMENTS


def test_a_build_that_lacks_an_argument_does_not_count_as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = SimpleNamespace(fwd=operator(Recorder(), OPERATOR_ARGUMENTS - {"num_splits"}))
    install(monkeypatch, "fa3_fwd_interface", fa3_fwd_cuda=lacking)
    with pytest.raises(ImportError, match=r"fa3_fwd_interface has no operator with .*num_splits"):
        Fa3Attention()
    install_fa4(monkeypatch, lambda q, k, v, cu_seqlens_q=None, out=None: None)
    with pytest.raises(ImportError, match=r"flash-attn 4 has no forward with .*tile_mn"):
        Fa4Attention()


def test_a_plan_shares_one_output_among_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    operators = SimpleNamespace(fwd=operator(recorder, OPERATOR_ARGUMENTS))
    install(monkeypatch, "fa3_fwd_interface", fa3_fwd_cuda=operators)
    backend = Fa3Attention()
    q, k, v = packed(NUM_PATCHES, 2, 72)
    plan = backend.plan(bounds_of(SEQLENS), q.shape, q.dtype)
    assert backend.attend(q, k, v, plan) is backend.attend(q, k, v, plan)
    unplanned = bounds_of(SEQLENS)
    assert backend.attend(q, k, v, unplanned) is not backend.attend(q, k, v, unplanned)
    with pytest.raises(ValueError, match=r"\(16, 2, 72\).*\(8, 2, 72\)"):
        backend.attend(q[:8], k[:8], v[:8], plan)


def install_varlen(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=function))


def test_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()

    def varlen_attn(  # type: ignore[no-untyped-def]
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, num_splits=None
    ):
        return recorder.answer(query, key, value, scale=scale, num_splits=num_splits)

    install_varlen(monkeypatch, varlen_attn)
    options, _ = check(TorchVarlenAttention(), recorder)
    assert options == {"scale": pytest.approx(72**-0.5), "num_splits": 1}


def install_fa4(monkeypatch: pytest.MonkeyPatch, forward: Callable[..., Any]) -> None:
    install(monkeypatch, "cutlass")
    install(monkeypatch, "cutlass.cute")
    install(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=forward)
    # The tile follows the device; there is none here.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """An installed flash-attn 4 that records."""
    recorder = Recorder()

    def forward(  # type: ignore[no-untyped-def]
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None,
        num_splits=1, out=None,
    ):  # fmt: skip
        options = {name: value for name, value in locals().items() if name not in ("q", "k", "v", "recorder")}
        return recorder.answer(q, k, v, **options)

    install_fa4(monkeypatch, forward)
    return recorder


@pytest.mark.parametrize(
    ("settings", "name", "tile"),
    [
        ({}, "fa4", ((192, 160), False, True)),
        ({"library_tile": True}, "fa4-library", (None, None, None)),
        ({"tile": Fa4Tile(128, 160, True)}, "fa4-128x160r", ((128, 160), True, True)),
    ],
)
def test_fa4_tile(fa4: Recorder, settings: dict[str, Any], name: str, tile: tuple[Any, ...]) -> None:
    backend = Fa4Attention(**settings)
    assert backend.name == name
    options, found = check(backend, fa4, planned=True)
    check_bounds(options)
    assert options["num_splits"] == 1
    assert options["causal"] is False
    assert options["out"] is found
    assert (options["tile_mn"], options["mma_pv_is_rs"], options["intra_wg_overlap"]) == tile


def test_fa4_other_head_dims_take_the_librarys_tile(fa4: Recorder) -> None:
    backend = Fa4Attention()
    other = Fa4Attention(Fa4Tile(192, 128))
    for head_dim, expected in [(64, None), (80, (192, 160)), (96, None)]:
        backend.attend(*packed(NUM_PATCHES, 2, head_dim), bounds_of(SEQLENS))
        assert fa4.calls[-1]["tile_mn"] == expected
        other.attend(*packed(NUM_PATCHES, 2, head_dim), bounds_of(SEQLENS))
        assert fa4.calls[-1]["tile_mn"] == (expected and (192, 128))


@pytest.mark.usefixtures("fa4")
def test_fa4_offers_every_tuned_tile_under_a_known_name() -> None:
    names = [backend.name for backend in BUILDERS["fa4"](torch.device("cuda"))]
    assert names == list(NAMES[: NAMES.index("fa3")])
    assert set(names) <= set(NAMES)


def test_fa4_finds_the_packages_of_a_dsl_outside_site_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "nvidia_cutlass_dsl" / "dsl_packages" / "cutlass"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cute.py").write_text("")
    for name in ("cutlass", "cutlass.cute", "nvidia_cutlass_dsl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    install(monkeypatch, "flash_attn.cute.interface")
    importlib.invalidate_caches()
    assert dsl_folder() == package.parent
    import_interface()
    assert sys.modules["cutlass.cute"].__file__ == str(package / "cute.py")
    for name in ("cutlass", "cutlass.cute"):
        monkeypatch.delitem(sys.modules, name)
