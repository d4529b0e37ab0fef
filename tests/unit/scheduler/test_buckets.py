"""Bucket ladders: the chosen bucket fits and is the cheapest; padding stays small."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.errors import ConfigurationError
from encoder_service.scheduler.buckets import (
    EAGER_US,
    Bucket,
    BucketLadder,
    default_ladder,
    ladder_of_sizes,
)
from encoder_service.scheduler.cost import H200_COST, CostModel, Launch

buckets = st.builds(
    lambda patches, slots, bound, frames: Bucket(patches, slots, min(bound, patches), frames),
    st.integers(1, 300).map(lambda n: 4 * n),
    st.integers(1, 64),
    st.integers(1, 1200),
    st.integers(1, 4),
)
costs = st.builds(CostModel, st.floats(0, 2000), st.floats(0, 5), st.floats(0, 1e-3), st.floats(0, 1e-2))


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


@pytest.mark.parametrize("max_patches", [16384, 34816])
def test_padding_of_the_default_ladder_is_under_twelve_percent_of_the_time(max_patches: int) -> None:
    """Of single images up to four megapixels. Powers of two, the usual ladder, exceed the bound."""
    sizes = [4 * merges for merges in range(64, 4000, 37)]
    powers = ladder_of_sizes(1 << power for power in range(6, 15))
    for ladder, is_under in ((default_ladder(max_patches), True), (powers, False)):
        launches = [Launch.of([size]) for size in sizes]
        padded_us = sum(ladder.predicted_us(launch) for launch in launches)
        exact_us = sum(H200_COST.exact_us(launch) for launch in launches)
        assert (exact_us > 0.88 * padded_us) is is_under
