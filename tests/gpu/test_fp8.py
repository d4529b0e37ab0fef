"""fp8 on a GPU: products against float64, full-size rows against bfloat16 and float32, and in graphs."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_service.engine.fast_path import build_graph_runner
from encoder_service.engine.graphs import GraphRunner
from encoder_service.scheduler.buckets import default_ladder
from encoder_service.towers import Tower, load_tower
from encoder_service.towers.accuracy import compare_rows, compare_towers, rows_of
from encoder_service.towers.attention import available_backends
from encoder_service.towers.fused import FusedTower
from encoder_service.towers.precision import FP8, FP8_EVERYWHERE, Precision, check_fp8_device
from encoder_service.towers.products import Fp8Product
from encoder_service.towers.synthetic import make_checkpoint
from encoder_service.types import Grid
from lm_adapter import EncodedRows, ImageItem, VisionEncoderClient
from tests.integration.conftest import FAMILIES, running
from tests.parity.tower_cases import fresh_seed

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
PHOTOS = Path(__file__).resolve().parents[1] / "data" / "photos"
BATCHES = {
    "stills": [Grid(1, 28, 28), Grid(1, 8, 10), Grid(1, 64, 64), Grid(1, 2, 2)],
    "clips": [Grid(4, 16, 16), Grid(1, 28, 28), Grid(2, 4, 4)],
}
# A row's direction against bfloat16's: what the default policy has to keep.
MIN_COSINE = 0.999
# Rounding of 27 blocks in bfloat16 by itself stands at up to 2 % of float32.
MAX_RELATIVE = {"bfloat16": 0.045, "float32": 0.05}
# The largest of thousands of columns, each rounded to bfloat16; sums in the tensor cores' own
# register keep 14 bits or so. A scale in the wrong place is off by a factor.
PRODUCT_RELATIVE = 2e-2


@pytest.fixture(scope="module", autouse=True)
def needs_fp8() -> None:
    if torch.cuda.get_device_capability(CUDA) < (8, 9):
        pytest.skip("this device has no fp8 products")
    check_fp8_device(CUDA)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("fp8") / request.param
    make_checkpoint(path, request.param, "full", 11)
    yield path
    for file in path.iterdir():  # a gigabyte each
        file.unlink()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def towers(checkpoint: Path) -> tuple[Tower, Tower]:
    """The plain tower in bfloat16 and in float32."""
    narrow, exact = (
        load_tower(checkpoint, device=CUDA, dtype=dtype).tower for dtype in (torch.bfloat16, torch.float32)
    )
    return narrow, exact


def fused(plain: Any, precision: Precision) -> FusedTower:
    backend = next(backend for backend in available_backends(CUDA) if not backend.static_lengths)
    return FusedTower(plain, backend, precision)


def pixels_for(tower: Tower, grids: list[Grid]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(fresh_seed())
    return torch.randn(sum(grid.num_patches for grid in grids), tower.patch_dim, generator=generator) * 0.5


@pytest.mark.parametrize("fast_accumulation", [False, True])
@pytest.mark.parametrize("num_rows", [4, 784, 4100])
@pytest.mark.parametrize(("num_in", "num_out"), [(1152, 3456), (1152, 1152), (1152, 4304), (4304, 1152)])
def test_a_product_is_that_of_what_was_packed(
    num_in: int, num_out: int, num_rows: int, fast_accumulation: bool
) -> None:
    torch.manual_seed(fresh_seed())
    layer = torch.nn.Linear(num_in, num_out, device=CUDA, dtype=torch.bfloat16).requires_grad_(False)
    # Magnitudes apart by rows and by outputs: a scale in the wrong place shows.
    layer.weight.mul_(torch.logspace(-2, 2, num_out, device=CUDA)[:, None])
    layer.bias.normal_()
    x = torch.randn(num_rows, num_in, device=CUDA) * torch.logspace(-2, 2, num_rows, device=CUDA)[:, None]
    product = Fp8Product(layer, fast_accumulation=fast_accumulation)
    values, scale = product.input_of_rows(x.bfloat16())
    found = product((values, scale))
    assert found.dtype == torch.bfloat16
    rows = values.double() * scale.double()
    # Against the size that a column has when its terms do not cancel: few rows cancel by chance.
    weight = product._weight_KN.double() * product._scale_1N.double()
    size = rows.norm() * weight.norm(dim=0) / num_in**0.5 + layer.bias.double().abs() * num_rows**0.5
    expected = rows @ weight + layer.bias.double()
    error = (found.double() - expected).norm(dim=0) / size
    print(f"{num_rows} x {num_in} x {num_out}, fast {fast_accumulation}: {float(error.max()):.2e}")
    assert float(error.max()) < PRODUCT_RELATIVE


@pytest.mark.parametrize("batch", BATCHES)
def test_rows_in_fp8_keep_their_direction(towers: tuple[Tower, Tower], batch: str) -> None:
    plain, exact = towers
    grids = BATCHES[batch]
    pixels = pixels_for(plain, grids)
    figures = compare_towers(fused(plain, FP8), {"bfloat16": plain, "float32": exact}, grids, pixels)
    everywhere = compare_towers(
        fused(plain, FP8_EVERYWHERE), {"bfloat16": plain, "float32": exact}, grids, pixels
    )
    for name, limit in MAX_RELATIVE.items():
        print(f"{plain.family} {batch} against {name}: {figures[name]}, everywhere: {everywhere[name]}")
        assert figures[name].cosine_mean >= MIN_COSINE
        assert 1e-3 < figures[name].relative_error < limit
    assert figures["bfloat16"].cosine_min >= MIN_COSINE - 5e-4


@pytest.mark.parametrize("precision", [FP8, FP8_EVERYWHERE], ids=["default", "everywhere"])
def test_p30_graphs_in_fp8_replay_what_eager_runs(towers: tuple[Tower, Tower], precision: Precision) -> None:
    # Products of other numbers of rows round otherwise, and a rounding to fp8 in the first blocks turns a
    # last bit into three percent of a value, which all later blocks pass on.
    limit = MIN_COSINE if precision is FP8 else 0.99
    tower = fused(towers[0], precision)
    runner = GraphRunner(
        tower,
        default_ladder(2048, max_frames=4, max_step_share=0.3),
        CUDA,
        capture=True,
        clock=time.monotonic,
    )
    runner.capture_all()
    generator = random.Random(fresh_seed())
    sides = list(itertools.product((2, 8, 14, 20), repeat=2))
    for _ in range(50):
        grids = [Grid(1, *generator.choice(sides)) for _ in range(generator.randint(1, 5))]
        pixels = pixels_for(tower, grids).to(CUDA, torch.bfloat16)
        expected = rows_of(tower, grids, pixels)
        found = runner.run(runner.prepare(grids), [pixels])
        assert compare_rows(found, expected, tower.num_deepstack_levels).cosine_min > limit, grids
    assert runner.counters.replays.total() == 50


def test_p11_the_service_in_fp8_has_keys_of_its_own_and_says_so(checkpoint: Path) -> None:
    data = (PHOTOS / "coffee.jpg").read_bytes()
    rows, prints = {}, {}
    for precision in ("dtype", "fp8"):
        with (
            running(
                checkpoint, CUDA, dtype="bfloat16", precision=precision, bucket_sizes="1024,4096"
            ) as service,
            VisionEncoderClient(service.target, timeout_s=120) as client,
        ):
            model = client.info().models[0]
            assert model.precision == precision
            prints[precision] = model.model_fingerprint
            encoded = client.encode_one(ImageItem(data))
            assert isinstance(encoded, EncodedRows)
            rows[precision] = encoded
    assert prints["dtype"] != prints["fp8"]
    assert rows["dtype"].key != rows["fp8"].key
    figures = compare_rows(rows["fp8"].torch(), rows["dtype"].torch(), rows["dtype"].num_deepstack_levels)
    print(f"{checkpoint.name}: service in fp8 against bfloat16: {figures}")
    assert figures.cosine_mean >= MIN_COSINE
    assert figures.relative_error > 1e-3


def test_packed_weights_are_counted(towers: tuple[Tower, Tower]) -> None:
    plain: Any = towers[0]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(CUDA)
    tower = fused(plain, FP8_EVERYWHERE)
    added = torch.cuda.memory_allocated(CUDA) - before
    config = plain.config
    elements = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    assert tower.packed_bytes >= config.depth * elements
    # Beside them: rotary tables of a few MiB, and the allocator's rounding.
    assert 0 <= added - tower.packed_bytes < 32 << 20


def test_fp8_runs_where_it_is_asked_for(towers: tuple[Tower, Tower]) -> None:
    runner = build_graph_runner(
        towers[0],
        attention="auto",
        deterministic=False,
        max_patches=1024,
        bucket_sizes=(1024,),
        precision=FP8,
    )
    assert runner is not None
    tower = runner._tower
    assert isinstance(tower, FusedTower)
    assert tower.precision == FP8
    assert tower.packed_bytes > 0
