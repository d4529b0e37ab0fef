"""Buckets: the one chosen fits and is the cheapest, padding stays small, tuned sizes are the best ones."""

from __future__ import annotations

import itertools
import math
import random
import re

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
    seqlen_bounds,
    sequence_slots,
)
from encoder_service.scheduler.cost import H200_COST, CostModel, Launch
from encoder_service.scheduler.tuning import cut_batches, launch_histogram, smallest_size, tune_ladder

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
seqlens = st.lists(st.integers(1, 400).map(lambda n: 4 * n), min_size=1, max_size=20)
histograms = st.dictionaries(st.builds(Launch.of, seqlens), st.floats(0.01, 10), min_size=1, max_size=12)


@settings(deadline=None)
@given(
    st.lists(buckets, min_size=1, max_size=12, unique=True),
    costs,
    st.tuples(st.integers(1, 1300), st.integers(1, 70), st.integers(1, 1300), st.integers(1, 5)),
)
def test_the_chosen_bucket_fits_and_none_that_fits_is_cheaper(
    given_buckets: list[Bucket], cost: CostModel, shape: tuple[int, int, int, int]
) -> None:
    ladder = BucketLadder(given_buckets, cost)
    chosen = ladder.choose(*shape)
    fitting = [bucket for bucket in given_buckets if bucket.fits(*shape)]
    if not fitting:
        assert chosen is None
        return
    assert chosen in fitting
    us = [cost.shape_us(b.num_patches, b.num_sequences, b.max_seqlen) for b in fitting]
    assert cost.shape_us(chosen.num_patches, chosen.num_sequences, chosen.max_seqlen) == min(us)


def test_p29_what_exceeds_any_one_number_of_every_bucket_runs_eager() -> None:
    ladder = BucketLadder([Bucket(1024, 8, 1024, 2), Bucket(2048, 4, 512, 2)])
    assert ladder.choose(1024, 8, 1024, 2) == Bucket(1024, 8, 1024, 2)
    assert ladder.choose(2048, 4, 512, 2) == Bucket(2048, 4, 512, 2)
    for shape in ((2052, 1, 512, 1), (4, 9, 4, 1), (1028, 1, 516, 1), (1028, 5, 4, 1), (4, 1, 4, 3)):
        assert ladder.choose(*shape) is None, shape


def test_more_sequences_than_slots_go_to_the_next_bucket() -> None:
    ladder = default_ladder(16384)
    few = ladder.choose(784, 1, 784)
    many = ladder.choose(784, 30, 32)
    assert few is not None
    assert many is not None
    assert few.num_patches == 784
    assert few.num_sequences < 30 <= many.num_sequences
    assert ladder.choose(784, 10_000, 4) is None


def test_one_ladder_takes_stills_and_clips() -> None:
    ladder = default_ladder(16384, max_frames=4)
    assert {bucket.num_frames for bucket in ladder.buckets} == {4}
    assert ladder.choose(4096, 4, 1024, 1) == ladder.choose(4096, 4, 1024, 4)
    assert ladder.choose(4096, 4, 1024, 5) is None


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
    assert ladder.choose(max_patches, 1, max_patches) is not None
    for common in (784, 1024, 2304, 4096, 8 * 1024, 32 * 784):
        if common <= max_patches:
            assert common in ladder.sizes


def test_default_steps_stay_near_the_asked_share_of_time() -> None:
    ladder = default_ladder(32768, max_step_share=0.06)
    for low, high in itertools.pairwise(ladder.sizes):
        grain = 64 if high <= 4096 else 128
        saved_us = H200_COST.us_per_patch * (high - low)
        high_us = H200_COST.fixed_us + H200_COST.us_per_patch * high
        assert saved_us <= 0.06 * high_us + 2 * grain * H200_COST.us_per_patch, (low, high)
    assert len(ladder) < 200
    assert len(default_ladder(32768, max_step_share=0.15)) < len(ladder) / 1.5


def test_default_ladder_of_a_curve_that_ignores_patches_has_the_anchors_only() -> None:
    ladder = default_ladder(4096, cost=CostModel(1000.0, 0.0, 1e-4))
    assert ladder.sizes == (64, 784, 1024, 1568, 2048, 2304, 3136, 4096)


@pytest.mark.parametrize("fixed_us", [0.0, 1000.0])
def test_sizes_of_any_curve_ascend(fixed_us: float) -> None:
    ladder = default_ladder(8192, cost=CostModel(fixed_us, 2.0, 1e-4))
    assert list(ladder.sizes) == sorted(set(ladder.sizes))


