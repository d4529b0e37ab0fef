"""Rows asked for in one kind of memory: found there or not at all, and what the store counts of it."""

from __future__ import annotations

import pytest
import torch

from encoder_service.store.partitions import open_host_partitions
from encoder_service.store.tiers import tier_of
from encoder_service.types import EncodedItem, Grid
from tests.unit.store.device_like import tiered

KEY = b"k" * 32


def item() -> EncodedItem:
    return EncodedItem(KEY, bytes(32), Grid(1, 4, 4), torch.randn(4, 256), 1)


@pytest.mark.anyio
async def test_each_tier_gives_what_it_has_itself() -> None:
    store = tiered(1 << 16, 1 << 16)
    found = item()
    writing = store.reserve("", found)
    assert writing is not None
    writing.copy()
    store.finish_put(writing)
    assert store.hold_in("host", "", KEY) is None
    assert store.hold_in("device", "other", KEY) is None
    held = store.hold_in("device", "", KEY)
    assert held is not None
    assert tier_of(held) == "device"
    assert (store.counters.hits, store.counters.misses) == (1, 0), "whoever finds nothing asks again"
    on_host = await store.placed(held, "", "host")
    again = store.hold_in("host", "", KEY)
    assert again is not None
    assert again.slot is on_host.slot
    assert torch.equal(again.item.rows, found.rows)
    on_host.drop()
    again.drop()
    store.check_integrity()
    store.close()


def test_a_store_of_one_kind_of_memory_has_nothing_in_another() -> None:
    store = open_host_partitions(1 << 16, {"alone": 1 << 16})
    for namespace in ("", "alone"):
        assert store.hold_in("host", namespace, KEY) is None
        writing = store.begin_put(namespace, item())
        assert writing is not None
        writing.copy()
        store.finish_put(writing)
        assert store.hold_in("device", namespace, KEY) is None
        held = store.hold_in("host", namespace, KEY)
        assert held is not None
        held.drop()
    assert (store.counters.hits, store.counters.misses) == (2, 0)
    store.check_integrity()
    store.close()
