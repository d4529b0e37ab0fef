"""The stream of one call: items beside each other, one message at a time, callers that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import torch

from encoder_service.errors import DeadlineExceeded, UndecodableImage
from encoder_service.pipeline import EncodeResult
from encoder_service.rpc import convert, item_stream, response
from encoder_service.rpc.delivery import Delivery, RowsRequest
from encoder_service.rpc.item_stream import EventWriter, ItemStream
from encoder_service.rpc.observed import Call, observed
from encoder_service.store.arena import PROBE_BYTES
from encoder_service.store.embedding_store import EmbeddingStore
from encoder_service.types import EncodedFile, EncodedItem, Grid, Item, Modality
from tests.unit.service.rig import Rig, image, memory_store, running, until
from tests.unit.store.integrity import num_holds
from vision_encoder.v1 import encoder_pb2 as pb

INLINE = RowsRequest("", None, False)

pytestmark = pytest.mark.anyio


class SlowContext:
    """Takes a few turns of the loop for each message; while ``gate`` is cleared, for ever."""

    def __init__(self) -> None:
        self.events: list[pb.ItemEvent] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._is_writing = False

    async def write(self, message: Any) -> None:
        assert not self._is_writing, "a write began before the last one had ended"
        self._is_writing = True
        try:
            await self.gate.wait()
            for _ in range(3):
                await asyncio.sleep(0)
        finally:
            self._is_writing = False
        self.events.append(pb.ItemEvent.FromString(message) if isinstance(message, bytes) else message)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "CHUNK_BYTES", 1000)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running(Rig()) as rig:
        yield rig
    assert rig.pipeline.undelivered.num_bytes == 0
    assert num_holds(rig.store) == 0


def stream_of(rig: Rig, context: SlowContext) -> ItemStream:
    found: Any = context
    delivery = Delivery(rig.pipeline, rig.metrics)
    call = Call("Encode", "id")
    writer = EventWriter(found, rig.pipeline.clock)
    return ItemStream(rig.pipeline, delivery, writer, call, requested=INLINE)


async def test_chunks_of_an_item_follow_its_result_in_order(rig: Rig) -> None:
    context = SlowContext()
    items = [image(value, side=8) for value in range(5)]
    await stream_of(rig, context).run(rig.pipeline.encode, items)
    results = [event.item_index for event in context.events if event.HasField("result")]
    assert sorted(results) == list(range(5))
    events = iter(context.events)
    for index in results:
        event = next(events)
        assert event.item_index == index
        data = b""
        for _ in range(event.result.inline.num_chunks):
            chunk = next(events)
            assert (chunk.item_index, chunk.chunk.offset_bytes) == (index, len(data))
            data += chunk.chunk.data
        held = rig.store.hold("", event.result.key)
        assert held is not None
        assert data == held.item.rows.numpy().tobytes()
        held.drop()


class EvictingContext(SlowContext):
    """At each message, overwrites the store's memory if nothing holds it."""

    def __init__(self, store: EmbeddingStore) -> None:
        super().__init__()
        self._store = store

    def overwrite(self) -> bool:
        rows = torch.empty(64, 16, device="meta")
        reservation = self._store.reserve("", EncodedItem(bytes(32), bytes(32), Grid(1, 16, 16), rows, 1))
        if reservation is None:
            return False
        reservation.destination.fill_(-1.0)
        self._store.cancel(reservation)
        return True

    async def write(self, message: Any) -> None:
        self.overwrite()
        await super().write(message)


async def test_p21_inline_rows_hold_their_slot_until_their_last_chunk_is_written() -> None:
    store = memory_store(PROBE_BYTES + 4096)  # room for one item
    async with running(Rig(store)) as rig:
        context = EvictingContext(store)
        await stream_of(rig, context).run(rig.pipeline.encode, [image(9, side=16)])
        data = b"".join(event.chunk.data for event in context.events if event.HasField("chunk"))
        rows = torch.frombuffer(bytearray(data), dtype=torch.float32).view(64, 16)
        assert len(context.events) == 1 + 5
        assert torch.equal(rows, torch.tensor([9.0] * 8 + [10.0] * 8).expand(64, 16))
        assert context.overwrite(), "nothing holds the rows any more"
    store.close()


