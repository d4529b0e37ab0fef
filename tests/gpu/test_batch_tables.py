"""A full bucket's metadata and patches on a GPU: the item table against the host's tables and patches."""

from __future__ import annotations

import random

import pytest
import torch

from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.moonvit import MoonViTPreprocessor
from encoder_service.ingest.qwen_vl import QwenVLPreprocessor
from encoder_service.ingest.settings import MoonViTSettings, Normalisation, QwenVLSettings
from encoder_service.scheduler.buckets import Bucket
from encoder_service.towers.fused_inputs import FusedInputBuilder, FusedInputs
from encoder_service.types import Grid
from tests.parity.tower_cases import fresh_seed
from tests.unit.towers.host_tables import host_coords, host_frame_index, host_merge

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
BUCKET = Bucket(36_864, 144, 16_384, 4)
NORMALISATIONS = (
    Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255),
    Normalisation((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), 1 / 255),
)


def random_batch(generator: random.Random, *, merges_time: bool) -> tuple[list[Grid], FusedInputs]:
    """Stills and clips until the bucket is full or out of slots, and their table in it."""
    grids: list[Grid] = []
    room, slots = BUCKET.num_patches, BUCKET.num_sequences
    while room >= 4 and slots >= 4:
        height = 2 * generator.randint(1, max(1, min(64, room // 4)))
        width = 2 * generator.randint(1, max(1, min(64, room // (2 * height))))
        frames = generator.randint(2, 4) if generator.random() < 0.3 else 1
        grid = Grid(frames, height, width)
        if grid.num_patches > min(room, BUCKET.max_seqlen):
            continue
        grids.append(grid)
        room -= grid.num_patches
        slots -= frames
    build = FusedInputBuilder(lambda grid: None, merge_size=2, merges_time=merges_time)
    return grids, build.pad(build.prepare(grids), BUCKET)


@pytest.mark.parametrize("merges_time", [False, True])
def test_p29_full_buckets_expand_to_the_hosts_tables(merges_time: bool) -> None:
    from encoder_service.towers.kernels import expand_items

    generator = random.Random(fresh_seed())
    for _ in range(20):
        grids, inputs = random_batch(generator, merges_time=merges_time)
        places = expand_items(
            inputs.items.to(CUDA),
            inputs.num_patches,
            merge_size=2,
            merges_time=merges_time,
            num_places=inputs.num_rows * 4,
            num_frames=inputs.num_frames,
        )
        assert torch.equal(places.coords.cpu(), host_coords(grids, inputs.num_patches, 2, merges_time))
        if merges_time:
            expected = (
                host_frame_index(grids, inputs.num_patches),
                *host_merge(grids, inputs.num_patches, inputs.num_frames, 2),
            )
            for found, table in zip(places[1:], expected, strict=True):
                assert found is not None
                assert torch.equal(found.cpu(), table)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("normalisation", NORMALISATIONS, ids=["halves", "clip"])
@pytest.mark.parametrize("family", ["qwen", "moonvit"])
def test_a_full_bucket_is_cut_as_the_preprocessor_does(
    family: str, normalisation: Normalisation, dtype: torch.dtype
) -> None:
    from encoder_service.towers.kernels import patchify_items

    limits = DecodeLimits(max_encoded_bytes=1 << 20, max_image_pixels=1 << 20)
    merges_time = family == "moonvit"
    preprocessor: MoonViTPreprocessor | QwenVLPreprocessor
    if merges_time:
        preprocessor = MoonViTPreprocessor(MoonViTSettings(14, 2, 4096, 512, normalisation), limits)
        patch_size, temporal = 14, 1
    else:
        preprocessor = QwenVLPreprocessor(QwenVLSettings(16, 2, 2, 1, 1 << 20, normalisation), limits)
        patch_size, temporal = 16, 2
    generator = random.Random(fresh_seed())
    grids, inputs = random_batch(generator, merges_time=merges_time)
    sources = torch.full((len(inputs.items), 2), -1)
    pieces, expected, end = [], [], 0
    for index, grid in enumerate(grids):
        num_frames = grid.t * temporal - generator.randrange(temporal)
        shape = (num_frames, grid.h * patch_size, grid.w * patch_size, 3)
        frames = torch.randint(256, shape, dtype=torch.uint8, device=CUDA)
        sources[index] = torch.tensor([end, num_frames])
        pieces.append(frames.flatten())
        # On the host: what a division gives there is the definition.
        expected.append(preprocessor.patchify(frames.cpu()).to(dtype))
        end += frames.numel()
    out = torch.full((inputs.num_patches, preprocessor.patch_dim), torch.nan, dtype=dtype, device=CUDA)
    patchify_items(
        torch.cat(pieces),
        inputs.items.to(CUDA),
        sources.to(CUDA),
        out,
        normalisation.image_mean,
        normalisation.image_std,
        normalisation.rescale_factor,
        patch_size=patch_size,
        merge_size=2,
        temporal_patch_size=temporal,
        merges_time=merges_time,
    )
    found = out.cpu()
    real = torch.cat(expected)
    assert torch.equal(found[: len(real)], real)
    assert not found[len(real) :].any()
