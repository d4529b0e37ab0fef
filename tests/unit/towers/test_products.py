"""Precision: the policy, what it asks of device and sizes, its fingerprint; the figures that judge it."""

from __future__ import annotations

import itertools

import pytest
import torch

from encoder_service.config import parse_settings
from encoder_service.engine.fast_path import build_graph_runner
from encoder_service.errors import ConfigurationError
from encoder_service.towers.accuracy import compare_rows
from encoder_service.towers.config import parse_config
from encoder_service.towers.precision import (
    AS_DTYPE,
    FP8,
    FP8_EVERYWHERE,
    PRODUCT_NAMES,
    Precision,
    check_fp8_device,
    check_fp8_sizes,
    parse_precision,
)
from encoder_service.towers.registry import build_tower
from encoder_service.towers.synthetic import config_for
from tests.parity.tower_cases import fresh_seed

ALL = frozenset(PRODUCT_NAMES)
DEPTH = 27


def test_the_setting_names_the_policy() -> None:
    for precision in (AS_DTYPE, FP8):
        assert parse_precision(precision.name) == precision  # type: ignore[arg-type]
    assert not AS_DTYPE.fp8_products
    assert parse_settings(model="/m").precision == AS_DTYPE.name


def test_a_policy_names_products_and_blocks() -> None:
    policy = Precision(frozenset({"fc1"}), wide_share=0.2, wide_blocks=frozenset({7, -1}))
    chosen = {
        (name, index)
        for name, index in itertools.product(PRODUCT_NAMES, range(DEPTH))
        if policy.is_fp8(name, index, DEPTH)
    }
    assert chosen == {("fc1", index) for index in range(5, DEPTH - 1) if index != 7}
    assert sum(FP8.is_fp8(name, index, DEPTH) for name in PRODUCT_NAMES for index in range(DEPTH)) == 34
    assert all(FP8_EVERYWHERE.is_fp8(name, index, 4) for name in PRODUCT_NAMES for index in range(4))


def test_p11_every_policy_has_a_fingerprint_of_its_own() -> None:
    policies = [
        AS_DTYPE,
        Precision(ALL),
        Precision(ALL - {"qkv"}),
        Precision(ALL, wide_blocks=frozenset({0})),
        Precision(ALL, wide_blocks=frozenset({1})),
        Precision(ALL, wide_blocks=frozenset({0, 1})),
        Precision(ALL, wide_share=0.3),
        Precision(ALL, fast_accumulation=False),
    ]
    models = [bytes([number]) * 32 for number in range(2)]
    found = {policy.fingerprint(model) for policy in policies for model in models}
    assert len(found) == len(policies) * len(models)
    assert all(len(one) == 32 for one in found)
    # What has been served without fp8 keeps its keys.
    assert AS_DTYPE.fingerprint(models[0]) == models[0]
    # Equal policies agree, whatever order they were written in.
    swapped = Precision(frozenset(reversed(PRODUCT_NAMES)), wide_blocks=frozenset({1, 0}))
    assert swapped.fingerprint(models[0]) == policies[5].fingerprint(models[0])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"device": "cpu"}, "precision fp8 needs device cuda, found device cpu"),
        ({"device": "cuda:0", "tower": "plain"}, "precision fp8 needs tower auto, found tower plain"),
        ({"device": "cuda", "dtype": "float32"}, "precision fp8 needs dtype bfloat16, found dtype float32"),
    ],
)
def test_settings_without_a_path_for_fp8_are_refused(given: dict[str, str], text: str) -> None:
    assert parse_settings(model="/m", **given).precision == "dtype"
    with pytest.raises(ConfigurationError, match=text):
        parse_settings(model="/m", precision="fp8", **given)


def test_fp8_is_possible_on_a_gpu() -> None:
    assert parse_settings(model="/m", precision="fp8", device="cuda:1").precision == "fp8"
    with pytest.raises(ConfigurationError, match="precision"):
        parse_settings(model="/m", precision="fp4")


def test_devices_without_fp8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"needs a CUDA device of compute capability 8.9 .* not cpu"):
        check_fp8_device(torch.device("cpu"))
    device = torch.device("cuda:0")
    capabilities = iter([(8, 6), (8, 9), (9, 0), (12, 0)])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: next(capabilities))
    with pytest.raises(ConfigurationError, match=r"needs compute capability 8.9 or above, cuda:0 has 8.6"):
        check_fp8_device(device)
    for _ in range(3):
        check_fp8_device(device)


def test_sizes_that_fp8_products_do_not_take_are_refused() -> None:
    check_fp8_sizes(FP8_EVERYWHERE, 1152, 4304, DEPTH)
    check_fp8_sizes(AS_DTYPE, 1150, 4300, DEPTH)
    check_fp8_sizes(Precision(frozenset({"qkv"})), 1152, 4300, DEPTH)
    with pytest.raises(ConfigurationError, match=r"multiples of 16, fc1 is 1152 x 4300"):
        check_fp8_sizes(Precision(ALL), 1152, 4300, DEPTH)
    with pytest.raises(ConfigurationError, match=r"multiples of 16, qkv is 1144 x 3432"):
        check_fp8_sizes(Precision(ALL), 1144, 4304, DEPTH)
    with pytest.raises(ConfigurationError, match="block 27 is to stay wide, the tower has 27 blocks"):
        check_fp8_sizes(Precision(ALL, wide_blocks=frozenset({0, 27})), 1152, 4304, DEPTH)


def test_fp8_never_falls_back_to_the_plain_tower() -> None:
    family, config = parse_config(config_for("qwen3_vl", "tiny"))
    tower = build_tower(family, config).to(torch.bfloat16)
    arguments = {"attention": "auto", "deterministic": False, "max_patches": 64}
    assert build_graph_runner(tower, **arguments) is None  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"precision fp8 needs the fast path, .* a CUDA device"):
        build_graph_runner(tower, precision=FP8, **arguments)  # type: ignore[arg-type]


def test_accuracy_of_known_rows() -> None:
    # A right angle in the second row's second level, a scale that no cosine sees in the first row.
    expected = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 3.0, 0.0, 4.0]])
    found = torch.tensor([[2.0, 0.0, 2.0, 0.0], [0.0, 3.0, 4.0, 0.0]])
    levels = compare_rows(found, expected, num_deepstack_levels=1)
    assert levels.cosine_min == 0.0
    assert levels.cosine_mean == pytest.approx(3 / 4)
    assert levels.relative_error == pytest.approx((33 / 30) ** 0.5)
    whole = compare_rows(found, expected)
    assert whole.cosine_min == pytest.approx(9 / 25)
    assert compare_rows(expected, expected).cosine_min == pytest.approx(1.0)


def test_accuracy_tells_small_differences_and_hides_no_nan() -> None:
    expected = torch.randn(8, 64, generator=torch.Generator().manual_seed(fresh_seed()))
    # A row of tiny values counts as any other.
    expected[3] *= 1e-20
    found = expected * (1 + 1e-3 * torch.sign(torch.randn(8, 64)))
    figures = compare_rows(found, expected)
    assert figures.relative_error == pytest.approx(1e-3, rel=1e-3)
    assert 1 - figures.cosine_min == pytest.approx(0.5e-6, rel=0.5)
    found[5, 7] = torch.nan
    assert all(figure != figure for figure in vars(compare_rows(found, expected)).values())
