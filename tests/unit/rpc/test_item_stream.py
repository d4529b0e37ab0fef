"""Rows of one item as chunks in a stream: order, what is made while another is sent, callers that leave."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest
import torch

from encoder_service.rpc import convert
from encoder_service.rpc.item_stream import ItemStream
from vision_encoder.v1 import encoder_pb2 as pb

CHUNK_BYTES = 4096

pytestmark = pytest.mark.anyio


class SlowContext:
    """Says when a message's sending begins and ends, and takes so many ``turns`` of the loop for each."""

    def __init__(self, said: list[str], turns: int) -> None:
        self.said = said
        self.turns = turns
        self.messages: list[bytes] = []
        self.num_cancelled = 0

    async def write(self, message: bytes) -> None:
        number = len(self.messages)
        self.messages.append(message)
        self.said.append(f"{number} begins")
        try:
            for _ in range(self.turns):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.said.append(f"{number} ends")


def stream_to(context: SlowContext) -> ItemStream:
    stream = ItemStream.__new__(ItemStream)
    stream._context = cast("Any", context)
    stream._chunk_bytes = CHUNK_BYTES
    return stream


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said, with every chunk that is made."""
    said: list[str] = []
    make = convert.chunk_event

    def chunk_event(index: int, offset_bytes: int, data: memoryview) -> bytes:
        said.append(f"{offset_bytes // CHUNK_BYTES} made")
        return make(index, offset_bytes, data)

    monkeypatch.setattr(convert, "chunk_event", chunk_event)
    return said


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_chunks_are_whole_in_order_and_one_at_a_time(made: list[str], turns: int) -> None:
    random.seed()
    for num_bytes in (
        2,
        CHUNK_BYTES,
        CHUNK_BYTES + 2,
        5 * CHUNK_BYTES,
        2 * random.randint(1, 4 * CHUNK_BYTES),
    ):
        rows = torch.randint(0, 1 << 15, (1, num_bytes // 2), dtype=torch.int16)
        context = SlowContext(made, turns)
        await stream_to(context)._write_chunks(3, rows)
        events = [pb.ItemEvent.FromString(message) for message in context.messages]
        assert [event.item_index for event in events] == [3] * len(events)
        assert [event.chunk.offset_bytes for event in events] == list(range(0, num_bytes, CHUNK_BYTES))
        assert b"".join(event.chunk.data for event in events) == rows.numpy().tobytes()
        sent = [word for word in made if "made" not in word]
        expected = [f"{n} {what}" for n in range(len(events)) for what in ("begins", "ends")]
        assert sent == expected, "no write begins before the last one has ended"
        made.clear()


async def test_each_is_made_while_the_one_before_is_sent(made: list[str]) -> None:
    rows = torch.zeros(1, 3 * CHUNK_BYTES, dtype=torch.uint8)
    await stream_to(SlowContext(made, 5))._write_chunks(0, rows)
    assert made == [
        "0 made",
        "0 begins",
        "1 made",
        "0 ends",
        "1 begins",
        "2 made",
        "1 ends",
        "2 begins",
        "2 ends",
    ]


async def test_a_caller_that_leaves_ends_the_write_under_way(made: list[str]) -> None:
    rows = torch.zeros(1, 8 * CHUNK_BYTES, dtype=torch.uint8)
    before = asyncio.all_tasks()
    for num_turns in range(12):
        context = SlowContext(made, 3)
        writing = asyncio.ensure_future(stream_to(context)._write_chunks(0, rows))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        said = list(made)
        for _ in range(5):
            await asyncio.sleep(0)
        assert made == said, "nothing begins, nor ends well, for a caller that has left"
        assert asyncio.all_tasks() == before
