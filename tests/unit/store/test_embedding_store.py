"""The store: the tiers of rows, the order of eviction, copies ahead of it, and what is never lost."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
import torch

from encoder_service.errors import Draining, InternalError, StoreFull
from encoder_service.store import embedding_store
from encoder_service.store.embedding_store import EmbeddingStore, PinnedRows, Reservation
from encoder_service.store.tier import ANNOUNCED_PROTECTION_S, Tier
from encoder_service.types import ClipFacts, EncodedItem
from tests.reference_reader import reader_of
from tests.unit.store.arenas import (
    ITEM_BYTES,
    NUM_ROWS,
    Clock,
    announce,
    expected,
    hold,
    key_of,
    land,
    reserve,
    rows_of,
    settle,
    store_of,
)
from tests.unit.store.integrity import check_store

pytestmark = pytest.mark.anyio


def resident(store: EmbeddingStore, names: range, namespace: str = "") -> list[int]:
    return [name for name in names if store.peek(namespace, key_of(name)) is not None]


def on_device(store: EmbeddingStore, name: int) -> bool:
    tier = store.partition("").tier("device")
    return tier is not None and ("", key_of(name)) in tier


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def host_only(clock: Clock) -> AsyncIterator[EmbeddingStore]:
    """Room for four items."""
    store = store_of(4, clock=clock)
    yield store
    check_store(store)
    store.close()
    check_store(store)


@pytest.fixture
async def store(clock: Clock) -> AsyncIterator[EmbeddingStore]:
    """Room for four items on the device and sixteen on the host."""
    store = store_of(16, 4, clock=clock)
    yield store
    await settle(store)
    check_store(store)
    for _, arena in store.arenas():
        assert len(arena) == store.num_items(arena.kind), "something still holds rows"
    store.close()


# -- one tier --------------------------------------------------------------------------------------------


async def test_rows_are_found_as_they_were_written(host_only: EmbeddingStore) -> None:
    reservation = reserve(host_only, expected(1, clip=ClipFacts((0.5,))))
    assert host_only.peek("", key_of(1)) is None, "not before they are complete"
    reservation.destination.copy_(rows_of(1))
    held = host_only.commit(reservation)
    assert held.tier == "host"
    assert held.item.clip == ClipFacts((0.5,))
    found = hold(host_only, 1)
    assert torch.equal(found.item.rows, rows_of(1))
    assert host_only.hold("other", key_of(1)) is None, "a namespace sees its own entries only"
    for rows in (held, found):
        rows.drop()
        rows.drop()


async def test_the_least_recently_used_rows_are_evicted(host_only: EmbeddingStore) -> None:
    for name in range(4):
        land(host_only, name)
    hold(host_only, 0).drop()
    land(host_only, 4)
    assert resident(host_only, range(5)) == [0, 2, 3, 4]
    assert host_only.num_evictions == 1


async def test_held_rows_are_never_evicted(host_only: EmbeddingStore) -> None:
    for name in range(4):
        land(host_only, name)
    held = [hold(host_only, name) for name in range(4)]
    assert host_only.reserve("", expected(9)) is None
    assert (host_only.counters.refused, host_only.num_evictions) == (1, 0)
    held[2].drop()
    assert land(host_only, 9)
    assert resident(host_only, range(10)) == [0, 1, 3, 9]
    for rows in held:
        assert torch.equal(rows.item.rows[0, :1], rows.item.rows[-1, -1:])
        rows.drop()


async def test_p17_an_item_above_the_arena_is_refused_and_evicts_nothing(host_only: EmbeddingStore) -> None:
    for name in range(4):
        land(host_only, name)
    assert host_only.reserve("", expected(9, num_rows=17)) is None
    assert resident(host_only, range(4)) == [0, 1, 2, 3]
    assert host_only.num_bytes <= host_only.max_bytes


async def test_reservations_take_half_of_an_arena_together(host_only: EmbeddingStore) -> None:
    """A long queue does not evict everything; one item alone may be larger."""
    for name in range(4):
        land(host_only, name)
    first, second = reserve(host_only, expected(5)), reserve(host_only, expected(6))
    assert host_only.reserve("", expected(7)) is None
    host_only.cancel(first)
    host_only.cancel(second)
    assert land(host_only, 8, num_rows=16)


async def test_no_slot_is_used_again_after_a_device_fault(host_only: EmbeddingStore) -> None:
    land(host_only, 1)
    reservation = reserve(host_only, expected(2))
    host_only.abandon(reservation)
    ((_, arena),) = host_only.arenas()
    assert len(arena) == 2, "the slot stays taken"
    assert host_only.reserve("", expected(3)) is None
    held = hold(host_only, 1)
    assert torch.equal(held.item.rows, rows_of(1))
    held.drop()


async def test_rows_outlive_the_store_while_a_tensor_refers_to_them() -> None:
    store = store_of(4)
    land(store, 1)
    held = hold(store, 1)
    reservation = reserve(store, expected(2))
    store.close()
    with pytest.raises(Draining):
        store.commit(reservation)
    assert torch.equal(held.item.rows, rows_of(1))
    held.drop()
    del held
    gc.collect()


# -- announced rows --------------------------------------------------------------------------------------


async def test_p21_announced_rows_that_nobody_has_read_are_evicted_last(
    host_only: EmbeddingStore, clock: Clock
) -> None:
    for name in range(4):
        land(host_only, name)
    for name in (1, 0):
        announce(host_only, name)
        clock.now_s += 1
    assert host_only.num_unread() == 2
    land(host_only, 4, num_rows=8)
    assert resident(host_only, range(5)) == [0, 1, 4], "2 and 3 went, which were used before"
    land(host_only, 5, num_rows=8)
    assert resident(host_only, range(6)) == [0, 1, 5]
    assert host_only.num_unread_evictions == 0
    land(host_only, 6, num_rows=12)
    assert resident(host_only, range(7)) == [0, 6], "then the oldest announcement"
    assert host_only.num_unread_evictions == 1
    assert land(host_only, 7, num_rows=16), "residency never refuses a reservation"
    assert host_only.num_unread_evictions == 2


async def test_p21_a_read_ends_the_protection(host_only: EmbeddingStore) -> None:
    for name in range(4):
        land(host_only, name)
    location = announce(host_only, 0)
    host_only.touch("", key_of(0), location.generation + 2)
    host_only.touch("other", key_of(0), location.generation)
    assert host_only.num_unread() == 1, "another generation, another namespace"
    host_only.touch("", key_of(0), location.generation)
    assert host_only.num_unread() == 0
    land(host_only, 4)
    assert resident(host_only, range(5)) == [0, 2, 3, 4], "a read is a use"
    land(host_only, 5, num_rows=16)
    host_only.touch("", key_of(0), location.generation)
    assert host_only.num_unread_evictions == 0


async def test_p21_the_protection_ends_with_its_time(host_only: EmbeddingStore, clock: Clock) -> None:
    """A reader that died leaves nothing behind."""
    land(host_only, 0)
    announce(host_only, 0)
    for name in range(1, 4):
        land(host_only, name)
    clock.now_s += ANNOUNCED_PROTECTION_S
    land(host_only, 4)
    assert resident(host_only, range(5)) == [1, 2, 3, 4]
    assert host_only.num_unread_evictions == 0


async def test_a_location_names_the_rows(host_only: EmbeddingStore) -> None:
    land(host_only, 1)
    land(host_only, 2)
    held = hold(host_only, 2)
    location = held.announce()
    ((_, arena),) = host_only.arenas()
    assert (location.arena_id, location.instance, location.tier) == (arena.arena_id, arena.instance, "host")
    assert location.generation % 2 == 1
    with reader_of(arena) as reader:
        rows = reader.data[location.offset_bytes : location.offset_bytes + ITEM_BYTES]
    assert rows == rows_of(2).numpy().tobytes()
    held.drop()
    with pytest.raises(InternalError):
        PinnedRows(held.item).announce()
    with pytest.raises(InternalError):
        held.share()
    assert host_only.max_announced_bytes("host") == ITEM_BYTES
    assert host_only.max_announced_bytes("device") == 0


async def test_a_large_item_evicts_what_lies_in_its_place_alone() -> None:
    """Rows that were used in any order lie everywhere: evicting the oldest until some range is free would
    take nearly all."""
    store = store_of(40)
    for name in range(40):
        land(store, name)
    for name in random.sample(range(40), 40):
        hold(store, name).drop()
    land(store, 40, num_rows=5 * NUM_ROWS)
    # The last of them may join two ranges, each too small by itself.
    assert 5 <= 40 - len(resident(store, range(40))) <= 4 + 1 + 4
    check_store(store)
    store.close()


# -- two tiers -------------------------------------------------------------------------------------------


async def test_copies_ahead_of_evictions_begin_a_few_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is work on the event loop, and a large arena has tens of thousands of rows."""
    monkeypatch.setattr(embedding_store, "MAX_MOVES", 2)
    monkeypatch.setattr(embedding_store, "RECHECK_SHARE", 1 / 2)
    store = store_of(40, 40)
    begun: list[int] = []
    start = store._start_moves

    def noted(moves: Sequence[tuple[PinnedRows, Reservation]], tier: Tier) -> asyncio.Task[None]:
        begun.append(len(moves))
        return start(moves, tier)

    monkeypatch.setattr(store, "_start_moves", noted)
    for name in range(40):
        land(store, name)
    await settle(store)
    assert set(begun) == {2}
    assert sum(begun) == store.counters.copies_to_host == 10
    store.close()