@settings(deadline=None)
@given(st.integers(1, 700).map(lambda n: 64 * n), st.integers(1, 700).map(lambda n: 64 * n))
def test_slots_times_bound_grow_with_size_and_bound(one: int, other: int) -> None:
    low, high = sorted((one, other))
    for size in (low, high):
        launched = [sequence_slots(size, bound) * bound for bound in seqlen_bounds(size)]
        assert launched == sorted(launched)
    for bound in seqlen_bounds(low)[:-1]:
        assert sequence_slots(low, bound) <= sequence_slots(high, bound)


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


@pytest.mark.parametrize("max_patches", [16384, 34816])
def test_padding_of_the_default_ladder_is_under_twelve_percent_of_the_time(max_patches: int) -> None:
    ladder = default_ladder(max_patches)
    mixes = {
        "alone": [[size] for size in set(MIXED)],
        "together": cut_batches(MIXED, max_patches, 64),
        "448 px": cut_batches([784] * 32, max_patches, 64),
        "1024 px": cut_batches([4096] * 8, max_patches, 64),
        "clip": [[1024] * 12],
        "photographs alone": [[size] for size in image_sizes(1, 2000)],
        "photographs batched": cut_batches(image_sizes(2, 2000), max_patches, 64),
    }
    for name, batches in mixes.items():
        waste = ladder.waste(dict.fromkeys(map(Launch.of, batches), 1.0))
        assert waste.eager_launches == 0, name
        assert waste.share < 0.12, (name, waste.share)
    # Attention is not padded; without it the figure still holds.
    no_attention = CostModel(H200_COST.fixed_us, H200_COST.us_per_patch, 0.0, H200_COST.us_per_slot_patch)
    for name, batches in mixes.items():
        waste = ladder.waste(dict.fromkeys(map(Launch.of, batches), 1.0), no_attention)
        assert waste.share < 0.12, (name, waste.share)


def test_powers_of_two_waste_what_the_ladder_saves() -> None:
    """The figure means something: the ladder that peers use fails it."""
    histogram = dict.fromkeys((Launch.of([size]) for size in image_sizes(1, 500)), 1.0)
    doubling = ladder_of_sizes(1 << power for power in range(6, 15))
    assert doubling.waste(histogram).share > 0.12
    assert default_ladder(16384).waste(histogram).share < 0.05


def test_waste_counts_time_by_hand() -> None:
    cost = CostModel(100.0, 1.0, 0.01, 0.001)
    ladder = BucketLadder([Bucket(128, 2, 64)], cost)
    waste = ladder.waste({Launch.of([50, 50]): 2.0, Launch.of([65]): 3.0})
    assert waste.padded_us == pytest.approx(2 * (100 + 128 + 0.01 * 5000 + 0.001 * 128))
    assert waste.exact_us == pytest.approx(2 * (100 + 100 + 0.01 * 5000 + 0.001 * 100))
    assert (waste.launches, waste.eager_launches) == (2.0, 3.0)
    assert waste.share == pytest.approx(1 - waste.exact_us / waste.padded_us)
    assert ladder.waste({}).share == 0.0


def test_capture_order_is_largest_first() -> None:
    order = default_ladder(16384).largest_first
    assert sorted(order, key=lambda b: b.num_patches, reverse=True) == list(order)
    assert set(order) == set(default_ladder(16384).buckets)


