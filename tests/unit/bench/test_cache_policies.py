"""The cache bench: policies keep their bound, mixes can be had again, its service is the service's."""

from __future__ import annotations

import json
import random
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from cache_policies import compare, draw, hit_rates
from cache_policy_models import BOUND, POLICIES, Farthest, Lru, Service
from cache_traces import PATTERNS, Trace, make_trace

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_know_what_they_have_and_keep_their_bound(policy: str) -> None:
    generator = random.Random(secrets.randbits(32))
    sizes = [generator.randint(1, 9) for _ in range(200)]
    made = POLICIES[policy](60)
    hits = 0
    for _ in range(5000):
        key = min(199, int(generator.paretovariate(0.7)))
        hits += made.request(key, sizes[key])
        assert made.request(key, sizes[key]) or policy == "tinylfu", "what was just asked for is there"
    assert hits > 500
    fits = POLICIES[policy](1000)
    for _ in range(2):
        found = [fits.request(key, sizes[key]) for key in range(100)]
    assert all(found), "all of it fits"


def test_the_bound_is_above_every_policy_where_sizes_are_alike() -> None:
    trace = make_trace("zipf", 5000, secrets.randbits(20))
    alike = Trace(trace.name, trace.text, trace.keys, dict.fromkeys(trace.sizes, 1))
    best, _ = hit_rates(Farthest(200, alike.keys), alike)
    for make in POLICIES.values():
        assert hit_rates(make(200), alike)[0] <= best


def test_the_service_resists_a_scan_and_the_least_recently_used_does_not() -> None:
    popular = [key for key in range(50) for _ in range(2)]
    random.Random(secrets.randbits(32)).shuffle(popular)
    rates = []
    for make in (Lru, Service):
        made = make(100)
        for key in popular * 4:
            made.request(key, 1)
        for key in range(1000, 1500):
            made.request(key, 1)
        rates.append(sum(made.request(key, 1) for key in range(50)))
    assert rates[0] == 0
    assert rates[1] >= 40


def test_mixes_follow_their_seed() -> None:
    for name in PATTERNS:
        one, same, other = (make_trace(name, 3000, seed) for seed in (7, 7, 8))
        assert (one.keys, one.sizes) == (same.keys, same.sizes)
        assert (one.keys, one.sizes) != (other.keys, other.sizes)
        assert set(one.sizes) == set(one.keys)
        assert one.text


def test_seeds_give_the_same_mix_in_another_process() -> None:
    code = "from cache_traces import make_trace; print(make_trace('day', 500, 3))"
    found = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=BENCH, env={"PYTHONHASHSEED": seed, "PYTHONPATH": ".."},
            capture_output=True, text=True, check=True, timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert found[0] == found[1]


def test_a_result_has_every_policy_and_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = compare(600, 1, 5)
    assert {one["policy"] for one in records} == {*POLICIES, BOUND}
    assert {one["mix"] for one in records} == set(PATTERNS)
    assert all(0 <= one["patch_hit_rate"] <= 1 for one in records)
    draw(json.loads(json.dumps({"records": records})), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
