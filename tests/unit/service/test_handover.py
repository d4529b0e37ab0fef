"""How an item gets from its worker to the engine: without the loop, and with nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Any

import pytest
import torch

from encoder_service import tower_run
from encoder_service.errors import DeviceFault, InternalError, UndecodableImage
from encoder_service.types import FrameItem, PreprocessOptions
from tests.unit.service.test_pipeline import Rig, end, image, until
from tests.unit.service.test_pipeline_arena import ITEM_BYTES, rows_alone
from tests.unit.service.test_pipeline_tiers import is_running, num_slots, store_of
from tests.unit.store.device_like import tiered

pytestmark = pytest.mark.anyio
LONG_S = 20.0


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(tiered(2 * ITEM_BYTES, 4 * ITEM_BYTES))
    yield rig
    await end(rig)
    store = store_of(rig)
    while pending := [*store._spilling.values(), *store._moves.values()]:
        await asyncio.wait(pending)
    store.check_integrity()
    for part in store.parts():
        assert len(part.arena) == len(part), "somebody kept rows or room"


async def test_the_device_gets_an_item_while_the_loop_is_busy(rig: Rig) -> None:
    rig.tower.gate.clear()
    rig.preprocessor.gate.clear()
    caller = asyncio.ensure_future(rig.pipeline.encode(image(1, side=16)))
    await until(lambda: num_slots(rig) == 1)  # room, while its worker decodes
    rig.preprocessor.gate.set()
    ends_s = time.monotonic() + LONG_S
    while not is_running(rig) and time.monotonic() < ends_s:
        time.sleep(0.001)  # noqa: ASYNC251 - the loop is to have no turn
    assert is_running(rig)
    rig.tower.gate.set()
    delivered = await caller
    assert torch.equal(delivered.encoded.rows, await rows_alone(1))
    assert delivered.timings.decode_ms > 0
    assert delivered.timings.tower_ms > 0
    delivered.release()


async def test_an_item_that_is_decoded_before_there_is_room_for_it_waits_for_the_loop(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(_: Executor, job: Callable[[], object]) -> None:
        worker = threading.Thread(target=job)
        worker.start()
        worker.join()  # the loop has no turn until then
        assert not rig.engine.queued_items
        assert not is_running(rig)
        begun.append(num_slots(rig))

    begun: list[int] = []
    monkeypatch.setattr(tower_run, "start_soon", at_once)
    caller = asyncio.ensure_future(rig.pipeline.encode(image(1, side=16)))
    await until(lambda: begun)
    assert begun == [0]
    delivered = await caller
    assert torch.equal(delivered.encoded.rows, await rows_alone(1))
    delivered.release()


async def test_a_caller_that_leaves_while_its_item_is_decoded_has_nothing_encoded(rig: Rig) -> None:
    rig.preprocessor.gate.clear()
    caller = asyncio.ensure_future(rig.pipeline.encode(image(1, side=16)))
    await until(lambda: num_slots(rig) == 1)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    rig.preprocessor.gate.set()
    await until(lambda: num_slots(rig) == 0)
    assert rig.engine.counters.batches == 0


async def test_the_next_caller_of_an_item_that_was_given_up_gets_its_rows(rig: Rig) -> None:
    rig.preprocessor.gate.clear()
    caller = asyncio.ensure_future(rig.pipeline.encode(image(1, side=16)))
    await until(lambda: num_slots(rig) == 1)
    caller.cancel()
    again = asyncio.ensure_future(rig.pipeline.encode(image(1, side=16)))
    await asyncio.sleep(0.01)
    rig.preprocessor.gate.set()
    delivered = await again
    assert torch.equal(delivered.encoded.rows, await rows_alone(1))
    delivered.release()


async def test_pixels_that_cannot_be_made_give_their_room_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UndecodableImage("cut short")

    monkeypatch.setattr(rig.preprocessor, "load_image", fail)
    with pytest.raises(UndecodableImage, match="cut short"):
        await rig.pipeline.encode(image(1, side=16))
    assert num_slots(rig) == 0


async def test_room_that_a_defect_denies_fails_the_item_and_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(tower_run.Room, "__init__", lambda *_: 1 / 0)
        with pytest.raises(InternalError, match="ZeroDivisionError"):
            await rig.pipeline.encode(image(1, side=16))
    delivered = await rig.pipeline.encode(image(1, side=16))
    delivered.release()


async def test_p21_a_device_that_failed_while_an_item_was_decoded_is_told_to_its_caller(rig: Rig) -> None:
    rig.preprocessor.gate.clear()
    caller = asyncio.ensure_future(rig.pipeline.encode(image(1, side=16)))
    await until(lambda: num_slots(rig) == 1)
    rig.engine.report(torch.AcceleratorError("CUDA error: unspecified launch failure"))
    rig.preprocessor.gate.set()
    with pytest.raises(DeviceFault):
        await caller
    assert num_slots(rig) == 0, "nothing was handed to the device"


async def test_every_way_to_leave_at_any_time_leaves_nothing_behind(rig: Rig) -> None:
    """Callers come and go all the time; what the fixture asks at the end is the assertion."""

    async def one(value: int, patience_s: float) -> None:
        try:
            async with asyncio.timeout(patience_s):
                delivered = await rig.pipeline.encode(image(value, side=16))
        except TimeoutError:
            return
        assert torch.equal(delivered.encoded.rows, expected[value])
        delivered.release()

    expected = {value: await rows_alone(value) for value in range(1, 7)}
    patience = torch.rand(120, generator=torch.Generator().manual_seed(int(time.time()))) * 0.01
    for start in range(0, 120, 3):
        await asyncio.gather(
            *(one(1 + number % 6, float(patience[number])) for number in range(start, start + 3))
        )


async def test_pixels_go_with_the_caller_who_leaves_while_they_are_made(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, as their permit does: flights that were given up are cycles, and wait for a collection."""
    made: list[weakref.ref[torch.Tensor]] = []
    load_image = rig.preprocessor.load_image

    def load(data: bytes, options: PreprocessOptions) -> tuple[FrameItem, float, float]:
        found = load_image(data, options)
        made.append(weakref.ref(found[0].frames_THWC))
        return found

    monkeypatch.setattr(rig.preprocessor, "load_image", load)
    rig.preprocessor.gate.clear()
    gc.collect()
    gc.disable()
    try:
        callers = [asyncio.ensure_future(rig.pipeline.encode(image(value, side=16))) for value in (1, 2)]
        await until(lambda: rig.preprocessor.num_loads == 2)
        for each in callers:
            each.cancel()
        await asyncio.wait(callers)
        rig.preprocessor.gate.set()
        await until(lambda: len(made) == 2 and num_slots(rig) == 0)
        await until(lambda: all(each() is None for each in made))
    finally:
        gc.enable()


