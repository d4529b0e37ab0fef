"""Cost model: the fit recovers the coefficients of its timings; a curve follows steps that a line cannot."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.errors import ConfigurationError
from encoder_service.scheduler.cost import H200_COST, CostModel, Launch, Timing


def timing(patches: int, squares: int, us: float) -> Timing:
    return Timing(Launch(patches, 1, 0, squares), patches, 1, 0, us)


def bucket_timings(cost: CostModel) -> list[Timing]:
    """Timings as calibration takes them: long and short sequences, under a high and a low max_seqlen."""
    timings = []
    for size in (256, 1024, 4096, 16384):
        for lengths, slots, bound in (
            ([size], 8, size),
            ([size // 8] * 8, 8, size),
            ([size // 32] * 32, 64, max(1, size // 4)),
        ):
            launch = Launch.of(lengths)
            timings.append(Timing(launch, size, slots, bound, cost.padded_us(launch, size, slots, bound)))
    return timings


def test_a_fit_is_never_negative() -> None:
    samples = [(100, 10, 50.0), (200, 5000, 150.0), (400, 20, 350.0), (300, 100, 250.0)]
    fitted = CostModel.fit([timing(*sample) for sample in samples])
    assert min(fitted.fixed_us, fitted.us_per_patch, fitted.us_per_square) == 0.0
    assert fitted.us_per_patch > 0


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(1, 1, 5.0), (2, 4, 6.0)], "3 unknowns, 2 different timings"),
        ([(1, 1, 5.0)] * 4, "3 unknowns, 1 different timings"),
        ([(1, 1, 0.0), (2, 4, 6.0), (3, 9, 7.0)], "0.0 us, needs more than 0"),
        ([(8, 64, 5.0), (8, 64, 6.0), (8, 64, 7.0)], "3 samples do not determine 3 unknowns"),
    ],
)
def test_timings_without_a_fit_are_refused(samples: list[tuple[int, int, float]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        CostModel.fit([timing(*sample) for sample in samples])


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 40_000), st.integers(1, 40_000))
def test_time_of_a_curve_never_falls_with_the_size(seed: int, one: int, other: int) -> None:
    noise = random.Random(seed)
    timings = [
        Timing(t.launch, t.num_patches, t.num_sequences, t.max_seqlen, t.us * noise.uniform(0.5, 1.5))
        for t in bucket_timings(H200_COST)
    ]
    model = CostModel.fit(timings).with_curve(timings)
    low, high = sorted((one, other))
    assert 0 <= model.patches_us(low) <= model.patches_us(high)


def test_a_curve_is_interpolated_and_goes_on_with_the_line() -> None:
    cost = CostModel(7.0, 2.0, 0.0, curve=((100, 500.0), (200, 600.0)))
    assert [cost.patches_us(p) for p in (1, 100, 150, 200, 300)] == [500.0, 500.0, 550.0, 600.0, 800.0]
