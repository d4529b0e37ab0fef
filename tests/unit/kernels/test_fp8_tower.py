"""fp8 products and the tower in fp8: the arithmetic against float64, the policy block by block, rows."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from encoder_service.errors import ConfigurationError
from encoder_service.towers import load_tower
from encoder_service.towers.accuracy import compare_towers
from encoder_service.towers.attention import SdpaAttention
from encoder_service.towers.fused import FusedTower
from encoder_service.towers.precision import AS_DTYPE, FP8, PRODUCT_NAMES, Precision, ProductName
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.types import Grid
from tests.parity.tower_cases import config_with, fresh_seed, vision_weights, write_published
from tests.unit.kernels.references import EPS, norm_float32, randn

pytest.importorskip("triton")

from encoder_service.towers import kernels
from encoder_service.towers.products import Fp8Product

ALL = frozenset(PRODUCT_NAMES)
GRIDS = [Grid(1, 4, 4), Grid(2, 2, 2)]
# 8 bits of a product's result in bfloat16.
BFLOAT16_STEP = 2.0**-8


def linear_layer(generator: torch.Generator, num_in: int, num_out: int, device: torch.device) -> Any:
    """Outputs of very different magnitude, so that a scale in the wrong place shows."""
    layer = torch.nn.Linear(num_in, num_out, device=device, dtype=torch.bfloat16).requires_grad_(False)
    magnitude = torch.logspace(-2, 2, num_out)[:, None] / num_in**0.5
    layer.weight.copy_(randn(generator, num_out, num_in) * magnitude)
    layer.bias.copy_(randn(generator, num_out))
    return layer


def dequantised(rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    values, scale = rows
    return values.double() * scale.double()


def exact_product(product: Fp8Product, rows: torch.Tensor) -> torch.Tensor:
    """The product in float64, of the rows given and the weight as packed."""
    weight_KN = product._weight_KN.double() * product._scale_1N.double()
    return rows @ weight_KN + product._bias_N.double()


def assert_columns_near(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Every column by itself: their magnitudes differ by four orders."""
    error = (found.double() - expected).norm(dim=0) / expected.norm(dim=0)
    assert float(error.max()) < bound, f"column {int(error.argmax())}: {float(error.max()):.2e}"


@pytest.fixture
def layer(generator: torch.Generator, device: torch.device) -> Any:
    return linear_layer(generator, 144, 304, device)


@pytest.mark.parametrize("fast_accumulation", [False, True])
def test_an_fp8_product_is_the_product_of_what_was_packed(
    layer: Any, fast_accumulation: bool, generator: torch.Generator, device: torch.device
) -> None:
    product = Fp8Product(layer, fast_accumulation=fast_accumulation)
    x = (randn(generator, 21, 144) * torch.logspace(-3, 3, 21)[:, None]).bfloat16().to(device)
    rows = product.input_of_rows(x)
    found = product(rows)
    assert found.dtype == torch.bfloat16
    assert found.shape == (21, 304)
    assert_columns_near(found, exact_product(product, dequantised(rows)), BFLOAT16_STEP)


def test_packed_weights_are_column_major_e4m3_and_near(layer: Any) -> None:
    product = Fp8Product(layer, fast_accumulation=True)
    packed = product._weight_KN
    assert packed.dtype == torch.float8_e4m3fn
    assert packed.shape == (144, 304)
    assert packed.stride() == (1, 144)
    assert product._scale_1N.shape == (1, 304)
    assert product._scale_1N.dtype == torch.float32
    assert product._scale_1N.is_contiguous()
    weight = (packed.double() * product._scale_1N.double()).t()
    error = (weight - layer.weight.double()).norm(dim=1) / layer.weight.double().norm(dim=1)
    assert float(error.max()) < 0.04
    assert product.num_bytes == 144 * 304 + 4 * 304


def test_every_input_form_of_an_fp8_product(
    layer: Any, generator: torch.Generator, device: torch.device
) -> None:
    """Rows and norms reach the product within the rounding of e4m3, 2^-4 of a value."""
    product = Fp8Product(layer, fast_accumulation=True)
    x, delta = (randn(generator, 9, 144).bfloat16().to(device) for _ in range(2))
    weight, bias = (randn(generator, 144).bfloat16() for _ in range(2))
    norm = weight.to(device), bias.to(device), EPS
    held = x.clone()
    normed = product.input_of_norm(held, delta, norm)
    assert torch.equal(held, x + delta)
    for rows, expected in (
        (product.input_of_rows(x), x.double().cpu()),
        (normed, norm_float32((x + delta).cpu(), weight, bias, EPS).double()),
        (product.input_of_norm(x, None, norm), norm_float32(x.cpu(), weight, bias, EPS).double()),
    ):
        found = dequantised(rows).cpu()
        assert float((found - expected).norm() / expected.norm()) < 0.04