@pytest.mark.parametrize("num_items", [1, 4])
async def test_an_item_that_fails_fails_alone(rig: Rig, num_items: int) -> None:
    context = SlowContext()
    bad = Item(Modality.IMAGE, EncodedFile(b"<html>"))
    await stream_of(rig, context).run(rig.pipeline.encode, [bad, *map(image, range(1, num_items))])
    (failure,) = (event for event in context.events if event.HasField("failure"))
    assert failure.item_index == 0
    assert failure.failure.reason == UndecodableImage.reason
    assert sum(event.HasField("result") for event in context.events) == num_items - 1


async def test_work_that_is_cancelled_inside_is_its_items_failure(rig: Rig) -> None:
    """Not by the caller: a task that the item waited for was cancelled."""

    async def cancelled(_: Item) -> EncodeResult:
        raise asyncio.CancelledError

    context = SlowContext()
    await stream_of(rig, context).run(cancelled, [image()])
    assert context.events[0].failure.reason == "DRAINING"


@pytest.mark.parametrize("num_turns", range(0, 40, 4))
async def test_p15_a_caller_that_leaves_at_any_moment_leaves_nothing_behind(rig: Rig, num_turns: int) -> None:
    before = asyncio.all_tasks()
    context = SlowContext()
    running_ = asyncio.ensure_future(
        stream_of(rig, context).run(rig.pipeline.encode, [image(value, side=8) for value in range(3)])
    )
    for _ in range(num_turns):
        await asyncio.sleep(0)
    running_.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running_
    num_events = len(context.events)
    await until(lambda: asyncio.all_tasks() <= before)
    assert len(context.events) == num_events
    assert rig.pipeline.undelivered.num_bytes == 0


class ClosedContext(SlowContext):
    """Its caller has left, and gRPC has not cancelled the call's task yet."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted: list[grpc.StatusCode] = []

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4711"

    async def write(self, message: Any) -> None:
        await super().write(message)
        raise grpc.aio.InternalError("Failed grpc_call_start_batch: 4")

    async def abort(self, code: grpc.StatusCode, *_: object) -> None:
        self.aborted.append(code)
        raise grpc.aio.InternalError("Failed grpc_call_start_batch: 4")


async def test_p15_a_write_to_a_caller_that_has_left_ends_the_call_as_cancelled(rig: Rig) -> None:
    async def handler(_: object, context: Any) -> None:
        await stream_of(rig, context).run(rig.pipeline.encode, [image(1), bad, image(2)])

    bad = Item(Modality.IMAGE, EncodedFile(b"<html>"))
    context: Any = ClosedContext()
    with pytest.raises(asyncio.CancelledError):
        await observed("Encode", handler, rig.metrics, "instance")(None, context)
    read = rig.metrics.registry.get_sample_value
    assert read("ve_requests_total", {"method": "Encode", "status": "CANCELLED"}) == 1
    assert context.aborted == []
    assert len(context.events) == 1, "written after the caller had left"


async def test_p17_a_caller_that_reads_slowly_starts_no_more_than_it_reads(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_stream, "MAX_BYTES_PER_CALL", 1)
    for value in range(8):
        (await rig.pipeline.encode(image(value))).release()
    started: list[Item] = []

    async def encode(item: Item) -> EncodeResult:
        started.append(item)
        return await rig.pipeline.encode(item)

    context = SlowContext()
    context.gate.clear()
    call = asyncio.ensure_future(stream_of(rig, context).run(encode, [image(value) for value in range(8)]))
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(started) == 1
    assert rig.pipeline.undelivered.num_bytes == 4 * 16 * 4
    context.gate.set()
    await call
    assert len(started) == 8


async def test_p17_a_caller_that_reads_nothing_is_left(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds is free again (the rig checks it)."""
    monkeypatch.setattr(response, "UNREAD_S", 0.05)
    context = SlowContext()
    context.gate.clear()
    with pytest.raises(DeadlineExceeded, match=r"has read nothing for 0\.05 s"):
        await stream_of(rig, context).run(rig.pipeline.encode, [image(value) for value in range(3)])
    assert context.events == []
