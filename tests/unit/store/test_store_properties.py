"""Random operations on a store of two tiers and an isolated namespace; invariants hold after each."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from encoder_service.store.arena import TierName
from encoder_service.store.embedding_store import PinnedRows, Reservation
from tests.reference_reader import reader_of
from tests.unit.store.arenas import Clock, expected, key_of, rows_of, settle, store_of
from tests.unit.store.integrity import check_store

NAMESPACES = ("", "b", "tenant")
NUM_ROWS = [1, 2, 4, 4, 7, 16, 40]
NUM_NAMES = 3 * len(NUM_ROWS)
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(3, 60))]


def content_of(name: int) -> torch.Tensor:
    return rows_of(name, NUM_ROWS[name % len(NUM_ROWS)])


@pytest.mark.anyio
@pytest.mark.parametrize("seed", SEEDS)
async def test_p14_p17_p18_p21_random_operations(seed: int) -> None:
    """Held rows never change. A namespace's arenas, and no others, list what the store has of it, with the
    right rows. Bytes and holds agree, and nothing stays held at the end."""
    chance, clock = random.Random(seed), Clock()
    store = store_of(32, 16, isolated=("tenant",), clock=clock, max_private_bytes=1 << 16)
    tiers_of_all = [tier for owner in ("", "tenant") for tier in store.partition(owner).tiers()]
    readers = [(tier, reader_of(tier.arena)) for tier in tiers_of_all]
    held: list[tuple[PinnedRows, int, str]] = []
    reserved: list[tuple[Reservation, int]] = []
    for _ in range(500):
        namespace, name = chance.choice(NAMESPACES), chance.randrange(NUM_NAMES)
        match chance.randrange(8):
            case 0 | 1:
                reservation = store.reserve(namespace, expected(name, NUM_ROWS[name % len(NUM_ROWS)]))
                if reservation is not None:
                    reservation.destination.copy_(content_of(name))
                    reserved.append((reservation, name))
            case 2 | 3 if reserved:
                reservation, written = reserved.pop(chance.randrange(len(reserved)))
                if chance.random() < 0.2:
                    store.cancel(reservation)
                else:
                    held.append((store.commit(reservation), written, reservation.namespace))
            case 4:
                rows = store.hold(namespace, key_of(name))
                if rows is not None:
                    held.append((rows, name, namespace))
            case 5 if held:
                held.pop(chance.randrange(len(held)))[0].drop()
            case 6 if held:
                rows, content, space = held.pop(chance.randrange(len(held)))
                tiers: tuple[TierName, ...] = ("host", "device")
                tier_name = chance.choice(tiers)
                rows = await store.ensure_tier(rows, space, tier_name)
                assert tier_name == "device" or rows.tier in ("host", None), "a device's rows for the host"
                held.append((rows, content, space))
            case 7 if held:
                rows, _, space = chance.choice(held)
                if rows.tier is not None:
                    location = rows.announce()
                    if chance.random() < 0.5:
                        store.touch(space, rows.item.key, location.generation)
                clock.now_s += chance.random() * 8
                await asyncio.sleep(0)
        while len(held) > 12:
            held.pop(0)[0].drop()
        check_store(store)
        for rows, content, _ in held:
            assert torch.equal(rows.item.rows, content_of(content))
        for tier, reader in readers:
            record = reader.find(namespace, key_of(name))
            assert (record is None) == (tier.find((namespace, key_of(name))) is None)
            if record is not None:
                assert tier in store.partition(namespace).tiers()
                assert reader.read(record) == content_of(name).numpy().tobytes()
    for rows, _, _ in held:
        rows.drop()
    for reservation, _ in reserved:
        store.cancel(reservation)
    await settle(store)
    check_store(store)
    counters = store.counters
    assert min(store.num_evictions, counters.copies_to_host) > 0
    assert counters.copies_to_device > 0 or seed > 2, "the first seeds copy to the device too"
    for tier, reader in readers:
        assert len(tier.arena) == len(tier)
        assert not reader.closed
    store.close()
    check_store(store)
    for _, reader in readers:
        assert reader.closed
        reader.__exit__(None, None, None)
