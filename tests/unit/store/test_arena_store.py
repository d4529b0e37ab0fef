"""The store in shared memory: slots, holders, what is evicted and what is refused, isolated namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.errors import ConfigurationError
from encoder_service.store import partitions
from encoder_service.store.arena import PROBE_BYTES, Arena
from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.embedding_store import EmbeddingStore, Held, RowStore
from encoder_service.store.host_memory import HostMemory
from encoder_service.store.partitions import PartitionedStore, open_host_partitions
from encoder_service.types import EncodedItem, Grid

ROW_BYTES = 1024  # of one row: four slots of the allocator's least


def item(name: int, num_rows: int = 4) -> EncodedItem:
    rows = torch.full((num_rows, ROW_BYTES // 4), float(name))
    return EncodedItem(key_of(name), bytes(32), Grid(1, 4, 4), rows, 1)


def key_of(name: int) -> bytes:
    return bytes([name]) * 32


def store_of(num_rows: int, max_slots: int = 64) -> ArenaStore:
    """With room for exactly this many rows; HostMemory rounds up to pages, the probe is one."""
    assert num_rows % 4 == 0
    return ArenaStore(Arena(HostMemory(PROBE_BYTES + num_rows * ROW_BYTES), max_slots=max_slots))


@pytest.fixture
def store() -> Iterator[ArenaStore]:
    store = store_of(16)
    yield store
    store.check_integrity()
    store.close()


def held_of(store: RowStore, name: int, namespace: str = "") -> Held:
    held = store.hold(namespace, key_of(name))
    assert held is not None
    return held


def test_rows_are_in_the_arena_and_equal(store: ArenaStore) -> None:
    assert store.put("", item(3))
    held = held_of(store, 3)
    assert torch.equal(held.item.rows, item(3).rows)
    assert held.slot is not None
    in_arena = store.arena.view(held.slot, (4, ROW_BYTES // 4), torch.float32)
    assert in_arena.data_ptr() == held.item.rows.data_ptr()
    assert store.arena.published(held.slot)
    held.drop()


def test_least_recently_used_goes_first(store: ArenaStore) -> None:
    for name in range(4):
        assert store.put("", item(name))
    assert store.get("", key_of(0)) is not None
    assert store.put("", item(4))
    assert [store.peek("", key_of(name)) is not None for name in range(5)] == [True, False, True, True, True]
    assert (store.counters.hits, store.counters.misses, store.counters.evictions) == (1, 0, 1)


def test_held_rows_are_not_evicted(store: ArenaStore) -> None:
    for name in range(4):
        store.put("", item(name))
    held = held_of(store, 0)
    for name in range(4, 10):
        assert store.put("", item(name))
        assert torch.equal(held.item.rows, item(0).rows)
    assert store.peek("", key_of(0)) is held.item
    held.drop()
    held.drop()
    assert store.arena.num_holders(store._entries["", key_of(0)].slot) == 1


def test_p17_what_readers_hold_is_full_and_evicts_nothing(store: ArenaStore) -> None:
    holders = []
    for name in range(3):
        store.put("", item(name))
        holders.append(held_of(store, name))
    store.put("", item(3))
    assert not store.put("", item(4, num_rows=8)), "12 of 16 rows are held"
    assert len(store) == 4
    assert (store.counters.refused, store.counters.evictions) == (1, 0)
    holders[0].drop()
    assert store.put("", item(4, num_rows=4))
    for held in holders:
        held.drop()


def test_an_item_above_the_arena_is_refused_and_evicts_nothing(store: ArenaStore) -> None:
    store.put("", item(0))
    assert not store.put("", item(1, num_rows=20))
    assert (len(store), store.counters.refused) == (1, 1)


def test_scattered_room_is_made_whole(store: ArenaStore) -> None:
    """Eight free rows in two holes: one more entry goes, so that twelve lie together or nothing does."""
    for name in range(4):
        store.put("", item(name))
    held = held_of(store, 2)
    assert store.put("", item(5, num_rows=8)), "rows 0 and 1 give eight together"
    assert not store.put("", item(6, num_rows=12)), "the held entry lies between"
    held.drop()
    assert store.put("", item(6, num_rows=16))
    assert len(store) == 1


def test_places_in_the_control_page_are_made_too() -> None:
    store = store_of(64, max_slots=2)
    for name in range(5):
        assert store.put("", item(name, num_rows=1))
    assert len(store) == 2
    store.check_integrity()
    store.close()


def test_the_same_key_again_takes_its_own_place(store: ArenaStore) -> None:
    store.put("", item(0))
    held = held_of(store, 0)
    store.put("", item(0, num_rows=2))
    assert len(store) == 1
    assert held.item.spec.num_rows == 4
    assert store.num_bytes == 2 * ROW_BYTES
    held.drop()
    assert len(store.arena) == 1


def test_p14_an_eviction_frees_the_slot(store: ArenaStore) -> None:
    free_bytes = store.arena.free_bytes
    store.put("", item(0, num_rows=16))
    slot = store._entries["", key_of(0)].slot
    generation = store.arena.generation(slot)
    store.put("", item(1))
    assert store.arena.num_holders(slot) == 0
    assert store.arena.page.generation(slot.index) > generation
    assert store.arena.free_bytes == free_bytes - 4 * ROW_BYTES


def test_rows_are_not_found_before_they_are_there(store: ArenaStore) -> None:
    writing = store.begin_put("", item(0))
    assert writing is not None
    assert store.peek("", key_of(0)) is None
    assert not store.arena.published(writing.slot)
    writing.copy()
    store.finish_put(writing)
    assert store.peek("", key_of(0)) is not None


def test_a_copy_that_failed_gives_its_slot_back(store: ArenaStore) -> None:
    writing = store.begin_put("", item(0))
    assert writing is not None
    store.cancel_put(writing)
    assert len(store.arena) == len(store) == 0


def test_a_slot_that_is_written_to_is_not_evicted(store: ArenaStore) -> None:
    writing = store.begin_put("", item(0, num_rows=16))
    assert writing is not None
    assert not store.put("", item(1))
    store.finish_put(writing)
    assert store.put("", item(1))


def test_rows_that_arrive_after_the_end_are_given_up(store: ArenaStore) -> None:
    writing = store.begin_put("", item(0))
    assert writing is not None
    store.close()
    writing.copy()
    store.finish_put(writing)
    assert len(store) == 0


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "hold", "drop", "get"]), st.integers(0, 7), st.integers(1, 9)),
        max_size=80,
    )
)
def test_p21_no_row_changes_while_it_is_held(steps: list[tuple[str, int, int]]) -> None:
    store = store_of(16, max_slots=8)
    held: list[tuple[int, Held]] = []
    for what, name, number in steps:
        if what == "put":
            store.put("", item(name, number))
        elif what == "get":
            store.get("", key_of(name))
        elif what == "hold" and (found := store.hold("", key_of(name))) is not None:
            held.append((name, found))
        elif what == "drop" and held:
            held.pop(number % len(held))[1].drop()
        store.check_integrity()
        for of, each in held:
            assert (each.item.rows == of).all()
    for _, each in held:
        each.drop()
    store.check_integrity()
    store.close()


# Partitions


def test_p18_an_isolated_namespace_has_an_arena_of_its_own() -> None:
    store = open_host_partitions(1 << 16, {"a": 1 << 16, "b": 1 << 16})
    for namespace in ("", "other", "a", "b"):
        writing = store.begin_put(namespace, item(1))
        assert writing is not None
        writing.copy()
        store.finish_put(writing)
    arenas = {name: held_of(store, 1, name).arena for name in ("", "other", "a", "b")}
    assert arenas[""] is arenas["other"]
    assert len(set(map(id, arenas.values()))) == 3
    assert store.get("c", key_of(1)) is None
    assert len(store) == 4
    assert (store.counters.hits, store.counters.misses) == (4, 1)
    assert store.num_bytes == 16 * ROW_BYTES
    store.check_integrity()
    store.close()
    assert all(part.arena.closed for part in store.parts())


def test_an_isolated_item_in_the_shared_arena_is_noticed() -> None:
    shared, own = store_of(16), store_of(16)
    store = PartitionedStore(shared, {"a": own})
    shared.put("a", item(0))
    with pytest.raises(AssertionError, match="'a' lie in the arena of None"):
        store.check_integrity()
    store.close()


def test_arenas_that_were_opened_are_closed_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Arena] = []
    make: Callable[[int], Arena] = partitions.host_arena

    def fail_at_the_second(num_bytes: int) -> Arena:
        if opened:
            raise ConfigurationError("no memory")
        opened.append(make(num_bytes))
        return opened[0]

    monkeypatch.setattr(partitions, "host_arena", fail_at_the_second)
    with pytest.raises(ConfigurationError, match="no memory"):
        open_host_partitions(1 << 16, {"a": 1 << 16})
    assert opened[0].closed


# What both stores offer


def test_a_store_without_an_arena_holds_by_reference() -> None:
    store = EmbeddingStore(1 << 20)
    given = item(0)
    assert store.begin_put("", given) is None
    held = store.hold("", key_of(0))
    assert held is not None
    assert held.item is given
    assert (held.arena, held.slot) == (None, None)
    held.drop()
    assert store.hold("", key_of(1)) is None
    assert store.hold("", key_of(0), is_lookup=False) is not None
    assert (store.counters.hits, store.counters.misses) == (1, 1)