async def test_an_item_that_is_given_up_in_the_moment_of_its_hand_over_leaves_the_queue(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.tower.gate.clear()
    busy = [asyncio.ensure_future(rig.pipeline.encode(image(1, side=16)))]
    await until(lambda: is_running(rig))
    busy.append(asyncio.ensure_future(rig.pipeline.encode(image(2, side=16))))
    await until(lambda: rig.engine.queued_items + len(rig.engine._planned) == 2)
    num_queued = rig.engine.queued_items
    begun, go_on = threading.Event(), threading.Event()
    submit = rig.engine.submit

    def late(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(LONG_S)
        return submit(*arguments)

    monkeypatch.setattr(rig.engine, "submit", late)
    rig.preprocessor.gate.clear()
    caller = asyncio.ensure_future(rig.pipeline.encode(image(3, side=16)))
    await until(lambda: rig.preprocessor.num_loads == 3)
    await asyncio.sleep(0.01)  # the loop has looked for room, so that the worker hands over
    rig.preprocessor.gate.set()
    await until(begun.is_set)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    dropped = rig.engine.counters.dropped_items
    go_on.set()
    await until(lambda: rig.engine.counters.dropped_items == dropped + 1)  # while the device is busy
    assert rig.engine.queued_items == num_queued
    rig.tower.gate.set()
    for each in await asyncio.gather(*busy):
        each.release()


async def test_a_defect_of_the_store_fails_the_item_and_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    rig = Rig(tiered(2 * ITEM_BYTES, 4 * ITEM_BYTES))

    def fail(*_: object) -> None:
        raise UndecodableImage("cut short")

    monkeypatch.setattr(rig.preprocessor, "load_image", fail)
    monkeypatch.setattr(store_of(rig), "cancel_put", lambda _: 1 / 0)
    with pytest.raises(UndecodableImage, match="cut short"):
        await asyncio.wait_for(rig.pipeline.encode(image(1, side=16)), LONG_S)
    assert rig.engine.stop(10)
    rig.workers.shutdown()


async def test_a_decoder_that_raises_what_no_future_takes_fails_its_item(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StopIteration("over")

    monkeypatch.setattr(rig.preprocessor, "load_image", fail)
    with pytest.raises(InternalError, match="over"):
        await asyncio.wait_for(rig.pipeline.encode(image(1, side=16)), LONG_S)
