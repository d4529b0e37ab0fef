"""The pipeline where the engine writes rows into an arena: who holds the slot, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from encoder_service.errors import Cancelled, DeadlineExceeded, DeviceFault, InternalError
from encoder_service.pipeline import EncodeResult
from encoder_service.store.embedding_store import EmbeddingStore, Partition, Reservation
from encoder_service.types import CacheTier
from tests.unit.service.rig import Rig, check_released, image, num_slots, running, until
from tests.unit.store.arenas import device_arena, host_arena
from tests.unit.store.integrity import num_holds

pytestmark = pytest.mark.anyio

# ``image`` with side 16 gives 64 rows of 16 float32.
ITEM_BYTES = 4096


def tiered(rig_of: list[Rig]) -> EmbeddingStore:
    """With room for four items on the device and eight on the host."""
    return EmbeddingStore(
        Partition(host_arena(8 * ITEM_BYTES), device_arena(4 * ITEM_BYTES)),
        on_copy_error=lambda error: rig_of[0].engine.report(error),
    )


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """At its end, every slot has one holder: the store."""
    rigs: list[Rig] = []
    rigs.append(Rig(tiered(rigs)))
    async with running(rigs[0]) as rig:
        yield rig
    await until(lambda: not num_holds(rig.store))  # copies between the tiers have ended
    check_released(rig.store)
    rig.store.close()


async def encode(rig: Rig, value: int) -> EncodeResult:
    return await rig.pipeline.encode(image(value, side=16))


def rows(value: int) -> torch.Tensor:
    """What the fake tower makes of an image of this colour."""
    return torch.cat([torch.full((64, 8), float(value)), torch.full((64, 8), value + 1.0)], dim=1)


async def test_the_engine_writes_rows_into_their_slot(rig: Rig) -> None:
    results = [*await asyncio.gather(*(encode(rig, 1) for _ in range(5))), await encode(rig, 1)]
    assert {result.tier for result in results} == {CacheTier.MISS, CacheTier.IN_FLIGHT, CacheTier.DEVICE}
    assert len({result.encoded.rows.data_ptr() for result in results}) == 1
    assert all(result.held.tier == "device" for result in results)
    assert torch.equal(results[0].encoded.rows, rows(1))
    assert rig.store.num_items("host") == 0
    for result in results:
        result.release()


@pytest.mark.parametrize("waits_in", ["queue", "device"])
async def test_p20_the_slot_is_the_engines_until_the_item_ended(rig: Rig, waits_in: str) -> None:
    rig.tower.gate.clear()
    blocking = []
    if waits_in == "queue":  # behind a batch that is full
        blocking = [asyncio.ensure_future(encode(rig, 7))]
        await until(lambda: rig.tower.num_entered)
    caller = asyncio.ensure_future(encode(rig, 1))
    await until(lambda: num_slots(rig.store) == len(blocking) + 1)
    await until(lambda: rig.tower.num_entered and len(rig.planner) == len(blocking))
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await until(lambda: len(rig.pipeline.inflight) == len(blocking))
    assert num_slots(rig.store) == 1
    rig.tower.gate.set()
    for delivered in await asyncio.gather(*blocking):
        delivered.release()
    await until(lambda: num_slots(rig.store) == len(blocking))


async def test_a_deadline_while_the_device_works_leaves_no_slot_behind(rig: Rig) -> None:
    rig.tower.gate.clear()
    with pytest.raises((DeadlineExceeded, Cancelled)):
        await rig.pipeline.encode(image(1, side=16), deadline_s=rig.pipeline.clock() + 0.05)
    rig.tower.gate.set()
    await until(lambda: num_slots(rig.store) == 0)


async def test_a_failed_item_gives_its_slot_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("poisoned")

    monkeypatch.setattr(type(rig.tower), "forward", fail)
    with pytest.raises(InternalError, match="poisoned"):
        await encode(rig, 1)
    assert num_slots(rig.store) == 0
    monkeypatch.undo()
    (await encode(rig, 1)).release()


async def test_an_engine_that_refuses_leaves_no_slot_behind(rig: Rig) -> None:
    assert rig.engine.stop(10)
    with pytest.raises(Exception, match="stop"):
        await encode(rig, 1)


async def test_every_caller_holds_the_rows_once_the_encode_has_ended(rig: Rig) -> None:
    """Other items' reservations evict what no caller holds."""
    rig.tower.gate.clear()
    callers = [asyncio.ensure_future(encode(rig, 1)) for _ in range(4)]
    await until(lambda: rig.pipeline.inflight.num_joined == 3)
    others = [asyncio.ensure_future(encode(rig, value)) for value in range(2, 5)]
    rig.tower.gate.set()
    for delivered in await asyncio.gather(*callers):
        assert torch.equal(delivered.encoded.rows, rows(1))
        delivered.release()
    for delivered in await asyncio.gather(*others):
        delivered.release()


async def test_p21_a_slot_that_a_failed_device_may_still_write_is_never_used_again() -> None:
    """Also where the fault was found elsewhere while a batch still runs."""
    rigs: list[Rig] = []
    rigs.append(rig := Rig(tiered(rigs)))
    rig.tower.gate.clear()
    caller = asyncio.ensure_future(encode(rig, 1))
    await until(lambda: rig.tower.num_entered)
    rig.engine.report(torch.AcceleratorError("CUDA error: unspecified launch failure"))
    with pytest.raises(DeviceFault):
        await caller
    rig.tower.gate.set()
    assert rig.engine.stop(10)
    assert (num_slots(rig.store), rig.store.num_items("device")) == (1, 0), "the reservation does not end"
    rig.workers.shutdown()
    rig.store.close()


async def test_a_store_that_fails_at_the_end_fails_its_item_and_leaves_no_caller_waiting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = EmbeddingStore.commit

    def fail(store: EmbeddingStore, reservation: Reservation) -> None:
        commit(store, reservation).drop()
        raise RuntimeError("the store has a defect")

    monkeypatch.setattr(EmbeddingStore, "commit", fail)
    with pytest.raises(InternalError, match="the store has a defect"):
        await asyncio.wait_for(encode(rig, 1), 10)
