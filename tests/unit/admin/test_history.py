"""The ring of samples and the percentiles out of it."""

from __future__ import annotations

import numpy as np
import pytest

from encoder_service.ops.admin.history import MAX_SAMPLES, History, percentile


def test_p17_the_ring_is_bounded_in_bytes_however_long_it_runs() -> None:
    columns = [f"c{index}" for index in range(200)]
    history = History(columns, 1 << 20)
    before = history.num_bytes
    for second in range(3 * history.capacity):
        history.add(float(second), [float(second)] * len(columns))
    assert history.num_bytes == before <= 1 << 20
    assert len(history) == history.capacity
    window = history.last(1e9)
    assert list(window.times_s) == [float(s) for s in range(2 * history.capacity, 3 * history.capacity)]
    assert len(History(["one"], 1 << 30)._ring) == MAX_SAMPLES


def test_a_ring_for_one_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="hold 1 samples of 24 bytes"):
        History(["a", "b"], 47)


def test_rates_are_over_the_window_asked_for() -> None:
    history = History(["total", "level"])
    for second in range(100):
        history.add(1000.0 + second, [2.0 * second if second < 90 else 180.0 + 10 * (second - 90), second])
    assert history.last(9.0).rate("total") == pytest.approx(10.0)
    assert history.last(9.0).seconds == 9.0
    assert history.last(5.0).gained("total") == 50.0
    assert history.last(5.0).now("level") == 99.0
    assert list(history.last(2.0).rates("total")) == [10.0, 10.0]


def test_nothing_is_told_of_nothing() -> None:
    history = History(["total"])
    assert (history.last(10).rate("total"), history.last(10).now("total")) == (0.0, 0.0)
    history.add(0.0, [7.0])
    assert (history.last(10).rate("total"), history.last(10).now("total")) == (0.0, 7.0)


def test_percentiles_are_within_the_bucket_that_numpys_is_in() -> None:
    rng = np.random.default_rng()
    values = rng.lognormal(-4, 1.5, 5000)
    bounds = [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 1e9]
    counts = np.histogram(values, [0.0, *bounds, np.inf])[0].tolist()
    for share in (0.5, 0.9, 0.99):
        found = percentile(bounds, counts, share)
        assert found is not None
        exact = float(np.quantile(values, share))
        index = int(np.searchsorted(bounds, exact))
        lower = bounds[index - 1] if index else 0.0
        assert lower <= found <= bounds[index]


def test_percentiles_of_none_and_above_the_last_bound() -> None:
    assert percentile([1.0, 2.0], [0.0, 0.0, 0.0], 0.5) is None
    assert percentile([1.0, 2.0], [0.0, 0.0, 5.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], [4.0, 0.0, 0.0], 0.5) == 0.5
