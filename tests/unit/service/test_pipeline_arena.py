"""The pipeline on a store in shared memory: rows stay in place while read, and a full arena fails nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from encoder_service import tower_run
from encoder_service.pipeline import Delivered
from encoder_service.store.arena import PROBE_BYTES, Arena
from encoder_service.store.arena_store import ArenaStore
from encoder_service.store.embedding_store import EmbeddingStore, Writing
from encoder_service.store.host_memory import HostMemory
from encoder_service.types import CacheTier
from tests.unit.service.test_pipeline import Rig, image, until

pytestmark = pytest.mark.anyio

# What ``image`` with side 16 gives: 64 rows of 16 float32; a page of rows.
ITEM_BYTES = 4096


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """With room for two items."""
    store = ArenaStore(Arena(HostMemory(PROBE_BYTES + 2 * ITEM_BYTES), max_slots=8))
    rig = Rig(store)
    yield rig
    rig.tower.gate.set()
    await rig.pipeline.drain(10)
    assert rig.engine.stop(10)
    rig.workers.shutdown()
    store.check_integrity()
    store.close()
    assert len(store.arena) == 0, "a caller kept its rows"


async def rows_alone(value: int) -> torch.Tensor:
    """What a pipeline without shared memory gives."""
    rig = Rig(EmbeddingStore(1 << 20))
    delivered = await rig.pipeline.encode(image(value, side=16))
    assert rig.engine.stop(10)
    rig.workers.shutdown()
    return delivered.encoded.rows


async def test_rows_are_read_from_the_slot_by_all_who_wait(rig: Rig) -> None:
    callers = [asyncio.ensure_future(rig.pipeline.encode(image(1, side=16))) for _ in range(5)]
    results = [*(await asyncio.gather(*callers)), await rig.pipeline.encode(image(1, side=16))]
    results.append(await rig.pipeline.fetch(results[0].encoded.key))
    assert {result.tier for result in results} == {CacheTier.MISS, CacheTier.IN_FLIGHT, CacheTier.HOST}
    slots = {result.held.slot for result in results if result.held is not None}
    assert len(slots) == 1
    (slot,) = slots
    assert slot is not None
    assert rig.pipeline.store.arena.num_holders(slot) == 1 + len(results)  # type: ignore[attr-defined]
    assert torch.equal(results[0].encoded.rows, await rows_alone(1))
    for result in results:
        result.release()
        result.release()
    assert rig.pipeline.store.arena.num_holders(slot) == 1  # type: ignore[attr-defined]


async def test_what_a_caller_reads_is_never_overwritten(rig: Rig) -> None:
    first = await rig.pipeline.encode(image(1, side=16))
    expected = first.encoded.rows.clone()
    for value in range(2, 8):
        (await rig.pipeline.encode(image(value, side=16))).release()
        assert torch.equal(first.encoded.rows, expected)
    assert rig.pipeline.store.counters.evictions == 5
    first.release()


async def test_p17_a_full_arena_delivers_rows_of_their_own(rig: Rig) -> None:
    held = [await rig.pipeline.encode(image(value, side=16)) for value in (1, 2)]
    third = await rig.pipeline.encode(image(3, side=16))
    assert third.held is not None
    assert third.held.slot is None
    assert torch.equal(third.encoded.rows, await rows_alone(3))
    assert rig.pipeline.store.counters.refused == 1
    assert (await rig.pipeline.encode(image(3, side=16))).tier is CacheTier.MISS, "it was not kept"
    for delivered in held:
        delivered.release()


async def test_a_caller_that_left_holds_nothing(rig: Rig) -> None:
    rig.tower.gate.clear()
    leaver = asyncio.ensure_future(rig.pipeline.encode(image(1, side=16)))
    stayer = asyncio.ensure_future(rig.pipeline.encode(image(1, side=16)))
    await until(lambda: rig.pipeline.flights.counters.joined == 1)
    leaver.cancel()
    rig.tower.gate.set()
    (await stayer).release()
    assert len(rig.pipeline.store.arena) == 1  # type: ignore[attr-defined]


class SlowCopy:
    """Copies of rows wait on a worker for ``gate``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.num_started = 0
        self.fails = False
        original: Callable[[Writing], None] = Writing.copy

        def copy(writing: Writing) -> None:
            self.num_started += 1
            assert self.gate.wait(30)
            if self.fails:
                raise RuntimeError("the copy failed")
            original(writing)

        monkeypatch.setattr(tower_run, "COPY_INLINE_BYTES", 0)
        monkeypatch.setattr(Writing, "copy", copy)


async def test_p34_a_large_copy_is_made_beside_the_loop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowCopy(monkeypatch)
    caller = asyncio.ensure_future(rig.pipeline.encode(image(1, side=16)))
    await until(lambda: slow.num_started == 1)
    assert rig.pipeline.store.peek("", caller_key := (await key_of(rig))) is None
    slow.gate.set()
    delivered: Delivered = await caller
    assert delivered.encoded.key == caller_key
    assert delivered.held is not None
    assert delivered.held.slot is not None
    assert torch.equal(delivered.encoded.rows, await rows_alone(1))
    delivered.release()


async def test_p21_a_slot_is_not_given_on_while_a_left_caller_s_copy_writes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowCopy(monkeypatch)
    arena: Arena = rig.pipeline.store.arena  # type: ignore[attr-defined]
    caller = asyncio.ensure_future(rig.pipeline.encode(image(1, side=16)))
    await until(lambda: slow.num_started == 1)
    caller.cancel()
    await until(lambda: len(rig.pipeline.flights) == 0)
    assert len(arena) == 1
    slow.gate.set()
    await until(lambda: len(rig.pipeline.store) == 1)
    resident = await rig.pipeline.encode(image(1, side=16))
    assert resident.tier is CacheTier.HOST
    assert torch.equal(resident.encoded.rows, await rows_alone(1))
    resident.release()


async def test_a_copy_that_fails_fails_its_item_and_frees_its_slot(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowCopy(monkeypatch)
    slow.fails = True
    slow.gate.set()
    with pytest.raises(Exception, match="the copy failed"):
        await rig.pipeline.encode(image(1, side=16))
    assert len(rig.pipeline.store.arena) == 0  # type: ignore[attr-defined]


async def key_of(rig: Rig) -> bytes:
    """Of the item that is under way."""
    _, key = await rig.pipeline._identify(image(1, side=16), "")
    return key
