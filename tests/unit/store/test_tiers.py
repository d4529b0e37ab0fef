"""Two tiers: where rows are, what is spilled before its eviction, what comes back, what is never lost."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from encoder_service.errors import Draining, InternalError, StoreFull
from encoder_service.store import tiers
from encoder_service.store.embedding_store import Held
from encoder_service.store.mover import Mover
from encoder_service.store.tiers import TieredStore, tier_of
from encoder_service.types import EncodedItem, Grid
from tests.unit.store.device_like import DeviceLikeMemory, tiered

pytestmark = pytest.mark.anyio

ROW_BYTES = 1024
ITEM_BYTES = 4 * ROW_BYTES


def rows_of(name: int, num_rows: int = 4) -> torch.Tensor:
    return torch.full((num_rows, ROW_BYTES // 4), float(name))


def to_come(name: int, num_rows: int = 4) -> EncodedItem:
    """What is known before the rows are."""
    rows = torch.empty(num_rows, ROW_BYTES // 4, device="meta")
    return EncodedItem(key_of(name), bytes(32), Grid(1, 4, 4), rows, 1)


def key_of(name: int) -> bytes:
    return bytes([name]) * 32


def land(store: TieredStore, name: int, namespace: str = "", num_rows: int = 4) -> bool:
    """What the engine does; whether the device tier had room."""
    writing = store.reserve(namespace, to_come(name, num_rows))
    if writing is None:
        return False
    writing.target.copy_(rows_of(name, num_rows))
    store.finish_put(writing)
    return True


def held_of(store: TieredStore, name: int, namespace: str = "") -> Held:
    held = store.hold(namespace, key_of(name))
    assert held is not None
    return held


async def settle(store: TieredStore) -> None:
    """Until nothing is spilled or moved any more."""
    while pending := [*store._spilling.values(), *store._moves.values(), *store._unkept_copies.values()]:
        await asyncio.wait(pending)
        await asyncio.sleep(0)


@pytest.fixture
async def store() -> AsyncIterator[TieredStore]:
    """With room for four items on the device, and sixteen on the host."""
    store = tiered(4 * ITEM_BYTES, 16 * ITEM_BYTES)
    yield store
    await settle(store)
    store.check_integrity()
    for part in store.parts():
        assert len(part.arena) == len(part), "somebody still holds rows"
    store.close()


async def test_rows_are_found_where_the_engine_left_them(store: TieredStore) -> None:
    assert land(store, 1)
    held = held_of(store, 1)
    assert tier_of(held) == "device"
    assert torch.equal(held.item.rows, rows_of(1))
    assert held.item.key == key_of(1)
    found = store.get("", key_of(1))
    assert found is held.item
    assert store.peek("other", key_of(1)) is None
    held.drop()
    assert (store.counters.hits, store.counters.misses) == (2, 0)


async def test_a_reader_of_the_host_gets_the_rows_there(store: TieredStore) -> None:
    land(store, 1)
    held = await store.placed(held_of(store, 1), "", "host")
    assert tier_of(held) == "host"
    assert torch.equal(held.item.rows, rows_of(1))
    assert store.tier_counters.lowered == 1
    again = await store.placed(held_of(store, 1), "", "host")
    assert store.tier_counters.lowered == 1, "they are there already"
    assert again.slot is held.slot
    again.drop()
    held.drop()


async def test_what_is_about_to_go_is_on_the_host_by_then(store: TieredStore) -> None:
    for name in range(12):
        assert land(store, name)
        await settle(store)
    assert store.device.counters.evictions == 8
    for name in range(12):
        held = held_of(store, name)
        assert torch.equal(held.item.rows, rows_of(name))
        assert tier_of(held) == ("device" if name >= 8 else "host")
        held.drop()
    assert store.tier_counters.spilled >= 8


async def test_what_is_about_to_go_is_copied_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, one stream and one wait for several items; no more at a time than their share."""
    copy_all, batches = Mover._copy_all, list[int]()

    def counted(self: Mover, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        batches.append(len(pairs))
        copy_all(self, pairs)

    monkeypatch.setattr(Mover, "_copy_all", counted)
    monkeypatch.setattr(tiers, "LOOK_SHARE", 3 / 16)
    store = tiered(16 * ITEM_BYTES, 64 * ITEM_BYTES)
    for name in range(40):
        assert land(store, name)
        await settle(store)
    for name in range(40):
        held = held_of(store, name)
        assert torch.equal(held.item.rows, rows_of(name)), name
        held.drop()
    assert sum(batches) == store.tier_counters.spilled == store.tier_counters.lowered >= 24
    assert max(batches) == 3
    assert len(batches) <= sum(batches) / 2
    store.check_integrity()
    store.close()


async def test_a_reader_waits_for_the_batch_that_its_rows_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_all, started, may_copy = Mover._copy_all, threading.Event(), threading.Event()
    batches: list[int] = []

    def slow(self: Mover, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        batches.append(len(pairs))
        started.set()
        assert may_copy.wait(10)
        copy_all(self, pairs)

    monkeypatch.setattr(Mover, "_copy_all", slow)
    monkeypatch.setattr(tiers, "READY_SHARE", 1.0)
    monkeypatch.setattr(tiers, "LOOK_SHARE", 1.0)
    store = tiered(4 * ITEM_BYTES, 16 * ITEM_BYTES)
    for name in range(4):
        land(store, name)
    await asyncio.to_thread(started.wait, 10)
    readers = [asyncio.ensure_future(store.placed(held_of(store, name), "", "host")) for name in range(4)]
    await asyncio.sleep(0)
    may_copy.set()
    for name, held in enumerate(await asyncio.gather(*readers)):
        assert tier_of(held) == "host"
        assert torch.equal(held.item.rows, rows_of(name))
        held.drop()
    await settle(store)
    assert batches == [4]
    store.check_integrity()
    store.close()


async def test_nothing_is_spilled_while_there_is_room(store: TieredStore) -> None:
    for name in range(3):
        land(store, name)
        await settle(store)
    assert store.tier_counters.spilled == 0
    assert len(store.host) == 0


async def test_a_reader_on_a_gpu_gets_rows_back_from_the_host(store: TieredStore) -> None:
    for name in range(8):
        land(store, name)
        await settle(store)
    held = held_of(store, 0)
    assert tier_of(held) == "host"
    held = await store.placed(held, "", "device")
    assert tier_of(held) == "device"
    assert torch.equal(held.item.rows, rows_of(0))
    assert store.tier_counters.promoted == 1
    held.drop()


async def test_many_readers_move_rows_once(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy, num_copies = threading.Event(), 0
    copy = Mover._copy

    def slow(self: Mover, target: torch.Tensor, source: torch.Tensor) -> None:
        nonlocal num_copies
        num_copies += 1
        assert may_copy.wait(10)
        copy(self, target, source)

    monkeypatch.setattr(Mover, "_copy", slow)
    land(store, 1)
    readers = [asyncio.ensure_future(store.placed(held_of(store, 1), "", "host")) for _ in range(8)]
    await asyncio.sleep(0.01)
    left = readers.pop()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    may_copy.set()
    for held in await asyncio.gather(*readers):
        assert tier_of(held) == "host"
        held.drop()
    assert num_copies == 1
    # The reader that left holds on the device what it held before: its caller gives that up.
    (slot,) = store.device._shared.arena._holders
    assert store.device._shared.arena.num_holders(slot) == 2
    store.device._shared.arena.drop(slot)


async def test_p17_a_full_host_tier_gives_rows_of_their_own() -> None:
    store = tiered(4 * ITEM_BYTES, 2 * ITEM_BYTES)
    for name in range(3):
        land(store, name)
    kept = [await store.placed(held_of(store, name), "", "host") for name in range(2)]
    own = await store.placed(held_of(store, 2), "", "host")
    assert [tier_of(held) for held in (*kept, own)] == ["host", "host", None]
    assert torch.equal(own.item.rows, rows_of(2))
    assert own.item.rows.untyped_storage().nbytes() == ITEM_BYTES
    assert store.tier_counters.lowered_unkept == 1
    for held in (*kept, own):
        held.drop()
    store.check_integrity()
    store.close()


async def test_p17_a_device_tier_full_of_readers_takes_nothing(store: TieredStore) -> None:
    for name in range(4):
        land(store, name)
    readers = [held_of(store, name) for name in range(4)]
    assert not land(store, 4)
    assert store.tier_counters.unplaced == 1
    item = EncodedItem(key_of(4), bytes(32), Grid(1, 4, 4), rows_of(4), 1)
    writing = store.begin_put("", item)
    assert writing is not None
    writing.copy()
    store.finish_put(writing)
    held = held_of(store, 4)
    assert tier_of(held) == "host"
    assert await store.placed(held, "", "device") is held, "where it is, there is no room elsewhere"
    held.drop()
    for reader in readers:
        reader.drop()


async def test_p18_an_isolated_namespace_without_device_memory_stays_on_the_host() -> None:
    store = tiered(4 * ITEM_BYTES, 4 * ITEM_BYTES, isolated=("alone",))
    assert not land(store, 1, "alone")
    item = EncodedItem(key_of(1), bytes(32), Grid(1, 4, 4), rows_of(1), 1)
    writing = store.begin_put("alone", item)
    assert writing is not None
    writing.copy()
    store.finish_put(writing)
    held = await store.placed(held_of(store, 1, "alone"), "alone", "device")
    assert tier_of(held) == "host"
    assert store.peek("", key_of(1)) is None
    held.drop()
    store.check_integrity()
    store.close()


async def test_a_copy_that_fails_leaves_everything_where_it_was(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Mover, target: torch.Tensor, source: torch.Tensor) -> None:
        raise RuntimeError("no copy today")

    land(store, 1)
    monkeypatch.setattr(Mover, "_copy", fail)
    held = held_of(store, 1)
    with pytest.raises(RuntimeError, match="no copy today"):
        await store.placed(held, "", "host")
    assert torch.equal(held.item.rows, rows_of(1))
    held.drop()
    assert len(store.host) == 0
    for name in range(2, 9):  # the spiller's copies fail too, and nothing else does
        assert land(store, name)
        await settle(store)
    monkeypatch.undo()


async def test_room_that_was_reserved_in_vain_is_given_back(store: TieredStore) -> None:
    writing = store.reserve("", to_come(1, num_rows=16))
    assert writing is not None
    assert writing.target.shape == (16, ROW_BYTES // 4)
    assert store.peek("", key_of(1)) is None, "not before the rows are there"
    store.cancel_put(writing)
    assert store.reserve("", to_come(2, num_rows=20)) is None


async def test_random_work_loses_nothing_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is evicted, moved and given up meanwhile: what is found is right, and nothing is left."""
    monkeypatch.setattr(tiers, "LOOK_SHARE", 0.0)
    generator = random.Random()
    store = tiered(6 * ITEM_BYTES, 9 * ITEM_BYTES)
    readers: list[asyncio.Task[Any]] = []

    async def read(name: int) -> None:
        held = store.hold("", key_of(name))
        if held is None:
            return
        try:
            for _ in range(generator.randrange(3)):
                held = await store.placed(held, "", generator.choice(("device", "host")))
                assert torch.equal(held.item.rows, rows_of(name, len(held.item.rows)))
                await asyncio.sleep(generator.random() * 0.002)
            assert torch.equal(held.item.rows, rows_of(name, len(held.item.rows)))
        finally:
            held.drop()

    for _ in range(400):
        name = generator.randrange(30)
        match generator.randrange(4):
            case 0 if store.peek("", key_of(name)) is None:
                land(store, name, num_rows=generator.choice((1, 2, 4, 6)))
            case 1 if readers:
                readers.pop(generator.randrange(len(readers))).cancel()
            case _:
                readers.append(asyncio.ensure_future(read(name)))
        if generator.random() < 0.2:
            await asyncio.sleep(0)
    failures = [
        found
        for found in await asyncio.gather(*readers, return_exceptions=True)
        if isinstance(found, Exception)
    ]
    assert not failures
    await asyncio.sleep(0.01)
    await settle(store)
    store.check_integrity()
    assert store.tier_counters.lowered > 0
    for part in store.parts():
        assert len(part.arena) == len(part)
        assert all(part.arena.num_holders(slot) == 1 for slot in part.arena._holders)
    store.close()


async def test_close_waits_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    started, may_copy = threading.Event(), threading.Event()

    def slow(self: Mover, target: torch.Tensor, source: torch.Tensor) -> None:
        started.set()
        assert may_copy.wait(10)
        target.copy_(source)

    monkeypatch.setattr(Mover, "_copy", slow)
    store = tiered(4 * ITEM_BYTES, 4 * ITEM_BYTES)
    land(store, 1)
    held = held_of(store, 1)
    moving = asyncio.ensure_future(store.placed(held, "", "host"))
    await asyncio.to_thread(started.wait, 10)
    later = threading.Timer(0.02, may_copy.set)
    later.start()
    store.close()
    assert may_copy.is_set(), "nothing is unmapped under a copy"
    with pytest.raises(Draining):
        await moving
    held.drop()
    store.close()
    later.join()


async def test_rows_that_a_reader_keeps_do_not_stand_for_what_goes_next() -> None:
    """What is held is not evicted: what goes in its place is on the host by then."""
    store = tiered(8 * ITEM_BYTES, 32 * ITEM_BYTES)
    for name in range(3):
        land(store, name)
    kept = [held_of(store, name) for name in range(3)]
    for name in range(3, 20):
        assert land(store, name)
        await settle(store)
    assert store.device.counters.evictions > 0
    for name in range(20):
        assert store.peek("", key_of(name)) is not None, f"{name} is lost"
    for held in kept:
        held.drop()
    store.close()


async def test_a_small_host_tier_is_not_copied_to_over_and_over() -> None:
    store = tiered(16 * ITEM_BYTES, 2 * ITEM_BYTES)
    num_items = 64
    for name in range(num_items):
        assert land(store, name)
        await settle(store)
    assert 0 < store.tier_counters.spilled <= num_items
    store.check_integrity()
    store.close()


async def test_rows_read_on_the_host_again_and_again_stay_there() -> None:
    store = tiered(4 * ITEM_BYTES, 2 * ITEM_BYTES)
    for name in range(3):
        land(store, name)
    for name in (0, 1, 0, 2):
        (await store.placed(held_of(store, name), "", "host")).drop()
    assert store.host.peek("", key_of(0)) is not None
    assert store.host.peek("", key_of(1)) is None, "the least recently used one makes room"
    store.close()


async def test_p17_readers_share_a_copy_that_no_tier_keeps() -> None:
    store = tiered(4 * ITEM_BYTES, ITEM_BYTES)
    for name in range(2):
        land(store, name)
    blocker = await store.placed(held_of(store, 0), "", "host")
    readers = await asyncio.gather(*(store.placed(held_of(store, 1), "", "host") for _ in range(8)))
    readers.append(await store.placed(held_of(store, 1), "", "host"))
    assert len({held.item.rows.data_ptr() for held in readers}) == 1
    assert tier_of(readers[0]) is None
    assert torch.equal(readers[0].item.rows, rows_of(1))
    assert store.tier_counters.lowered_unkept == 1
    for held in (*readers, blocker):
        held.drop()
    store.check_integrity()
    store.close()


async def test_p17_copies_that_no_tier_keeps_are_bounded() -> None:
    store = tiered(6 * ITEM_BYTES, ITEM_BYTES, max_unkept_bytes=2 * ITEM_BYTES)
    for name in range(5):
        land(store, name)
    blocker = await store.placed(held_of(store, 0), "", "host")
    held = [held_of(store, name) for name in range(1, 5)]
    found = await asyncio.gather(*(store.placed(each, "", "host") for each in held), return_exceptions=True)
    refused = [each for each in found if isinstance(each, StoreFull)]
    assert len(refused) == 2
    for error in refused:
        for number in (2 * ITEM_BYTES, ITEM_BYTES):
            assert str(number) in str(error)
    del found
    await asyncio.sleep(0)  # until then the loop has them, for the step that it is in
    again = await store.placed(held[3], "", "host")  # nobody reads the others any more
    assert torch.equal(again.item.rows, rows_of(4))
    for each in (*held, blocker):
        each.drop()
    store.check_integrity()
    store.close()


async def test_a_copy_that_failed_is_never_taken_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Mover, target: torch.Tensor, source: torch.Tensor) -> None:
        raise RuntimeError("no copy today")

    store = tiered(4 * ITEM_BYTES, ITEM_BYTES)
    for name in range(2):
        land(store, name)
    blocker = await store.placed(held_of(store, 0), "", "host")
    held = held_of(store, 1)
    monkeypatch.setattr(Mover, "_copy", fail)
    with pytest.raises(RuntimeError, match="no copy today"):
        await store.placed(held, "", "host")
    monkeypatch.undo()
    found = await store.placed(held, "", "host")
    assert torch.equal(found.item.rows, rows_of(1))
    found.drop()
    blocker.drop()
    store.close()


async def test_rows_that_cannot_be_promoted_are_read_where_they_are(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Mover, target: torch.Tensor, source: torch.Tensor) -> None:
        raise RuntimeError("no copy today")

    for name in range(8):
        land(store, name)
        await settle(store)
    told: list[Exception] = []
    store.on_copy_error = told.append
    monkeypatch.setattr(Mover, "_copy", fail)
    held = held_of(store, 0)
    assert await store.placed(held, "", "device") is held
    assert torch.equal(held.item.rows, rows_of(0))
    assert [str(error) for error in told] == ["no copy today"]
    held.drop()
    monkeypatch.undo()


async def test_a_failure_whose_readers_left_is_not_reported_as_lost(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_copy, lost = threading.Event(), []

    def fail(self: Mover, target: torch.Tensor, source: torch.Tensor) -> None:
        assert may_copy.wait(10)
        raise RuntimeError("no copy today")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    monkeypatch.setattr(Mover, "_copy", fail)
    land(store, 1)
    held = held_of(store, 1)
    reader = asyncio.ensure_future(store.placed(held, "", "host"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    may_copy.set()
    await settle(store)
    held.drop()
    gc.collect()
    assert not lost
    monkeypatch.undo()


async def test_a_copy_is_waited_for_however_often_it_is_cancelled() -> None:
    """Until it has ended, what it writes may not go to anybody else."""
    mover, started, may_copy, ended = Mover(), threading.Event(), threading.Event(), threading.Event()

    def slow(target: torch.Tensor, source: torch.Tensor) -> None:
        started.set()
        assert may_copy.wait(10)
        target.copy_(source)
        ended.set()

    mover._copy = slow  # type: ignore[method-assign]
    copying = asyncio.ensure_future(mover.copy([(torch.zeros(4), torch.ones(4))]))
    await asyncio.to_thread(started.wait, 10)
    for _ in range(3):
        copying.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not copying.done()
    may_copy.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert ended.is_set()
    mover.close()


async def test_figures_of_two_tiers_say_what_became_of_items() -> None:
    store = tiered(2 * ITEM_BYTES, 8 * ITEM_BYTES, isolated=("alone",))
    assert not land(store, 1, "alone")
    assert store.tier_counters.unplaced == 0, "there is no device tier for it to lack room"
    for name in range(2):
        land(store, name)
    held = [held_of(store, name) for name in range(2)]
    assert not land(store, 2)
    item = EncodedItem(key_of(2), bytes(32), Grid(1, 4, 4), rows_of(2), 1)
    writing = store.begin_put("", item)
    assert writing is not None
    writing.copy()
    store.finish_put(writing)
    assert (store.tier_counters.unplaced, store.counters.refused) == (1, 0), "it is kept"
    large = EncodedItem(key_of(3), bytes(32), Grid(1, 4, 4), rows_of(3, num_rows=64), 1)
    assert store.reserve("", large) is None
    assert store.begin_put("", large) is None
    assert store.counters.refused == 1
    for each in held:
        each.drop()
    store.close()


async def test_spills_of_several_arenas_at_once_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "READY_SHARE", 1.0)
    store = tiered(4 * ITEM_BYTES, 16 * ITEM_BYTES, isolated=("alone",), isolated_on_device=True)
    for name in range(4):
        land(store, name)
        land(store, name, "alone")
    await settle(store)
    assert store.tier_counters.spilled == len(store.host)
    assert store.tier_counters.spilled >= 4
    store.check_integrity()
    store.close()


async def test_p36_a_device_that_failed_does_not_keep_the_rest_from_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: DeviceLikeMemory) -> None:
        raise RuntimeError("the device failed")

    store = tiered(4 * ITEM_BYTES, 4 * ITEM_BYTES, isolated=("alone",), isolated_on_device=True)
    monkeypatch.setattr(DeviceLikeMemory, "synchronize", fail)
    store.close()
    assert all(part.arena.closed for part in store.parts())
    for part in store.parts():
        with pytest.raises(InternalError, match="closed"):
            part.arena.export_fd()
