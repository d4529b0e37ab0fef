"""Clips and stills above a batch's budget have a bucket of their own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder_service import startup
from encoder_service.checkpoints.synthetic import make_checkpoint
from encoder_service.config import Settings
from encoder_service.engine.fast_path import ladder_of
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.moonvit import PatchLimits, limited_size, most_patches
from encoder_service.ingest.preprocessor import Preprocessor
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.ingest.video.source import ClipLimits
from encoder_service.scheduler.buckets import BucketLadder, default_ladder, sequence_slots
from encoder_service.scheduler.cost import Launch
from encoder_service.towers.registry import load_tower
from encoder_service.towers.tower import Tower
from encoder_service.types import PreprocessOptions

BUDGET = Settings(model=Path("m")).max_patches_per_batch
FRAMES = 4


def opened(folder: Path, family: str) -> tuple[Tower, Preprocessor]:
    make_checkpoint(folder, family, "tiny", seed=1)
    tower = load_tower(folder, device=torch.device("cpu"), dtype=torch.float32).tower
    limits = DecodeLimits(1 << 26, 1 << 26)
    return tower, load_preprocessor(folder, family, limits, ClipLimits())


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Preprocessor, BucketLadder]:
    tower, preprocessor = opened(tmp_path_factory.mktemp("kimi"), "kimi_k25")
    return preprocessor, ladder_of(tower, BUDGET, (), preprocessor.longest_item)


@pytest.mark.parametrize(
    ("height", "width"), [(480, 854), (1080, 1920), (1920, 1080), (2160, 3840), (153, 6761)]
)
def test_a_full_chunk_at_the_default_settings_has_a_bucket(
    height: int, width: int, kimi: tuple[Preprocessor, BucketLadder]
) -> None:
    preprocessor, ladder = kimi
    assert preprocessor.clips is not None
    plan = preprocessor.clips.sized(FRAMES, height, width, PreprocessOptions())
    (chunk,) = plan.chunk_grids
    bucket = ladder.choose(Launch.of([chunk.num_patches], FRAMES))
    assert bucket is not None, chunk
    assert bucket.num_patches <= 1.1 * chunk.num_patches


def test_a_large_photo_has_a_bucket(kimi: tuple[Preprocessor, BucketLadder]) -> None:
    """Padding takes it above its limit, which is the batch's budget."""
    preprocessor, ladder = kimi
    size = preprocessor.plan_image(3000, 4000, PreprocessOptions()).grid.num_patches
    assert size > BUDGET
    assert ladder.choose(Launch.of([size])) is not None


def test_sizes_above_the_budget_are_few_and_for_one_sequence_each() -> None:
    plain, longer = default_ladder(BUDGET, max_frames=4), default_ladder(BUDGET, max_frames=4, longest=21_408)
    above = [bucket for bucket in longer.buckets if bucket.num_patches > BUDGET]
    assert {*longer.buckets} - {*above} == {*plain.buckets}
    assert 1 <= len(above) <= 6
    assert {bucket.max_seqlen == bucket.num_patches for bucket in above} == {True}
    assert longer.max_patches - 128 < 21_408 <= longer.max_patches
    assert all(one.num_sequences == sequence_slots(one.num_patches, one.max_seqlen) for one in above)
    assert default_ladder(BUDGET, longest=BUDGET).buckets == default_ladder(BUDGET).buckets


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_families_that_attend_within_a_pair_of_frames_keep_their_ladder(family: str, tmp_path: Path) -> None:
    tower, preprocessor = opened(tmp_path, family)
    assert preprocessor.longest_item == 0
    assert ladder_of(tower, BUDGET, (), preprocessor.longest_item).buckets == default_ladder(BUDGET).buckets


@given(
    height=st.integers(28, 9000),
    width=st.integers(28, 9000),
    limits=st.sampled_from([PatchLimits(4096, 512), PatchLimits(16_384, 512), PatchLimits(1024, 64)]),
)
def test_no_frame_has_more_patches_than_the_bound(height: int, width: int, limits: PatchLimits) -> None:
    sides = limited_size(height, width, 14, limits)
    grid_h, grid_w = (-(-side // 28) * 2 for side in sides)
    assert grid_h * grid_w <= most_patches(14, 2, limits)
    assert most_patches(14, 2, PatchLimits(4096, 512)) == 446 * 12  # of a strip


def test_the_service_asks_for_what_its_preprocessor_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(startup, "build_graph_runner", lambda tower, **given: asked.update(given))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    _, preprocessor = opened(tmp_path, "kimi_k25")
    tower = SimpleNamespace(device=torch.device("cuda"))
    model = SimpleNamespace(tower=tower, preprocessor=preprocessor)
    startup.capture_graphs(model, Settings(model=tmp_path))  # type: ignore[arg-type]
    assert (asked["max_patches"], asked["longest_item"]) == (BUDGET, 4 * 446 * 12)
