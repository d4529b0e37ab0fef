"""What goes first within a namespace: scans, loops and prefetches do not push out what is asked for again."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from encoder_service.store.use_order import PROBATION_PART, YOUNG_PART, UseOrder


class Cache:
    """Bounded by its entries' bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.order = UseOrder()
        self.num_uses = self.num_hits = 0

    def ask(self, name: int, num_bytes: int = 1) -> bool:
        """Whether it was there; it is afterwards."""
        key = name.to_bytes(8, "big")
        self.num_uses += 1
        if key in self.order:
            self.order.use(key, self.num_uses)
            self.num_hits += 1
            return True
        victims = []
        left_bytes = self.order.num_bytes
        for victim, _, victim_bytes in self.order.going(lambda _: True):
            if left_bytes + num_bytes <= self.capacity_bytes:
                break
            victims.append(victim)
            left_bytes -= victim_bytes
        for victim in victims:
            self.order.remove(victim)
        self.order.add(key, self.num_uses, num_bytes)
        return False

    def ask_all(self, names: Iterable[int]) -> int:
        return sum([self.ask(name) for name in names])


def popular(cache: Cache) -> range:
    """Fills half of the cache with what was asked for twice, some time apart."""
    names = range(cache.capacity_bytes // 2)
    cache.ask_all(names)
    assert cache.ask_all(names) == len(names)
    return names


def test_a_scan_leaves_what_is_asked_for_again() -> None:
    cache = Cache(100)
    names = popular(cache)
    assert cache.ask_all(range(1000, 3000)) == 0
    # The last tenth of what came was young when it was asked for again, and so it was not kept.
    assert cache.ask_all(names) >= len(names) - YOUNG_PART * 100


def test_a_scan_whose_items_are_each_asked_for_again_at_once_is_still_a_scan() -> None:
    """As when a prefetch goes before each call."""
    cache = Cache(100)
    names = popular(cache)
    for name in range(1000, 3000):
        assert not cache.ask(name)
        assert cache.ask(name)
    assert cache.ask_all(names) >= len(names) - YOUNG_PART * 100


def test_what_comes_back_soon_after_it_went_is_kept() -> None:
    cache = Cache(30)
    popular(cache)
    assert not cache.ask(500)
    cache.ask_all(range(1000, 1030))
    assert not cache.ask(500), "the scan pushed it out"
    cache.ask_all(range(2000, 2200))
    assert cache.ask(500)


def test_what_was_popular_long_ago_goes_at_last() -> None:
    cache = Cache(100)
    names = popular(cache)
    later = range(5000, 5100)
    for _ in range(6):
        cache.ask_all(later)
    assert cache.ask_all(later) > 60
    assert cache.ask_all(names) < len(names)


def test_new_items_have_their_part_against_kept_ones() -> None:
    """Else what is new would be gone before it can be asked for again."""
    cache = Cache(90)
    names = range(90)
    for _ in range(3):
        cache.ask_all(names)
    cache.ask_all(range(1000, 1000 + int(90 * PROBATION_PART)))
    assert cache.ask_all(range(1000, 1000 + int(90 * PROBATION_PART))) == int(90 * PROBATION_PART)


def test_a_loop_that_is_too_large_leaves_what_is_asked_for_beside_it() -> None:
    """A round of the loop takes the place of the least recently used of everything, round after round."""
    cache = Cache(100)
    names = popular(cache)
    for _ in range(5):
        for at in range(4):
            cache.ask_all(range(1000 + 100 * at, 1100 + 100 * at))
        assert cache.ask_all(names) >= len(names) - YOUNG_PART * 100


def test_what_is_not_evictable_is_passed_over() -> None:
    cache = Cache(30)
    cache.ask_all(range(30))
    kept = {name.to_bytes(8, "big") for name in range(0, 30, 3)}
    found = [key for key, _, _ in cache.order.going(lambda key: key not in kept)]
    assert len(found) == len(set(found)) == 20
    assert not kept & set(found)


def test_hit_rates_of_a_zipf_with_one_offs_are_above_the_least_recently_used() -> None:
    generator = random.Random(secrets.randbits(32))
    weights = [1 / rank for rank in range(1, 2001)]
    drawn = generator.choices(range(2000), weights, k=20_000)
    cache, lru, lru_hits = Cache(200), dict[int, None](), 0
    for at, name in enumerate(drawn):
        for asked in (name, 10_000 + at):
            cache.ask(asked)
            lru_hits += asked in lru
            lru.pop(asked, None)
            lru[asked] = None
            if len(lru) > 200:
                del lru[next(iter(lru))]
    assert cache.num_hits > 1.15 * lru_hits


class Model(RuleBasedStateMachine):
    """Against lists that are searched from the front, for entries of different bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.order = UseOrder()
        self.new: list[tuple[bytes, int, int]] = []
        self.kept: list[tuple[bytes, int, int]] = []
        self.gone: list[tuple[bytes, int]] = []
        self.came = self.uses = 0

    def total(self) -> int:
        return sum(size for _, size, _ in self.new + self.kept)

    @rule(name=st.integers(0, 12), size=st.integers(1, 5))
    def ask(self, name: int, size: int) -> None:
        key = bytes([name])
        self.uses += 1
        here = [entry for entry in self.new + self.kept if entry[0] == key]
        if not here:
            self.came += size
            self.order.add(key, self.uses, size)
            comes_back = key in [each for each, _ in self.gone]
            self.gone = [each for each in self.gone if each[0] != key]
            (self.kept if comes_back else self.new).append((key, size, self.came))
            return
        (entry,) = here
        self.order.use(key, self.uses)
        is_young = entry in self.new and self.came - entry[2] < YOUNG_PART * self.total()
        (self.new if entry in self.new else self.kept).remove(entry)
        (self.new if is_young else self.kept).append(entry)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if not self.new and not self.kept:
            return
        entry = data.draw(st.sampled_from(self.new + self.kept))
        assert self.order.remove(entry[0]) == entry[1]
        (self.new if entry in self.new else self.kept).remove(entry)
        self.gone.append(entry[:2])
        while sum(size for _, size in self.gone) > self.total():
            self.gone.pop(0)

    @invariant()
    def the_order_is_the_models(self) -> None:
        new, kept, expected = list(self.new), list(self.kept), []
        while new or kept:
            new_bytes = sum(size for _, size, _ in new)
            left = new_bytes + sum(size for _, size, _ in kept)
            expected.append(
                (new if new and (not kept or new_bytes > PROBATION_PART * left) else kept).pop(0)[0]
            )
        assert [key for key, _, _ in self.order.going(lambda _: True)] == expected
        assert (self.order.num_bytes, len(self.order)) == (self.total(), len(expected))
        self.order.check_integrity()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