@pytest.mark.parametrize(
    ("given_buckets", "message"),
    [
        ([], "0 buckets, needs at least 1"),
        ([Bucket(64, 1, 64), Bucket(64, 1, 64)], "2 buckets, only 1 differ"),
        ([Bucket(64, 0, 64)], "num_sequences is 0, needs at least 1"),
        ([Bucket(64, 1, 128)], "max_seqlen 128 is above its 64 patches"),
    ],
)
def test_wrong_ladders_are_refused_with_both_numbers(given_buckets: list[Bucket], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        BucketLadder(given_buckets)


# -- tuning --------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(histograms, costs)
def test_tuned_is_no_worse_than_the_default_on_its_own_histogram(
    histogram: dict[Launch, float], cost: CostModel
) -> None:
    default = default_ladder(8192, cost=cost)
    tuned = tune_ladder(histogram, len(default.sizes), 8192, cost=cost)
    assert len(tuned.ladder.sizes) <= len(default.sizes)
    assert tuned.waste == tuned.ladder.waste(histogram)
    other = default.waste(histogram)
    assert tuned.waste.padded_us <= other.padded_us * (1 + 1e-9)
    assert tuned.waste.eager_launches == other.eager_launches


@settings(deadline=None, max_examples=40)
@given(
    st.dictionaries(st.builds(Launch.of, seqlens), st.floats(0.01, 10), min_size=1, max_size=7),
    st.integers(1, 4),
    costs,
)
def test_tuned_equals_the_best_of_all_choices(
    histogram: dict[Launch, float], num_sizes: int, cost: CostModel
) -> None:
    max_patches = 32_768
    tuned = tune_ladder(histogram, num_sizes, max_patches, cost=cost)
    candidates = {size for launch in histogram if (size := smallest_size(launch)) is not None}
    candidates.discard(max_patches)
    best = min(
        ladder_of_sizes([*chosen, max_patches], cost=cost).waste(histogram).padded_us
        for count in range(min(num_sizes - 1, len(candidates)) + 1)
        for chosen in itertools.combinations(sorted(candidates), count)
    )
    assert len(tuned.ladder.sizes) <= num_sizes
    assert tuned.waste.padded_us == pytest.approx(best, rel=1e-9)


@settings(deadline=None)
@given(seqlens.map(Launch.of))
def test_the_smallest_size_of_a_launch_takes_it_and_no_smaller_one_does(launch: Launch) -> None:
    size = smallest_size(launch)
    assert size is not None
    assert ladder_of_sizes([size]).choose_for(launch) is not None
    assert size == 4 or ladder_of_sizes([size - 4]).choose_for(launch) is None


def test_launches_that_nothing_takes_are_counted_eager_and_do_not_move_sizes() -> None:
    fits, above, crowded = Launch.of([400]), Launch.of([8000]), Launch.of([4] * 1000)
    tuned = tune_ladder({fits: 1.0, above: 5.0, crowded: 7.0}, 4, 4096)
    assert tuned.ladder.sizes == (400, 4096)
    assert tuned.waste.eager_launches == 12.0
    assert tuned.waste.launches == 1.0


def test_clips_of_more_frames_than_the_ladder_are_eager() -> None:
    clip = Launch.of([1024], num_frames=4)
    assert tune_ladder({clip: 1.0}, 2, 4096).waste.eager_launches == 1.0
    assert tune_ladder({clip: 1.0}, 2, 4096, max_frames=4).ladder.sizes == (1024, 4096)


def test_very_many_sizes_are_rounded_and_still_tuned_well() -> None:
    histogram = {Launch.of([size]): 1.0 for size in range(4, 16384, 4)}
    tuned = tune_ladder(histogram, 48, 16384)
    assert len(tuned.ladder.sizes) == 48
    assert tuned.waste.eager_launches == 0
    assert tuned.waste.padded_us <= default_ladder(16384).waste(histogram).padded_us * 1.02


def test_no_sizes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_sizes is 0, needs at least 1"):
        tune_ladder({Launch.of([4]): 1.0}, 0, 64)


def test_launches_weigh_each_load_by_its_images_and_repeat_exactly() -> None:
    images = {784: 3.0, 4096: 1.0}
    histogram = launch_histogram(images, 16384, 64, loads=(1, 4), samples_per_load=50, seed=3)
    assert histogram == launch_histogram(images, 16384, 64, loads=(1, 4), samples_per_load=50, seed=3)
    assert sum(weight * launch.num_sequences for launch, weight in histogram.items()) == pytest.approx(2.0)
    alone = launch_histogram(images, 16384, 64, loads=(1,))
    assert alone == {Launch.of([784]): 0.75, Launch.of([4096]): 0.25}


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 60), st.integers(1, 6))
def test_batches_lose_nothing_and_keep_the_budget(sizes: list[int], budget: int, items: int) -> None:
    batches = cut_batches(sizes, budget, items)
    assert sorted(itertools.chain(*batches)) == sorted(sizes)
    for batch in batches:
        assert len(batch) == 1 or (sum(batch) <= budget and len(batch) <= items)


@pytest.mark.parametrize(
    ("images", "loads", "message"),
    [
        ({}, (1,), "0 sizes with a total count of 0"),
        ({4: 0.0}, (1,), "1 sizes with a total count of 0"),
        ({4: 1.0}, (0,), "loads are [0]"),
    ],
)
def test_traffic_without_images_is_refused(
    images: dict[int, float], loads: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        launch_histogram(images, 64, 4, loads=loads)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.sampled_from([0.0, 2e-3]))
def test_a_launch_is_predicted_to_take_what_its_bucket_does_or_an_eager_forward(
    seqlens: list[int], us_per_slot_patch: float
) -> None:
    cost = CostModel(900.0, 1.5, 2e-4, us_per_slot_patch)
    ladder = ladder_of_sizes([256, 1024, 4096], cost=cost)
    launch = Launch.of(seqlens)
    fitting = [
        cost.padded_us(launch, bucket.num_patches, bucket.num_sequences, bucket.max_seqlen)
        for bucket in ladder.buckets
        if bucket.fits(launch.num_patches, launch.num_sequences, launch.max_seqlen)
    ]
    expected = min(fitting) if fitting else max(EAGER_US, cost.exact_us(launch))
    assert ladder.predicted_us(launch) == pytest.approx(expected)
