"""Fair shares: who makes room for whom, in both stores, and that nobody does in vain."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from encoder_service.store.arena import PROBE_BYTES, Arena
from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.embedding_store import EmbeddingStore, Held, entry_bytes
from encoder_service.store.host_memory import HostMemory
from encoder_service.store.shares import FairShares, Name
from encoder_service.types import EncodedItem, Grid

ROW_BYTES = 1024
ROW_FLOATS = ROW_BYTES // 4
WEIGHTS = {"a": 2.0, "c": 0.5}
NAMESPACES = ("", "a", "b", "c")


def item(name: int, num_rows: int = 1) -> EncodedItem:
    rows = torch.full((num_rows, ROW_FLOATS), float(name))
    return EncodedItem(key_of(name), bytes(32), Grid(1, 4, 4), rows, 1)


def key_of(name: int) -> bytes:
    return name.to_bytes(32, "big")


def arena_store(num_rows: int, max_slots: int = 64, **options: dict[str, float]) -> ArenaStore:
    return ArenaStore(Arena(HostMemory(PROBE_BYTES + num_rows * ROW_BYTES), max_slots=max_slots), **options)


def names_in(store: ArenaStore | EmbeddingStore, namespace: str) -> list[int]:
    return [int.from_bytes(key, "big") for found, key in store._entries if found == namespace]


# Who goes for whom


@pytest.fixture(params=["arena", "own"])
def store(request: pytest.FixtureRequest) -> Iterator[ArenaStore | EmbeddingStore]:
    """Twelve items of one row."""
    store: ArenaStore | EmbeddingStore
    if request.param == "arena":
        store = arena_store(12, weights=WEIGHTS)
    else:
        store = EmbeddingStore(12 * entry_bytes(item(0)), weights=WEIGHTS)
    yield store
    store.check_integrity()
    if isinstance(store, ArenaStore):
        store.close()


def test_a_namespace_alone_uses_everything(store: ArenaStore | EmbeddingStore) -> None:
    for name in range(20):
        assert store.put("c", item(name))
    assert names_in(store, "c") == list(range(8, 20))
    assert (store.counters.evictions, store.counters.evicted_for_others) == (8, 0)


def test_a_noisy_namespace_pushes_nobody_below_a_share(store: ArenaStore | EmbeddingStore) -> None:
    for name in range(6):
        assert store.put("b", item(name))
    for name in range(100):
        assert store.put("noisy", item(name))
        assert len(names_in(store, "b")) == 6
    assert names_in(store, "noisy") == list(range(94, 100))
    assert store.counters.evicted_for_others == 0


def test_a_newcomer_gets_its_share_of_what_others_hold_above_theirs(
    store: ArenaStore | EmbeddingStore,
) -> None:
    for name in range(12):
        store.put("b", item(name))
    store.get("b", key_of(0))
    for name in range(100, 110):
        assert store.put("", item(name))
    assert names_in(store, "b") == [0, *range(7, 12)], "the least recently used are gone"
    assert names_in(store, "") == list(range(104, 110))
    assert (store.counters.evictions, store.counters.evicted_for_others) == (10, 6)


def test_shares_are_by_weight(store: ArenaStore | EmbeddingStore) -> None:
    for name in range(30):
        for namespace in ("a", "b"):
            assert store.put(namespace, item(name))
    assert (len(names_in(store, "a")), len(names_in(store, "b"))) == (8, 4)
    assert store.shares.share_bytes("a") == store.shares.capacity_bytes * 2 / 3
    assert store.shares.share_bytes("c") == store.shares.capacity_bytes * 0.5 / 3.5


def test_room_that_a_namespace_leaves_is_anybodys(store: ArenaStore | EmbeddingStore) -> None:
    for name in range(12):
        store.put("a" if name < 2 else "b", item(name))
    assert store.put("b", item(50))
    assert names_in(store, "a") == [0, 1]
    assert len(names_in(store, "b")) == 10, "above its share of four, which nobody claims"


def test_the_least_recently_used_of_all_above_their_shares_goes_first(
    store: ArenaStore | EmbeddingStore,
) -> None:
    for name in range(6):
        store.put("b", item(2 * name))
        store.put("", item(2 * name + 1))
    store.get("b", key_of(0))
    for name in (100, 101, 102, 103):  # the shares of three are four rows
        assert store.put("d", item(name))
    assert names_in(store, "b") == [0, 6, 8, 10]
    assert names_in(store, "") == [5, 7, 9, 11]


def test_an_entry_that_reaches_over_a_share_goes_only_to_whom_the_room_belongs() -> None:
    store = arena_store(12)
    store.put("b", item(0, 7))  # its share is six, beside one other
    for name in range(1, 6):
        assert store.put("", item(name))
    assert store.put("", item(6)), "the sixth of six: its own share"
    assert names_in(store, "b") == []
    assert names_in(store, "") == [1, 2, 3, 4, 5, 6]
    store.close()
    store = arena_store(12)
    store.put("b", item(0, 7))
    for name in range(1, 6):
        assert store.put("", item(name))
    assert store.put("", item(6, 2)), "seven would be more than a share: its own go"
    assert names_in(store, "b") == [0]
    assert names_in(store, "") == [3, 4, 5, 6]
    store.close()


def test_a_large_entry_gives_way_once_its_claimant_has_nothing_else_to_give() -> None:
    store = EmbeddingStore(12 * entry_bytes(item(0)))
    store.put("b", item(0, 21))  # 22 KiB of 24, with what an entry costs
    assert store.put("", item(1, 1))
    assert store.put("", item(2, 10)), "13 KiB are more than a share, 11 without its own are not"
    assert (names_in(store, "b"), names_in(store, "")) == ([], [2])
    store.check_integrity()


def test_what_others_own_or_readers_hold_is_refused_and_nothing_goes_in_vain() -> None:
    store = arena_store(12)
    for name in range(12):
        store.put("b" if name < 6 else "", item(name % 6))
    held = [store.hold("", key_of(name)) for name in range(5)]
    assert not store.put("", item(7, 2)), "one of its own is free, and no other's"
    assert len(store) == 12
    assert (store.counters.refused, store.counters.evictions) == (1, 0)
    for each in held:
        assert each is not None
        each.drop()
    assert store.put("", item(7, 2))
    assert (names_in(store, "b"), names_in(store, "")) == ([*range(6)], [2, 3, 4, 5, 7])
    store.check_integrity()
    store.close()


def test_rows_that_would_not_fit_between_what_stays_evict_nothing() -> None:
    store = arena_store(12)
    for name in range(6):
        store.put("b", item(name))
        store.put("", item(name))
    assert not store.put("", item(6, 2)), "no two rows of its own lie side by side"
    assert len(store) == 12
    store.put("c", item(6))
    assert store.counters.evicted_for_others == 1
    store.check_integrity()
    store.close()


def test_many_small_rows_are_no_way_around_a_share() -> None:
    """Places in the control page run out long before bytes do."""
    store = arena_store(64, max_slots=8)
    for name in range(20):
        assert store.put("noisy", item(name))
    for name in range(4):
        assert store.put("b", item(name))
    assert (len(names_in(store, "noisy")), len(names_in(store, "b"))) == (4, 4)
    for name in range(20, 40):
        assert store.put("noisy", item(name))
    assert len(names_in(store, "b")) == 4
    store.check_integrity()
    store.close()


def test_rows_under_way_count_against_a_share() -> None:
    store = arena_store(12)
    for name in range(6):
        store.put("b", item(name))
    writings = [store.begin_put("", item(name)) for name in range(6)]
    assert store.begin_put("", item(6)) is None, "its share is being written to"
    assert store.shares.num_bytes("") == 6 * ROW_BYTES
    assert store.shares.namespaces() == {"b"}
    for writing in writings[:3]:
        assert writing is not None
        store.finish_put(writing)
    for writing in writings[3:]:
        assert writing is not None
        store.cancel_put(writing)
    assert store.shares.num_bytes("") == 3 * ROW_BYTES
    store.check_integrity()
    store.close()


def test_the_same_key_again_that_finds_no_room_leaves_what_is_there() -> None:
    store = EmbeddingStore(4 * entry_bytes(item(0)))
    first = item(0)
    store.put("", first)
    for name in range(2):
        store.put("b", item(name))
    assert not store.put("", item(0, 5))
    assert store.peek("", key_of(0)) is first
    assert store.put("", item(0, 2))
    store.check_integrity()


@pytest.mark.parametrize("weight", [0.0, -1.0, 1001.0, float("nan"), float("inf")])
def test_a_weight_without_a_meaning_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="'a' has the weight"):
        FairShares(1, {"a": weight})


def test_a_search_looks_at_victims_and_not_at_every_entry() -> None:
    shares = FairShares(10_000)
    for name in range(100):
        for namespace in range(90):
            shares.keep(f"n{namespace}", key_of(name), 1)
    for name in range(1000):
        shares.keep("above", key_of(name), 1)
    looked_at: list[Name] = []

    def is_evictable(name: Name) -> bool:
        looked_at.append(name)
        return True

    found = list(itertools.islice(shares.victims("new", 20, is_evictable), 20))
    assert found == [("above", key_of(name)) for name in range(20)]
    assert len(looked_at) <= 21 + 90, "one ahead in each namespace above its share"


# Whatever happens


class Sharing(RuleBasedStateMachine):
    """Puts, reads and holders of four namespaces. Rows of one size in the arena, so that what is free is in
    one piece and every refusal is for want of bytes."""

    sizes: tuple[int, ...] = (1,)

    def __init__(self) -> None:
        super().__init__()
        self.store = self.new_store()
        self.held: list[tuple[Name, Held]] = []
        self.order: dict[Name, int] = {}
        self.num_uses = 0

    def new_store(self) -> ArenaStore | EmbeddingStore:
        return arena_store(12, weights=WEIGHTS)

    def cost(self, name: Name) -> int:
        assert isinstance(self.store, ArenaStore)
        return self.store._entries[name].slot.num_bytes

    def cost_of(self, new: EncodedItem) -> int:
        return new.spec.num_bytes

    def free_bytes(self) -> int:
        assert isinstance(self.store, ArenaStore)
        return self.store.arena.free_bytes

    def going(self, namespace: str) -> list[Name]:
        """A namespace's evictable entries in the order of ``use_order``, which is another test's."""
        evictable, entries = self.evictable(), self.store.shares._members[namespace].entries
        return [(namespace, key) for key, _, _ in entries.going(lambda key: (namespace, key) in evictable)]

    def evictable(self) -> set[Name]:
        held = {name for name, _ in self.held}
        return set(self.store._entries) - held

    @rule(namespace=st.sampled_from(NAMESPACES), name=st.integers(0, 20), data=st.data())
    def put(self, namespace: str, name: int, data: st.DataObject) -> None:
        new = item(name, data.draw(st.sampled_from(self.sizes)))
        full_name = (namespace, new.key)
        if full_name in self.store._entries:
            return  # replacing is another test's
        before = {each: self.cost(each) for each in self.store._entries}
        used = self.bytes_of(before)
        free, evictable, counters = self.free_bytes(), self.evictable(), vars(self.store.counters).copy()
        going = {each: self.going(each) for each in used}
        kept = self.store.put(namespace, new)
        gone = [each for each in before if each not in self.store._entries]
        self.check_victims(namespace, self.cost_of(new), before, used, free, evictable, going, gone, kept)
        found = vars(self.store.counters)
        assert found["evictions"] - counters["evictions"] == len(gone)
        foreign = sum(each[0] != namespace for each in gone)
        assert found["evicted_for_others"] - counters["evicted_for_others"] == foreign
        for each in gone:
            del self.order[each]
        if kept:
            self.touch(full_name)

    def check_victims(
        self,
        namespace: str,
        cost: int,
        before: dict[Name, int],
        used: Counter[str],
        free: int,
        evictable: set[Name],
        going: dict[str, list[Name]],
        gone: list[Name],
        kept: bool,
    ) -> None:
        weights = {each: WEIGHTS.get(each, 1.0) for each in {*used, namespace}}
        share = {
            each: self.store.shares.capacity_bytes * weight / sum(weights.values())
            for each, weight in weights.items()
        }
        left = used - self.bytes_of({each: before[each] for each in gone})
        is_claim = left[namespace] + cost <= share[namespace]
        freed = sum(before[each] for each in gone)
        assert set(gone) <= evictable
        for other in {each for each, _ in gone} - {namespace}:
            assert used[other] > share[other]
            victims = [each for each in going[other] if each in gone]
            assert victims == going[other][: len(victims)], "they went in its order"
            if not is_claim:
                assert left[other] >= share[other], "only a claim reaches below a share"
            assert left[other] + before[victims[-1]] > share[other], "it was above until the last"
        if gone:
            assert kept, "in vain"
            assert free + freed >= cost
            if not self.may_scatter:
                assert free + freed - max(before[each] for each in gone) < cost, "more than it took"
        if not kept and evictable == set(before) and not self.may_scatter:
            assert used[namespace] + cost > share[namespace], "a share was claimed and not given"

    may_scatter = False

    def bytes_of(self, entries: dict[Name, int]) -> Counter[str]:
        found: Counter[str] = Counter()
        for (namespace, _), cost in entries.items():
            found[namespace] += cost
        return found

    def touch(self, name: Name) -> None:
        self.num_uses += 1
        self.order[name] = self.num_uses

    @rule(namespace=st.sampled_from(NAMESPACES), name=st.integers(0, 20))
    def get(self, namespace: str, name: int) -> None:
        found = self.store.get(namespace, key_of(name))
        assert (found is not None) == ((namespace, key_of(name)) in self.order)
        if found is not None:
            assert (found.rows == name).all()
            self.touch((namespace, key_of(name)))

    @invariant()
    def is_sound(self) -> None:
        self.store.check_integrity()
        assert set(self.order) == set(self.store._entries)
        assert self.store.num_bytes <= self.store.max_bytes
        for (_, key), held in self.held:
            assert (held.item.rows == int.from_bytes(key, "big")).all()

    def teardown(self) -> None:
        for _, held in self.held:
            held.drop()
        self.store.check_integrity()
        if isinstance(self.store, ArenaStore):
            self.store.close()


class SharingWithReaders(Sharing):
    @rule(namespace=st.sampled_from(NAMESPACES), name=st.integers(0, 20))
    def hold(self, namespace: str, name: int) -> None:
        held = self.store.hold(namespace, key_of(name))
        if held is not None:
            self.held.append(((namespace, key_of(name)), held))
            self.touch((namespace, key_of(name)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        _, held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        held.drop()


class SharingOfManySizes(SharingWithReaders):
    """With holes: a refusal may be for want of one large enough."""

    sizes = (1, 2, 3, 5)
    may_scatter = True


class SharingOwnMemory(Sharing):
    sizes = (1, 2, 3, 5, 13)

    def new_store(self) -> EmbeddingStore:
        return EmbeddingStore(12 * entry_bytes(item(0)), weights=WEIGHTS)

    def cost(self, name: Name) -> int:
        assert isinstance(self.store, EmbeddingStore)
        return entry_bytes(self.store._entries[name])

    def cost_of(self, new: EncodedItem) -> int:
        return entry_bytes(new)

    def free_bytes(self) -> int:
        return self.store.max_bytes - self.store.num_bytes


for _machine in (Sharing, SharingWithReaders, SharingOfManySizes, SharingOwnMemory):
    _machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestSharing = Sharing.TestCase
TestSharingWithReaders = SharingWithReaders.TestCase
TestSharingOfManySizes = SharingOfManySizes.TestCase
TestSharingOwnMemory = SharingOwnMemory.TestCase
