"""The store: byte bound, order, ownership, namespaces."""

from __future__ import annotations

import gc
import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.store.embedding_store import ENTRY_OVERHEAD_BYTES, EmbeddingStore, entry_bytes
from encoder_service.types import EncodedItem, Grid


def item(name: int, num_rows: int = 4) -> EncodedItem:
    return EncodedItem(
        bytes([name]) * 32, bytes(32), Grid(1, 4, 4), torch.full((num_rows, 8), float(name)), 1
    )


def test_least_recently_used_goes_first() -> None:
    store = EmbeddingStore(3 * entry_bytes(item(0)))
    for name in range(3):
        assert store.put("", item(name))
    assert store.get("", item(0).key) is not None
    store.put("", item(3))
    assert [store.peek("", item(name).key) is not None for name in range(4)] == [True, False, True, True]
    assert store.counters.evictions == 1
    store.check_integrity()


def test_an_item_above_the_bound_is_not_kept_and_evicts_nothing() -> None:
    store = EmbeddingStore(entry_bytes(item(0)))
    store.put("", item(0))
    assert not store.put("", item(1, num_rows=64))
    assert store.peek("", item(0).key) is not None
    assert store.counters.refused == 1


def test_p14_eviction_returns_the_memory() -> None:
    store = EmbeddingStore(entry_bytes(item(0)))
    first = item(0)
    watch = weakref.ref(first.rows)
    store.put("", first)
    del first
    store.put("", item(1))
    gc.collect()
    assert watch() is None


def test_p18_a_namespace_never_sees_anothers_entries() -> None:
    store = EmbeddingStore(1 << 20)
    store.put("a", item(0))
    assert store.get("b", item(0).key) is None
    assert store.get("a", item(0).key) is not None


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans()), max_size=60))
def test_p17_the_byte_bound_holds_after_every_operation(steps: list[tuple[int, int, bool]]) -> None:
    store = EmbeddingStore(6 * (1024 + ENTRY_OVERHEAD_BYTES))
    for name, num_rows, is_get in steps:
        if is_get:
            store.get("", bytes([name]) * 32)
        else:
            store.put("", item(name, num_rows))
        store.check_integrity()
