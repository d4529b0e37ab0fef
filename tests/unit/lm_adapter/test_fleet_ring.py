"""Homes: the same everywhere, even, and moved no more than need be."""

from __future__ import annotations

import random
import secrets
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_adapter.fleet.ring import TargetHash, home_order, load_bound, within_load

ROOT = Path(__file__).resolve().parents[3]
KEYS = [secrets.token_bytes(32) for _ in range(4000)]


@dataclass(eq=False)
class Place:
    target: str
    num_items: int = 0
    hash: TargetHash = field(init=False)

    def __post_init__(self) -> None:
        self.hash = TargetHash(self.target)


def places(count: int) -> list[Place]:
    return [Place(f"10.0.{number // 250}.{number % 250}:50051") for number in range(count)]


def homes(found: list[Place]) -> dict[bytes, str]:
    return {key: home_order(key, found)[0].target for key in KEYS}


@pytest.mark.parametrize("count", [1, 3, 4, 8, 50])
def test_keys_are_spread_evenly(count: int) -> None:
    shares = Counter(homes(places(count)).values())
    expected = len(KEYS) / count
    # Six standard deviations of a binomial.
    assert len(shares) == count
    assert all(abs(found - expected) <= 6 * expected**0.5 for found in shares.values())


@given(st.integers(1, 12), st.integers(0, 11), st.binary(min_size=1, max_size=40))
def test_a_replica_that_goes_moves_its_own_keys_only(count: int, gone: int, key: bytes) -> None:
    before = home_order(key, places(count + 1))
    left = [one for one in places(count + 1) if one.target != places(count + 1)[gone % (count + 1)].target]
    after = home_order(key, left)
    names = [one.target for one in before if one.target in {other.target for other in left}]
    assert names == [one.target for one in after]


def test_the_order_does_not_depend_on_the_order_of_the_list() -> None:
    found = places(9)
    shuffled = random.Random(1).sample(found, len(found))
    for key in KEYS[:50]:
        assert home_order(key, found) == home_order(key, shuffled)


def test_every_process_has_the_same_homes() -> None:
    """No salt of the interpreter's own: two clients that share nothing send a digest to the same place."""
    code = (
        "from lm_adapter.fleet.ring import TargetHash\n"
        "print([TargetHash(f'10.0.0.{n}:50051').score(b'key' * 9) for n in range(4)])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert ended.stdout.strip() == str([TargetHash(f"10.0.0.{n}:50051").score(b"key" * 9) for n in range(4)])


def test_without_a_key_the_idlest_goes_first() -> None:
    found = places(3)
    found[0].num_items, found[1].num_items = 2, 1
    assert [one.target for one in home_order(None, found)] == [found[at].target for at in (2, 1, 0)]


def test_without_a_key_equals_are_chosen_by_lot() -> None:
    """Of many clients that have one item each, not all start with the same replica."""
    first = Counter(home_order(None, places(3))[0].target for _ in range(300))
    assert len(first) == 3


def test_a_full_home_passes_on_to_the_next_and_never_beyond_need() -> None:
    found = places(4)
    order = home_order(KEYS[0], found)
    order[0].num_items = 40
    bound = load_bound(found, 1.5, 32)
    assert bound == 32
    assert within_load(order, bound) is order[1]
    for one in found:
        one.num_items = 1000
    # 1.5 times the mean: nobody is over it when all are equal.
    assert within_load(order, load_bound(found, 1.5, 32)) is order[0]
    assert within_load([], 1) is None


@given(st.lists(st.integers(0, 500), min_size=1, max_size=10), st.integers(1, 64))
def test_there_is_always_room_somewhere(loads: list[int], floor: int) -> None:
    found = places(len(loads))
    for one, load in zip(found, loads, strict=True):
        one.num_items = load
    bound = load_bound(found, 1.0, floor)
    assert min(loads) < bound
