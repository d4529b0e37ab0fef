"""The soak's rule on figures that leak and on figures that do not, and a short soak."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.soak import HELD, MAX_GAIN, MIB, Soak, judge

NUM_SAMPLES = 400


def samples(rng: random.Random, **gained: float) -> list[dict[str, float]]:
    """Figures under varying load, which moves memory by up to 30 MiB and in bursts. gained: evenly within the
    measured time."""
    found = []
    for number in range(NUM_SAMPLES):
        burst = 200 * MIB if rng.random() < 0.05 else 0
        noise = {"rss_bytes": rng.uniform(0, 30 * MIB) + burst, "descriptors": rng.choice((0, 0, 1, 5))}
        share = number / NUM_SAMPLES
        found.append({name: noise.get(name, 0.0) + gained.get(name, 0.0) * share for name in MAX_GAIN})
    return found


def rest(**figures: float) -> dict[str, float]:
    return {**dict.fromkeys(HELD, 0.0), "descriptors": 32.0, "threads": 15.0, **figures}


def test_a_leak_is_found_under_the_noise() -> None:
    rng = random.Random(random.SystemRandom().randrange(1 << 30))
    assert judge(samples(rng), [rest(), rest(descriptors=36)]) == []
    for name, gained in (("rss_bytes", 80 * MIB), ("descriptors", 12), ("threads", 6)):
        (complaint,) = judge(samples(rng, **{name: gained}), [rest(), rest()])
        assert complaint.startswith(f"{name} went from ")


@pytest.mark.parametrize(
    ("rests", "complaint"),
    [
        ([rest(), rest(ve_queued_bytes=2), rest()], "ve_queued_bytes is 2 at rest 1"),
        ([rest(ve_encodes_in_flight=1), rest()], "ve_encodes_in_flight is 1 at rest 0"),
        ([rest(), rest(descriptors=37)], "descriptors at rest went from 32 to 37"),
    ],
)
def test_what_is_left_at_rest_is_said(rests: Sequence[dict[str, float]], complaint: str) -> None:
    assert judge(samples(random.Random(1)), rests) == [complaint]


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