def quantize_in_torch(x_PE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``kernels.quantize_rows`` without the interpreter, which takes seconds over a tower's weights."""
    scale_P1 = (x_PE.float().abs().amax(1, keepdim=True) / 448).clamp_min(1e-12)
    return (x_PE.float() / scale_P1).to(torch.float8_e4m3fn), scale_P1


@pytest.fixture
def quick_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        monkeypatch.setattr(kernels, "quantize_rows", quantize_in_torch)


@pytest.mark.usefixtures("quick_packing")
def test_the_stand_in_packs_as_the_kernel_does(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Fp8Product(layer, fast_accumulation=True)
    monkeypatch.undo()
    packed = Fp8Product(layer, fast_accumulation=True)
    assert torch.equal(quick._scale_1N, packed._scale_1N)
    # Every weight at a nearest e4m3 number, as the kernel has it: only ties may fall otherwise.
    scaled_KN = layer.weight.float().t() / packed._scale_1N
    quick_error, packed_error = (
        (product._weight_KN.float() - scaled_KN).abs() for product in (quick, packed)
    )
    assert ((quick_error - packed_error).abs() <= 2 * 448e-6).all()


@pytest.fixture(scope="module", params=["qwen3_vl", "kimi_k25"])
def plain_towers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> tuple[Any, Any]:
    """The same tower in bfloat16 and in float32."""
    path = tmp_path_factory.mktemp("fp8") / request.param
    make_checkpoint(path, request.param, "tiny", 5)
    narrow, exact = (
        load_tower(path, device=device, dtype=dtype).tower for dtype in (torch.bfloat16, torch.float32)
    )
    return narrow, exact


@pytest.mark.usefixtures("quick_packing")
@pytest.mark.parametrize("names", [(), ("fc1",), ("fc2",), ("fc1", "fc2")])
def test_an_mlp_of_products_of_either_kind_says_the_same(
    plain_towers: tuple[Any, Any], names: tuple[ProductName, ...], device: torch.device
) -> None:
    plain, _ = plain_towers
    generator = torch.Generator().manual_seed(fresh_seed())
    block = plain.blocks[0]
    x = torch.randn(9, block.fc1.in_features, generator=generator).bfloat16().to(device)
    hidden = torch.nn.functional.gelu(block.fc1(x).double(), approximate="tanh")
    expected = torch.nn.functional.linear(hidden, block.fc2.weight.double(), block.fc2.bias.double())
    packed = FusedTower(plain, SdpaAttention(), Precision(frozenset(names)))._blocks[0]
    assert [isinstance(product, Fp8Product) for product in (packed.fc1, packed.fc2)] == [
        name in names for name in ("fc1", "fc2")
    ]
    found = packed.fc2(packed.fc2.input_of_gelu(packed.fc1, packed.fc1.input_of_rows(x)))
    error = float((found.double() - expected).norm() / expected.norm())
    # One e4m3 rounding of each factor is 2.6 % in the mean, so 4 % of a product.
    assert error < (0.08 if names else 0.01)
    assert error > (0.01 if names else 0.0)


@pytest.mark.usefixtures("quick_packing")
def test_rows_of_an_fp8_tower_stay_near(plain_towers: tuple[Any, Any], device: torch.device) -> None:
    plain, exact = plain_towers
    tower = FusedTower(plain, SdpaAttention(), Precision(ALL))
    generator = torch.Generator().manual_seed(fresh_seed())
    pixels = torch.randn(sum(grid.num_patches for grid in GRIDS), tower.patch_dim, generator=generator)
    figures = compare_towers(tower, {"bfloat16": plain, "float32": exact}, GRIDS, pixels.to(device))
    print(f"fp8 {tower.family}: {figures}")
    for name in ("bfloat16", "float32"):
        # e4m3 rounds by up to 2^-4, in both factors of four products in each of a few blocks.
        assert 1e-3 < figures[name].relative_error < 0.15
        assert figures[name].cosine_min > 0.98


@pytest.mark.usefixtures("quick_packing")
def test_the_policy_decides_every_product(plain_towers: tuple[Any, Any]) -> None:
    plain, _ = plain_towers
    depth = len(plain.blocks)
    policies: list[Precision] = [
        AS_DTYPE,
        Precision(ALL),
        Precision(ALL, wide_blocks=frozenset({0, -1})),
        FP8,
    ]
    names: tuple[ProductName, ...] = PRODUCT_NAMES
    policies += [Precision(frozenset({name})) for name in names]
    for policy in policies:
        tower = FusedTower(plain, SdpaAttention(), policy)
        for index, block in enumerate(tower._blocks):
            for name, product in zip(names, block.products(), strict=True):
                assert isinstance(product, Fp8Product) == policy.is_fp8(name, index, depth)
        assert (tower.packed_bytes > 0) == bool(policy.fp8_products)


@pytest.mark.usefixtures("quick_packing")
def test_a_width_that_fp8_does_not_take_is_refused_with_both_numbers(
    tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> None:
    config = config_with("qwen3_vl", "tiny", {"intermediate_size": 100})
    path = write_published(tmp_path_factory.mktemp("odd"), config, vision_weights(config, 1))
    plain: Any = load_tower(path, device=device, dtype=torch.bfloat16).tower
    width = plain.config.hidden_size
    with pytest.raises(ConfigurationError, match=f"multiples of 16, fc1 is {width} x 100"):
        FusedTower(plain, SdpaAttention(), Precision(ALL))
    FusedTower(plain, SdpaAttention(), Precision(frozenset({"qkv", "proj"})))
