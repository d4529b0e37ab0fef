"""Captured graphs on a GPU: replays equal eager in any order of buckets, memory is flat, nothing leaks."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from encoder_service.checkpoints.synthetic import config_for
from encoder_service.engine.fast_path import build_graph_runner
from encoder_service.engine.graphs import GraphRunner, filling_grids
from encoder_service.errors import ConfigurationError, NotReady
from encoder_service.scheduler.buckets import MIN_SLOTS, Bucket, BucketLadder, default_ladder, ladder_of_sizes
from encoder_service.towers.attention import AttentionBackend, SdpaAttention, available_backends
from encoder_service.towers.fused import FusedTower
from encoder_service.towers.fused_inputs import BucketShape, FusedInputs
from encoder_service.towers.registry import parse_config
from encoder_service.towers.tower import Tower
from encoder_service.types import Grid
from tests.parity.tower_cases import fresh_seed

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
FAMILIES = (
    *("qwen3_vl", "kimi_k25", "qwen3_omni_moe", "interns1_pro", "kimi_vl", "kimi_k3", "glm4v", "glm_ocr"),
    *("glm5_next", "ling_vl", "qwen2_5_vl"),
)
MAX_PATCHES = 2048
MAX_FRAMES = 4
# One rounding to bfloat16 is 0.2 %; products of other shapes sum in another order.
RELATIVE = 2e-2


def backends() -> list[AttentionBackend]:
    """The installed backends that a graph can hold, most preferred first."""
    return [backend for backend in available_backends(CUDA) if not backend.static_lengths]


def backend_names() -> list[str]:
    return [backend.name for backend in backends()] if torch.cuda.is_available() else ["none"]


def fused_tower(family: str, size: str, attention: AttentionBackend) -> FusedTower:
    return FusedTower(plain_tower(family, size), attention)  # type: ignore[arg-type]


def plain_tower(family: str, size: str) -> Tower:
    """A tower with random weights of trained magnitude, made on the device."""
    torch.manual_seed(7)
    parsed_family, config = parse_config(config_for(family, size))
    with torch.device(CUDA):
        plain = parsed_family.build(config)
    for name, parameter in plain.named_parameters():
        parameter.data = parameter.data.to(torch.bfloat16)  # buffers stay float32, as in a loaded tower
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "pos" in name else parameter.shape[-1] ** -0.5)
        elif "norm" in name and name.endswith("weight"):
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=0.02)
    return plain.to(CUDA).requires_grad_(False).eval()


def captured_runner(tower: FusedTower, ladder: BucketLadder) -> GraphRunner:
    runner = GraphRunner(tower, ladder, CUDA, capture=True, clock=time.monotonic)
    runner.capture_all()
    return runner


@pytest.fixture(scope="module", params=FAMILIES)
def runner(request: pytest.FixtureRequest) -> Iterator[GraphRunner]:
    tower = fused_tower(request.param, "small", backends()[0])
    yield captured_runner(tower, default_ladder(MAX_PATCHES, max_frames=tower.max_frames))
    torch.cuda.empty_cache()


def tower_of(runner: GraphRunner) -> FusedTower:
    tower = runner.tower
    assert isinstance(tower, FusedTower)
    return tower


def random_batch(generator: random.Random, tower: FusedTower, most: int = MAX_PATCHES) -> list[Grid]:
    """Stills and clips of random sides, up to a random number of patches, to the sequences that every bucket
    has slots for, and to the frames that the tower averages."""
    room, slots = generator.randint(4, most), MIN_SLOTS
    most_frames = tower.max_frames if tower.merges_time else MAX_FRAMES
    grids: list[Grid] = []
    while room >= 4 and slots:
        height = 2 * generator.randint(1, min(12, room // 4))
        width = 2 * generator.randint(1, max(1, min(16, room // (2 * height))))
        frames = generator.randint(1, most_frames) if generator.random() < 0.2 else 1
        grid = Grid(max(1, min(frames, slots, room // (height * width))), height, width)
        grids.append(grid)
        room -= grid.num_patches
        slots -= grid.t
    return grids


def random_pixels(grids: list[Grid], tower: FusedTower) -> list[torch.Tensor]:
    return [
        torch.randn(grid.num_patches, tower.patch_dim, device=CUDA, dtype=torch.bfloat16) for grid in grids
    ]


@torch.inference_mode()
def eager_rows(tower: FusedTower, grids: list[Grid], pixels: list[torch.Tensor]) -> torch.Tensor:
    rows: torch.Tensor = tower(tower.prepare(grids).to(CUDA).with_pixels(torch.cat(pixels)))
    return rows


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    found, expected = found.float(), expected.float()
    return float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))


def replay_against_eager(runner: GraphRunner, generator: random.Random) -> Bucket:
    """One random batch, checked; the bucket it ran in. Nothing of it stays."""
    tower = tower_of(runner)
    grids = random_batch(generator, tower)
    pixels = random_pixels(grids, tower)
    expected = eager_rows(tower, grids, pixels)
    inputs = tower.prepare(grids)
    bucket = runner.can_use(inputs)
    assert bucket is not None, grids
    rows = runner.run(inputs, pixels)
    assert torch.isfinite(rows).all(), (bucket, grids)
    assert relative_error(rows, expected) < RELATIVE, (bucket, grids)
    return bucket


def test_p26_p28_p29_p30_two_thousand_alternating_replays_equal_eager(runner: GraphRunner) -> None:
    counters = runner.counters
    generator = random.Random(fresh_seed())
    replays_before, eager_before = counters.replays.total(), counters.eager_runs
    # What is allocated once, at first use, is so in the first steps.
    used = {replay_against_eager(runner, generator) for _ in range(200)}
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated(CUDA)
    used |= {replay_against_eager(runner, generator) for _ in range(2000)}
    torch.cuda.synchronize()
    assert counters.replays.total() - replays_before == 2200
    assert counters.eager_runs == eager_before
    assert counters.padded_runs.total() == 0
    assert len(used) > len(runner.ladder.sizes) // 2
    assert torch.cuda.memory_allocated(CUDA) <= allocated + (1 << 20)


def test_p29_p33_a_poisoned_batch_leaves_nothing_in_the_next(runner: GraphRunner) -> None:
    """NaN fills a bucket's static inputs and all its intermediate memory; the next, smaller batch of the
    same bucket has its padding there."""
    tower = tower_of(runner)
    for small in ([Grid(1, 14, 64), Grid(1, 2, 4)], [Grid(1, 30, 62)]):
        bucket = runner.can_use(tower.prepare(small))
        assert bucket is not None
        full = filling_grids(bucket, tower.merge_size)
        assert runner.can_use(tower.prepare(full)) == bucket
        poison = [torch.full((grid.num_patches, tower.patch_dim), float("nan"), device=CUDA) for grid in full]
        poisoned = runner.run(tower.prepare(full), poison)
        assert not torch.isfinite(poisoned).any()
        pixels = random_pixels(small, tower)
        rows = runner.run(tower.prepare(small), pixels)
        assert torch.isfinite(rows).all()
        assert relative_error(rows, eager_rows(tower, small, pixels)) < RELATIVE


@pytest.mark.parametrize(
    "grids",
    [[Grid(1, 64, 64)], [Grid(1, 2, 2)] * 600, [Grid(1, 2, 4)] * 100],
    ids=["patches", "patches-and-sequences", "sequences"],
)
def test_p29_over_the_ladder_runs_eager_and_right(runner: GraphRunner, grids: list[Grid]) -> None:
    tower = tower_of(runner)
    assert runner.can_use(tower.prepare(grids)) is None
    pixels = random_pixels(grids, tower)
    before = runner.counters.eager_runs, runner.counters.replays.total()
    rows = runner.run(tower.prepare(grids), pixels)
    assert (runner.counters.eager_runs, runner.counters.replays.total()) == (before[0] + 1, before[1])
    assert relative_error(rows, eager_rows(tower, grids, pixels)) < RELATIVE


@pytest.mark.parametrize("name", backend_names())
@pytest.mark.parametrize("family", FAMILIES)
def test_p30_every_backend_replays_what_it_runs(name: str, family: str) -> None:
    (backend,) = (backend for backend in backends() if backend.name == name)
    tower = fused_tower(family, "small", backend)
    ladder = ladder_of_sizes([64, 256, 512, 784, 1024, 1536], max_frames=tower.max_frames)
    replaying = captured_runner(tower, ladder)
    generator = random.Random(fresh_seed())
    for _ in range(100):
        grids = random_batch(generator, tower, 1536)
        pixels = random_pixels(grids, tower)
        inputs = tower.prepare(grids)
        if replaying.can_use(inputs) is None:
            continue
        rows = replaying.run(inputs, pixels)
        assert torch.isfinite(rows).all(), grids
        assert relative_error(rows, eager_rows(tower, grids, pixels)) < RELATIVE, grids
    assert replaying.counters.replays.total() > 50


@pytest.mark.whole_device
def test_p27_capture_is_in_order_reported_and_needed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = fused_tower("qwen3_vl", "tiny", backends()[0])
    ladder = ladder_of_sizes([64, 256, 512, 1024])
    fresh = GraphRunner(tower, ladder, CUDA, capture=True, clock=time.monotonic)
    assert not fresh.ready
    with pytest.raises(NotReady, match=f"0 of {len(ladder)} graphs"):
        fresh.run(tower.prepare([Grid(1, 2, 2)]), random_pixels([Grid(1, 2, 2)], tower))
    captured, pad = list[BucketShape](), tower.pad

    def noting(inputs: FusedInputs, bucket: BucketShape) -> FusedInputs:
        captured.append(bucket)
        return pad(inputs, bucket)

    monkeypatch.setattr(tower, "pad", noting)
    with capture_logs() as logs:
        fresh.capture_all()
    assert (logs[0]["event"], logs[0]["of"]) == ("capturing graphs", len(ladder))
    assert fresh.ready
    assert captured == list(ladder.largest_first)
    # Smaller buckets find room in the pool that the largest made.
    largest = captured_runner(tower, ladder_of_sizes([1024]))
    assert largest.captured_bytes > 0
    assert fresh.captured_bytes <= 1.5 * largest.captured_bytes + (32 << 20)
    assert fresh.counters.replays.total() == 0


def test_attention_that_bakes_lengths_is_not_captured() -> None:
    tower = fused_tower("qwen3_vl", "tiny", SdpaAttention())
    with pytest.raises(ConfigurationError, match="'sdpa' bakes sequence lengths"):
        GraphRunner(tower, default_ladder(64), CUDA, capture=True, clock=time.monotonic)


@pytest.mark.whole_device
@pytest.mark.parametrize("family", FAMILIES)
def test_p27_all_graphs_of_a_full_tower_stay_under_two_gibibytes_and_a_minute(family: str) -> None:
    tower = fused_tower(family, "full", backends()[0])
    full = GraphRunner(
        tower, default_ladder(16_384, max_frames=tower.max_frames), CUDA, capture=True, clock=time.monotonic
    )
    started_s = time.monotonic()
    full.capture_all()
    seconds = time.monotonic() - started_s
    print(f"{family}: {seconds:.1f} s, {full.captured_bytes / 2**20:.0f} MiB")
    assert full.captured_bytes < 2 << 30
    assert seconds < 60

    grids = [Grid(1, 28, 28)] * 5 + [Grid(1, 64, 64)]
    pixels = random_pixels(grids, tower)
    inputs = tower.prepare(grids)
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    rows = full.run(inputs, pixels)
    host_us = (time.perf_counter() - started_s) * 1e6
    assert relative_error(rows, eager_rows(tower, grids, pixels)) < RELATIVE
    print(f"{family}: host time of one step at {inputs.num_patches} patches: {host_us:.0f} us")
    del full
    torch.cuda.empty_cache()


@pytest.mark.parametrize("family", FAMILIES)
def test_p45_a_second_start_measures_nothing(family: str, tmp_path: Path) -> None:
    tower = plain_tower(family, "small")
    found, events = [], []
    for _ in range(2):
        with capture_logs() as logs:
            runner = build_graph_runner(
                tower, attention="auto", deterministic=False, max_patches=MAX_PATCHES, choices_dir=tmp_path
            )
        assert runner is not None
        found.append(runner.choices)
        events.append({entry["event"] for entry in logs})
    assert found[0] == found[1]
    assert "kernel selected" in events[0] - events[1]
    assert "kernel choices of a former start" in events[1] - events[0]
