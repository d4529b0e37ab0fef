"""Selection of an attention backend per bucket, with fake backends of given times and faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from encoder_service.errors import ConfigurationError
from encoder_service.towers.attention import (
    SdpaAttention,
    SequenceBounds,
    available,
    available_backends,
    parse_attention,
)
from encoder_service.towers.attention.cases import PackedBatch, attention_selection
from encoder_service.towers.layers import BlockShape
from encoder_service.towers.optional import unusable_kernels
from encoder_service.towers.selection import Choices

CPU = torch.device("cpu")
SMALL = PackedBatch((20, 5), 32, 4, 32)
LARGE = PackedBatch((40,), 64, 4, 64)
BLOCK = BlockShape(16, 32, 2, 8, 1e4, "blocked")


class Clock:
    """Milliseconds that the fake backends add up in one run."""

    def __init__(self) -> None:
        self.spent = 0.0

    def time_ms(self, run: Callable[[], object]) -> float:
        self.spent = 0.0
        run()
        return self.spent


class Fake:
    """Correct attention that takes ``price`` milliseconds; ``spoil`` changes its output."""

    static_lengths = False

    def __init__(
        self,
        name: str,
        clock: Clock,
        price: float | dict[int, float] = 1.0,
        *,
        spoil: Callable[[torch.Tensor, SequenceBounds], torch.Tensor] | None = None,
        batch_invariant: bool = True,
    ) -> None:
        self.name = name
        self.clock = clock
        self.price = price
        self.spoil = spoil
        self.batch_invariant = batch_invariant

    def plan(self, bounds: SequenceBounds, shape: Sequence[int], dtype: torch.dtype) -> SequenceBounds:
        return bounds

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: SequenceBounds
    ) -> torch.Tensor:
        self.clock.spent += self.price if isinstance(self.price, float) else self.price.get(q.shape[0], 1.0)
        out = SdpaAttention(one_by_one=True).attend(q, k, v, bounds)
        return out if self.spoil is None else self.spoil(out, bounds)


def select(backends: list[Any], **settings: Any) -> dict[str, str]:
    """The name of the chosen backend by case."""
    selection = attention_selection(backends, [SMALL, LARGE], BLOCK, torch.float32, CPU, **settings)
    return selection.measure(backends[0].clock.time_ms).names


def reasons_in(logs: Sequence[Any]) -> dict[tuple[str, str], str]:
    """Why a backend was excluded, by its name and the cases that it was excluded from."""
    excluded = [entry for entry in logs if entry["event"] == "kernel excluded"]
    return {(entry["kernel"], entry["cases"]): entry["reason"] for entry in excluded}


def times_in(logs: Sequence[Any]) -> dict[str, dict[str, float]]:
    return {entry["case"]: entry["microseconds"] for entry in logs if entry["event"] == "kernel selected"}


def test_the_fastest_of_each_case() -> None:
    clock = Clock()
    with capture_logs() as logs:
        chosen = select([Fake("a", clock, {32: 1.0, 64: 9.0}), Fake("b", clock, {32: 3.0, 64: 2.0})])
    assert chosen == {"32x32": "a", "64x64": "b"}
    assert times_in(logs) == {"32x32": {"a": 1e3, "b": 3e3}, "64x64": {"a": 9e3, "b": 2e3}}


@pytest.mark.parametrize(("second", "expected"), [(0.99, "a"), (0.95, "b")])
def test_a_tie_goes_to_the_preferred(second: float, expected: str) -> None:
    clock = Clock()
    assert select([Fake("a", clock, 1.0), Fake("b", clock, second)])["32x32"] == expected


def shifted(out: torch.Tensor, bounds: SequenceBounds) -> torch.Tensor:
    return out * 1.01


def nan_padding(out: torch.Tensor, bounds: SequenceBounds) -> torch.Tensor:
    out[sum(bounds.seqlens) :] = torch.nan
    return out


def nan_rows(out: torch.Tensor, bounds: SequenceBounds) -> torch.Tensor:
    return out * torch.nan


def leaky(out: torch.Tensor, bounds: SequenceBounds) -> torch.Tensor:
    return out + 1e-6 * len(bounds.seqlens)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (shifted, "relative error 1.0e-02 against float32, at most 1e-04 passes (case 800x773)"),
        (nan_rows, "relative error nan"),
        (nan_padding, "padding is not finite"),
    ],
)
def test_a_wrong_backend_is_excluded_at_any_speed(spoil: Any, reason: str) -> None:
    clock = Clock()
    with capture_logs() as logs:
        chosen = select([Fake("wrong", clock, 0.1, spoil=spoil), Fake("right", clock)])
    assert chosen == {"32x32": "right", "64x64": "right"}
    reasons = reasons_in(logs)
    assert set(reasons) == {("wrong", "all")}
    assert reason in reasons["wrong", "all"]
    assert times_in(logs) == {"32x32": {"right": 1e3}, "64x64": {"right": 1e3}}


def test_a_backend_that_raises_is_excluded_from_that_case() -> None:
    clock = Clock()

    def refuse_large(out: torch.Tensor, bounds: SequenceBounds) -> torch.Tensor:
        if out.shape[0] == 64:
            raise RuntimeError("head_dim 8 needs\npages of generated code")
        return out

    with capture_logs() as logs:
        chosen = select([Fake("picky", clock, 0.1, spoil=refuse_large), Fake("right", clock)])
    assert chosen == {"32x32": "picky", "64x64": "right"}
    assert reasons_in(logs) == {("picky", "64x64"): "RuntimeError: head_dim 8 needs (case 64x64)"}


def test_deterministic_takes_one_backend_for_all_cases() -> None:
    clock = Clock()
    backends = [
        Fake("a", clock, {32: 1.0, 64: 9.0}),
        Fake("b", clock, {32: 4.0, 64: 4.0}),
        Fake("liar", clock, 0.1, spoil=leaky),
    ]
    with capture_logs() as logs:
        assert select(backends, deterministic=True) == {"32x32": "b", "64x64": "b"}
    assert "depend on the batch around it" in reasons_in(logs)["liar", "all"]


def test_no_backend_left_says_why() -> None:
    clock = Clock()
    with pytest.raises(ConfigurationError, match=r"0 of 1 .* case 32x32: wrong: relative error"):
        select([Fake("wrong", clock, spoil=shifted)])
    with pytest.raises(ConfigurationError, match=r"0 of 1 .* all 2 cases: liar: "):
        select([Fake("liar", clock, spoil=leaky)], deterministic=True)


@pytest.mark.parametrize(
    ("bucket", "seqlens"),
    [
        ((1024, 8, 1024), (1024,)),
        ((4096, 9, 512), (512, 512, 384, 384, 384, 128, 128, 128, 128)),
        ((12, 12, 3), (3, 3, 3, 3)),
        ((2048, 8, 784), (784, 784, 480)),
        ((64, 4, 100), (64,)),
    ],
)
def test_a_mixed_case_has_long_middling_and_short_sequences(
    bucket: tuple[int, int, int], seqlens: tuple[int, ...]
) -> None:
    batch = PackedBatch.mixed(*bucket)
    assert batch.seqlens[: len(seqlens)] == seqlens
    assert sum(batch.seqlens) <= bucket[0]
    assert len(batch.seqlens) <= bucket[1]
    cu_seqlens = batch.bounds(CPU).cu_seqlens
    assert cu_seqlens.shape == (bucket[1] + 1,)
    assert int(cu_seqlens[-1]) == sum(batch.seqlens)


def test_a_library_that_breaks_on_import_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> list[Any]:
        raise OSError("undefined symbol")

    monkeypatch.setitem(available.BUILDERS, "fa4", broken)
    monkeypatch.setitem(
        available.BUILDERS, "fa3", lambda device: [Fake("fa3", Clock(), batch_invariant=False)]
    )
    assert [backend.name for backend in available_backends(CPU)] == ["fa3", "sdpa"]
    reasons = unusable_kernels(CPU)
    assert sorted(reasons) == ["fa4", "quack", "varlen"]
    assert reasons["fa4"] == "OSError: undefined symbol"
    assert "needs a CUDA device, this is cpu" in reasons["varlen"]
    assert "needs a CUDA device, this is cpu" in reasons["quack"]
    assert [backend.name for backend in available_backends(CPU, deterministic=True)] == ["sdpa"]


def test_parse_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake("fa3", Clock())
    monkeypatch.setitem(available.BUILDERS, "fa3", lambda device: [fake])
    assert [backend.name for backend in parse_attention("auto", CPU)] == ["fa3", "sdpa"]
    assert parse_attention("fa3", CPU) == [fake]
    with pytest.raises(
        ConfigurationError,
        match=r'attention "fa4" is not installed or does not run on cpu; usable here: auto, fa3, sdpa$',
    ):
        parse_attention("fa4", CPU)
    with pytest.raises(ConfigurationError, match=r'"flash" is unknown; usable here: .*; all names: fa4, '):
        parse_attention("flash", CPU)


def test_a_shape_that_was_not_measured_takes_the_nearest_ones_choice() -> None:
    few, many, long = (Fake(name, Clock()) for name in ("few", "many", "long"))
    attention = Choices({(1024, 256): few, (16_384, 256): many, (16_384, 4096): long})
    for shape, expected in [((1, 1), few), ((3000, 256), few), ((9000, 300), many), ((9000, 2000), long)]:
        assert attention.nearest(*shape) is expected
