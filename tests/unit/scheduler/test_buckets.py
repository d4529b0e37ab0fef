"""Bucket ladders: the chosen bucket fits and is the cheapest; padding stays small."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.errors import ConfigurationError
from encoder_service.scheduler.buckets import (
    EAGER_US,
    MAX_STEP_SHARE,
    Bucket,
    BucketLadder,
    default_ladder,
    ladder_of_sizes,
)
from encoder_service.scheduler.cost import H200_COST, CostModel, Launch

MIXED = [784] * 8 + [4096] * 2 + [2304] * 4 + [256] * 16 + [1024] * 6

buckets = st.builds(
    lambda patches, slots, bound, frames: Bucket(patches, slots, min(bound, patches), frames),
    st.integers(1, 300).map(lambda n: 4 * n),
    st.integers(1, 64),
    st.integers(1, 1200),
    st.integers(1, 4),
)
costs = st.builds(
    CostModel,
    st.floats(0, 2000),
    st.floats(0, 5),
    st.floats(0, 1e-3),
    st.floats(0, 1e-2),
)


def launch_of(num_patches: int, num_sequences: int, max_seqlen: int, num_frames: int = 1) -> Launch:
    return Launch(num_patches, num_sequences, max_seqlen, 0, num_frames)


def fits(bucket: Bucket, launch: Launch) -> bool:
    return (
        launch.num_patches <= bucket.num_patches
        and launch.num_sequences <= bucket.num_sequences
        and launch.max_seqlen <= bucket.max_seqlen
        and launch.num_frames <= bucket.num_frames
    )


@settings(deadline=None)
@given(
    st.lists(buckets, min_size=1, max_size=12, unique=True),
    costs,
    st.builds(Launch, *(st.integers(1, most) for most in (1300, 70, 1300, 10**6, 5))),
)
def test_the_chosen_bucket_fits_none_that_fits_is_cheaper_and_its_time_is_predicted(
    given_buckets: list[Bucket], cost: CostModel, launch: Launch
) -> None:
    """Where none fits, the time of an eager forward."""
    ladder = BucketLadder(given_buckets, cost)
    chosen = ladder.choose(launch)
    sizes = {
        bucket: (bucket.num_patches, bucket.num_sequences, bucket.max_seqlen)
        for bucket in given_buckets
        if fits(bucket, launch)
    }
    if not sizes:
        assert chosen is None
        assert ladder.predicted_us(launch) == max(EAGER_US, cost.exact_us(launch))
        return
    assert chosen is not None
    assert cost.shape_us(*sizes[chosen]) == min(cost.shape_us(*size) for size in sizes.values())
    assert ladder.predicted_us(launch) == pytest.approx(cost.padded_us(launch, *sizes[chosen]))


@pytest.mark.parametrize("max_patches", [4, 60, 64, 1024, 16384, 36864, 65536])
@pytest.mark.parametrize("merge_size", [2, 4])
def test_default_sizes_are_whole_merges_and_end_at_the_largest_batch(
    max_patches: int, merge_size: int
) -> None:
    unit = merge_size**2
    if max_patches % unit:
        with pytest.raises(ConfigurationError, match=f"max_patches is {max_patches}.*multiple of {unit}"):
            default_ladder(max_patches, merge_size=merge_size)
        return
    ladder = default_ladder(max_patches, merge_size=merge_size)
    assert ladder.max_patches == max_patches
    assert all(size % unit == 0 for size in ladder.sizes)
    assert ladder.choose(launch_of(max_patches, 1, max_patches)) is not None
    for common in (784, 1024, 2304, 4096, 8 * 1024, 32 * 784):
        if common <= max_patches:
            assert common in ladder.sizes


def test_default_steps_stay_near_their_share_of_time() -> None:
    ladder = default_ladder(32768)
    for low, high in itertools.pairwise(ladder.sizes):
        grain = 64 if high <= 4096 else 128
        saved_us = H200_COST.us_per_patch * (high - low)
        high_us = H200_COST.fixed_us + H200_COST.us_per_patch * high
        assert saved_us <= MAX_STEP_SHARE * high_us + 2 * grain * H200_COST.us_per_patch, (low, high)
    assert len(ladder) < 200


def image_sizes(seed: int, count: int) -> list[int]:
    """Patches of photographs of all shapes, icons to four megapixels, at 16 pixels a patch."""
    generator = random.Random(seed)
    sizes = []
    for _ in range(count):
        area = math.exp(generator.uniform(math.log(65_536), math.log(4_000_000)))
        ratio = math.exp(generator.uniform(math.log(0.4), math.log(2.5)))
        height, width = math.sqrt(area * ratio), math.sqrt(area / ratio)
        sizes.append(4 * max(1, round(height / 32)) * max(1, round(width / 32)))
    return sizes


def padding_share(ladder: BucketLadder, batches: list[list[int]], cost: CostModel = H200_COST) -> float:
    """Part of the device's time that is spent on padding. Every batch has a bucket."""
    padded_us = exact_us = 0.0
    for launch in map(Launch.of, batches):
        bucket = ladder.choose(launch)
        assert bucket is not None
        padded_us += cost.padded_us(launch, bucket.num_patches, bucket.num_sequences, bucket.max_seqlen)
        exact_us += cost.exact_us(launch)
    return 1.0 - exact_us / padded_us


def batches_of(sizes: list[int], max_patches: int) -> list[list[int]]:
    """The sizes in order, up to 64 and ``max_patches`` to a batch."""
    batches: list[list[int]] = [[]]
    for size in sizes:
        if batches[-1] and (sum(batches[-1]) + size > max_patches or len(batches[-1]) == 64):
            batches.append([])
        batches[-1].append(size)
    return batches


@pytest.mark.parametrize("max_patches", [16384, 34816])
def test_padding_of_the_default_ladder_is_under_twelve_percent_of_the_time(max_patches: int) -> None:
    ladder = default_ladder(max_patches)
    mixes = {
        "alone": [[size] for size in set(MIXED)],
        "together": batches_of(MIXED, max_patches),
        "448 px": batches_of([784] * 32, max_patches),
        "1024 px": batches_of([4096] * 8, max_patches),
        "clip": [[1024] * 12],
        "photographs alone": [[size] for size in image_sizes(1, 2000)],
        "photographs batched": batches_of(image_sizes(2, 2000), max_patches),
    }
    # Attention is not padded; without it the figure still holds.
    no_attention = CostModel(H200_COST.fixed_us, H200_COST.us_per_patch, 0.0, H200_COST.us_per_slot_patch)
    for name, batches in mixes.items():
        for cost in (H200_COST, no_attention):
            assert padding_share(ladder, batches, cost) < 0.12, name
    # Powers of two, the usual ladder, exceed the bound.
    powers = ladder_of_sizes(1 << power for power in range(6, 15))
    assert padding_share(powers, [[size] for size in image_sizes(1, 500)]) > 0.12
