"""A short soak."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest

from tests.chaos.soak import MIB, Soak


@pytest.mark.extended
def test_p21_p33_a_short_soak_is_flat() -> None:
    """Half a minute finds leaks by the call: nothing is held at rest, and memory gains no more than caches
    that still fill."""
    seed = random.SystemRandom().randrange(1 << 30)
    with tempfile.TemporaryDirectory(prefix="ve-soak-") as folder:
        soak = Soak(Path(folder), seed, 0.5)
        soak.kill_every_s = 6.0
        soak.max_gain["rss_bytes"] = 96 * MIB
        soak.run()
    assert soak.complaints == [], f"seed {seed}"
    assert soak.num_kills >= 3
    for what in ("rows host", "rows miss", "bad inputs", "deadlines", "left streams"):
        assert soak.counts.get(what), f"no {what}: {soak.counts}"
