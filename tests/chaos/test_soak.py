"""A short soak."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest

from tests.chaos.soak import MAX_GAIN, MIB, Soak


@pytest.mark.extended
def test_p21_p33_a_short_soak_is_flat() -> None:
    """Half a minute finds leaks by the call: nothing is held at rest, and memory gains no more than caches
    that still fill."""
    seed = random.SystemRandom().randrange(1 << 30)
    max_gain = {**MAX_GAIN, "rss_bytes": 96 * MIB}
    with tempfile.TemporaryDirectory(prefix="ve-soak-") as folder:
        result = Soak(Path(folder), seed, 0.5, kill_every_s=6.0, max_gain=max_gain).run()
    assert result["complaints"] == [], f"seed {seed}"
    assert result["num_kills"] >= 3
    counts = result["counts"]
    for what in ("rows host", "rows miss", "pixels", "bad inputs", "deadlines", "left streams"):
        assert counts.get(what), f"no {what}: {counts}"
    assert result["calls"] > 100
