"""The pipeline where the engine writes rows into the device arena: who holds the room, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from encoder_service.errors import Cancelled, DeadlineExceeded, DeviceFault, InternalError
from encoder_service.store.embedding_store import Writing
from encoder_service.store.mover import Mover
from encoder_service.store.tiers import TieredStore, tier_of
from encoder_service.types import CacheTier
from tests.unit.service.test_pipeline import Rig, end, image, until
from tests.unit.service.test_pipeline_arena import rows_alone
from tests.unit.store.device_like import tiered

pytestmark = pytest.mark.anyio

# What ``image`` with side 16 gives: 64 rows of 16 float32.
ITEM_BYTES = 4096


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """With room for two items on the device and four on the host."""
    store = tiered(2 * ITEM_BYTES, 4 * ITEM_BYTES)
    rig = Rig(store)
    yield rig
    await end(rig)
    while pending := [*store._spilling.values(), *store._moves.values()]:
        await asyncio.wait(pending)
    store.check_integrity()
    for part in store.parts():
        assert len(part.arena) == len(part), "somebody kept rows or room"
        assert all(part.arena.num_holders(slot) == 1 for slot in part.arena._holders)
    store.close()


def is_running(rig: Rig) -> bool:
    """Whether the tower has an item."""
    return bool(rig.engine._planned)


def store_of(rig: Rig) -> TieredStore:
    store = rig.pipeline.store
    assert isinstance(store, TieredStore)
    return store


async def test_the_engine_writes_rows_into_their_slot(rig: Rig) -> None:
    callers = [asyncio.ensure_future(rig.pipeline.encode(image(1, side=16))) for _ in range(5)]
    results = [*(await asyncio.gather(*callers)), await rig.pipeline.encode(image(1, side=16))]
    assert {result.tier for result in results} == {CacheTier.MISS, CacheTier.IN_FLIGHT, CacheTier.DEVICE}
    assert len({result.held.slot for result in results if result.held is not None}) == 1
    assert all(result.held is not None and tier_of(result.held) == "device" for result in results)
    assert torch.equal(results[0].encoded.rows, await rows_alone(1))
    assert len(store_of(rig).host) == 0
    for result in results:
        result.release()


async def test_readers_without_a_gpu_get_the_same_rows_on_the_host(rig: Rig) -> None:
    delivered = await rig.pipeline.encode(image(1, side=16))
    lowered = await rig.pipeline.placed(delivered, "", "host")
    assert lowered.held is not None
    assert tier_of(lowered.held) == "host"
    assert lowered.encoded.rows.data_ptr() == lowered.held.item.rows.data_ptr()
    assert torch.equal(lowered.encoded.rows, await rows_alone(1))
    assert lowered.tier is CacheTier.MISS
    lowered.release()


async def test_rows_are_right_beyond_what_the_device_holds(rig: Rig) -> None:
    expected = {value: await rows_alone(value) for value in range(1, 9)}
    held = []
    for value in range(1, 9):
        delivered = await rig.pipeline.encode(image(value, side=16))
        assert torch.equal(delivered.encoded.rows, expected[value])
        if value <= 2:  # fills the device tier with readers: the others' rows come through the host
            held.append(delivered)
        else:
            delivered.release()
    assert store_of(rig).tier_counters.unplaced == 6
    for delivered, value in zip(held, (1, 2), strict=True):
        assert torch.equal(delivered.encoded.rows, expected[value])
        delivered.release()


@pytest.mark.parametrize("waits_in", ["queue", "device"])
async def test_room_of_an_item_whose_callers_left_is_the_engines_until_it_ended(
    rig: Rig, waits_in: str
) -> None:
    rig.tower.gate.clear()
    blocking = []
    if waits_in == "queue":  # behind a batch that is full
        blocking = [asyncio.ensure_future(rig.pipeline.encode(image(7, side=16)))]
        await until(lambda: is_running(rig))
    caller = asyncio.ensure_future(rig.pipeline.encode(image(1, side=16)))
    device = store_of(rig).device
    await until(lambda: sum(len(part.arena) for part in device.parts()) == len(blocking) + 1)
    await until(lambda: rig.engine.queued_items == len(blocking))
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    rig.tower.gate.set()
    for each in await asyncio.gather(*blocking):
        each.release()
    await until(lambda: all(len(part.arena) == len(part) for part in device.parts()))


async def test_a_deadline_while_the_device_works_leaves_no_room_behind(rig: Rig) -> None:
    rig.tower.gate.clear()
    with pytest.raises((DeadlineExceeded, Cancelled)):
        await rig.pipeline.encode(image(1, side=16), deadline_s=rig.pipeline.clock() + 0.05)
    rig.tower.gate.set()


async def test_a_failed_item_gives_its_room_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("poisoned")

    monkeypatch.setattr(type(rig.tower), "forward", fail)
    with pytest.raises(InternalError, match="poisoned"):
        await rig.pipeline.encode(image(1, side=16))
    monkeypatch.undo()
    (await rig.pipeline.encode(image(1, side=16))).release()


async def test_an_engine_that_refuses_leaves_no_room_behind(rig: Rig) -> None:
    assert rig.engine.stop(10)
    with pytest.raises(Exception, match="stop"):
        await rig.pipeline.encode(image(1, side=16))


async def test_rows_stay_while_the_last_of_several_callers_has_not_landed(rig: Rig) -> None:
    """Evicted in the very moment in which they are told: each caller holds them by then."""
    rig.tower.gate.clear()
    callers = [asyncio.ensure_future(rig.pipeline.encode(image(1, side=16))) for _ in range(4)]
    await until(lambda: rig.pipeline.flights.counters.joined == 3)
    others = [asyncio.ensure_future(rig.pipeline.encode(image(value, side=16))) for value in range(2, 5)]
    rig.tower.gate.set()
    expected = await rows_alone(1)
    for delivered in await asyncio.gather(*callers):
        assert torch.equal(delivered.encoded.rows, expected)
        delivered.release()
    for delivered in await asyncio.gather(*others):
        delivered.release()


async def test_p21_room_that_a_failed_device_may_still_write_to_goes_to_nobody() -> None:
    """Also where the fault was found elsewhere while a batch runs on: what is copied to the device from then
    on lies somewhere else."""
    store = tiered(2 * ITEM_BYTES, 4 * ITEM_BYTES)
    rig = Rig(store)
    rig.tower.gate.clear()
    caller = asyncio.ensure_future(rig.pipeline.encode(image(1, side=16)))
    (part,) = store.device.parts()
    await until(lambda: is_running(rig))
    (slot,) = part.arena._holders
    rig.engine.report(torch.AcceleratorError("CUDA error: unspecified launch failure"))
    with pytest.raises(DeviceFault):
        await caller
    assert part.arena.num_holders(slot) == 1
    assert not part.arena.published(slot)
    rig.tower.gate.set()
    assert rig.engine.stop(10)
    rig.workers.shutdown()
    store.close()


async def test_p36_a_fault_that_a_copy_finds_first_ends_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is asked for may be resident, and no batch come to find out."""

    def fail(self: Mover, target: torch.Tensor, source: torch.Tensor) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    store = tiered(2 * ITEM_BYTES, 4 * ITEM_BYTES)
    rig = Rig(store)
    delivered = await rig.pipeline.encode(image(1, side=16))
    monkeypatch.setattr(Mover, "_copy", fail)
    with pytest.raises(DeviceFault, match="unspecified launch failure"):
        await rig.pipeline.placed(delivered, "", "host")
    assert rig.engine.fault is not None
    delivered.release()
    assert rig.engine.stop(10)
    rig.workers.shutdown()
    store.close()


async def test_a_copy_that_fails_by_itself_ends_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Mover, target: torch.Tensor, source: torch.Tensor) -> None:
        raise MemoryError("no room for it")

    delivered = await rig.pipeline.encode(image(1, side=16))
    monkeypatch.setattr(Mover, "_copy", fail)
    with pytest.raises(MemoryError):
        await rig.pipeline.placed(delivered, "", "host")
    monkeypatch.undo()
    assert rig.engine.fault is None
    (await rig.pipeline.placed(delivered, "", "host")).release()


async def test_a_store_that_fails_at_the_end_fails_its_item_and_leaves_nobody_waiting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, finish = store_of(rig), TieredStore.finish_put

    def fail(_: TieredStore, writing: Writing) -> None:
        finish(store, writing)
        raise RuntimeError("the store has a defect")

    monkeypatch.setattr(TieredStore, "finish_put", fail)
    with pytest.raises(InternalError, match="the store has a defect"):
        await asyncio.wait_for(rig.pipeline.encode(image(1, side=16)), 10)
    monkeypatch.undo()


def num_slots(rig: Rig) -> int:
    return sum(len(part.arena) for part in store_of(rig).device.parts())