async def test_the_engine_writes_to_the_device_and_else_to_the_host(store: EmbeddingStore) -> None:
    first = reserve(store, expected(1))
    second = reserve(store, expected(2, num_rows=32))
    for reservation, tier in ((first, "device"), (second, "host")):
        reservation.destination.fill_(1.0)
        held = store.commit(reservation)
        assert held.tier == tier
        held.drop()


async def test_rows_with_a_copy_on_the_host_are_evicted_first(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost while something can be evicted without a loss."""
    monkeypatch.setattr(embedding_store, "RECHECK_SHARE", 10.0)  # nothing is copied ahead
    for name in range(4):
        land(store, name)
    copied = await store.ensure_tier(hold(store, 3), "", "host")
    copied.drop()
    land(store, 4)
    assert not on_device(store, 3)
    assert resident(store, range(5)) == [0, 1, 2, 3, 4]


async def test_p21_announced_rows_on_the_device_are_evicted_after_rows_that_only_the_device_has(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_store, "RECHECK_SHARE", 10.0)  # nothing is copied ahead
    for name in range(4):
        land(store, name)
    for name in (0, 1):
        announce(store, name)
    (await store.ensure_tier(hold(store, 1), "", "host")).drop()
    for name in (2, 3):
        hold(store, name).drop()  # used later than 0 and 1
    land(store, 4, num_rows=8)
    assert [name for name in range(5) if on_device(store, name)] == [0, 1, 4]
    assert store.num_unread_evictions == 0


async def test_a_reader_without_a_gpu_gets_the_rows_on_the_host(store: EmbeddingStore) -> None:
    """One copy, for readers at once and later."""
    land(store, 1)
    found = await asyncio.gather(*(store.ensure_tier(hold(store, 1), "", "host") for _ in range(8)))
    found.append(await store.ensure_tier(hold(store, 1), "", "host"))
    assert store.counters.copies_to_host == 1
    for held in found:
        assert held.tier == "host"
        assert torch.equal(held.item.rows, rows_of(1))
        held.drop()


async def test_without_room_a_reader_on_the_host_gets_a_private_copy() -> None:
    store = store_of(1, 4, max_private_bytes=2 * ITEM_BYTES)
    for name in range(4):
        land(store, name)
    await settle(store)
    blocking = await store.ensure_tier(hold(store, 3), "", "host")
    assert blocking.tier == "host", "and the host arena is full"
    others = [0, 1, 2]
    first = await store.ensure_tier(hold(store, others[0]), "", "host")
    assert first.tier is None
    second = await store.ensure_tier(hold(store, others[1]), "", "host")
    with pytest.raises(StoreFull):
        await store.ensure_tier(hold(store, others[2]), "", "host")
    assert torch.equal(second.item.rows, rows_of(others[1]))
    held = hold(store, others[2])
    assert await store.ensure_tier(held, "", "device") is held
    del first, second
    third = await store.ensure_tier(held, "", "host")
    assert third.tier is None
    third.drop()
    blocking.drop()
    check_store(store)
    for _, arena in store.arenas():
        assert len(arena) == store.num_items(arena.kind), "a refused copy keeps no hold"
    store.close()


async def test_rows_of_their_own_are_kept_where_there_is_room(store: EmbeddingStore) -> None:
    item = EncodedItem(key_of(1), bytes(32), expected(1).grid, rows_of(1), 1)
    held = await store.insert("", item)
    assert held.tier == "device"
    assert torch.equal(held.item.rows, rows_of(1))
    held.drop()
    large = EncodedItem(key_of(2), bytes(32), expected(2).grid, rows_of(2, 80), 1)
    held = await store.insert("", large)
    assert held.tier is None
    assert held.item is large
    held.drop()


class HeldCopies:
    """From now on, copies of tensors wait on their thread for ``go_on``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.go_on, self.ended = (threading.Event() for _ in range(3))
        self.timed_out = False
        copy = torch.Tensor.copy_

        def held(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            self.started.set()
            self.timed_out = not self.go_on.wait(10)
            copy(target, source, non_blocking)
            self.ended.set()
            return target

        monkeypatch.setattr(torch.Tensor, "copy_", held)


async def test_a_cancelled_reader_holds_nothing_and_stops_nobody(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    land(store, 1)
    copies = HeldCopies(monkeypatch)
    leaving = asyncio.create_task(store.ensure_tier(hold(store, 1), "", "host"))
    staying = asyncio.create_task(store.ensure_tier(hold(store, 1), "", "host"))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    copies.go_on.set()
    held = await staying
    assert torch.equal(held.item.rows, rows_of(1))
    held.drop()


def fail_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(torch.Tensor, "copy_", fail)


async def test_after_a_failed_copy_neither_end_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = []

    def on_copy_error(error: Exception) -> bool:
        errors.append(error)
        return False

    store = store_of(16, 4, on_copy_error=on_copy_error)
    land(store, 1)
    fail_copies(monkeypatch)
    with pytest.raises(RuntimeError):
        await store.ensure_tier(hold(store, 1), "", "host")
    monkeypatch.undo()
    assert [str(error) for error in errors] == ["the device is gone"]
    (_, device), (_, host) = store.arenas()
    assert (len(device), len(host)) == (1, 1)
    (slot,) = device.slots()
    assert device.num_holders(slot) == 2, "the entry and the copy that may still read"
    monkeypatch.undo()
    assert land(store, 2), "the device has not failed"
    store.close()


async def test_p36_a_device_fault_in_a_copy_ends_the_use_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(16, 4, on_copy_error=lambda error: True)
    land(store, 1)
    land(store, 2)
    fail_copies(monkeypatch)
    with pytest.raises(RuntimeError):
        await store.ensure_tier(hold(store, 1), "", "host")
    assert store.reserve("", expected(3)) is None
    num_slots = [len(arena) for _, arena in store.arenas()]
    monkeypatch.undo()
    held = hold(store, 2)
    assert await store.ensure_tier(held, "", "device") is held
    with pytest.raises(Draining):
        await store.ensure_tier(held, "", "host")
    assert [len(arena) for _, arena in store.arenas()] == num_slots
    store.close()


async def test_a_reader_that_leaves_does_not_end_its_private_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy still reads the slot."""
    store = store_of(1, 4)
    for name in range(2):
        land(store, name)
    await settle(store)
    blocking = await store.ensure_tier(hold(store, 1), "", "host")
    copies = HeldCopies(monkeypatch)
    leaving = asyncio.create_task(store.ensure_tier(hold(store, 0), "", "host"))
    for _ in range(3):
        await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    (_, device), _ = store.arenas()
    assert sorted(map(device.num_holders, device.slots())) == [1, 2], "the entries, and the copy"
    copies.go_on.set()
    await settle(store)
    assert sorted(map(device.num_holders, device.slots())) == [1, 1]
    blocking.drop()
    store.close()


async def test_rows_that_cannot_be_copied_are_kept_as_they_are(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = EncodedItem(key_of(1), bytes(32), expected(1).grid, rows_of(1), 1)
    with monkeypatch.context() as patched:
        fail_copies(patched)
        held = await store.insert("", item)
    assert held.tier is None
    assert held.item is item
    (_, device), _ = store.arenas()
    for slot in device.slots():
        device.drop(slot)  # the copy may still write to it


def test_a_copy_that_hangs_does_not_hold_up_the_end_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def serve() -> tuple[EmbeddingStore, HeldCopies]:
        store = store_of(16, 4)
        land(store, 1)
        copies = HeldCopies(monkeypatch)
        asyncio.create_task(store.ensure_tier(hold(store, 1), "", "host"))  # noqa: RUF006
        await asyncio.to_thread(copies.started.wait, 5)
        return store, copies

    store, copies = asyncio.run(serve())
    assert not copies.timed_out
    copies.go_on.set()
    (_, device), (_, host) = store.arenas()
    assert (len(device), len(host)) == (1, 1), "both ends of the copy stay held"
    store.close()


async def test_close_waits_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(16, 64)
    for name in (1, 2):
        land(store, name)
    copies = HeldCopies(monkeypatch)
    reading = asyncio.create_task(store.ensure_tier(hold(store, 1), "", "host"))
    await asyncio.to_thread(copies.started.wait, 5)
    store.freeze()
    asyncio.get_running_loop().call_later(0.02, copies.go_on.set)
    await asyncio.to_thread(store.wait_for_copies)
    assert copies.ended.is_set()
    (await reading).drop()
    assert not land(store, 3), "nothing is reserved any more"
    with pytest.raises(Draining):
        await store.ensure_tier(hold(store, 2), "", "host")
    store.close()
