"""Assembly without a network: any interleaving gives the rows, any broken rule fails its own item."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.rpc.convert import chunk_event
from lm_adapter.assembly import Assembler, PlacedRows, prepare_items, read_chunk
from lm_adapter.convert import dtype_number, prefetch_status
from lm_adapter.errors import InvalidRows, ItemFailed, StreamViolation, TruncatedStream
from lm_adapter.items import Grid, ImageItem, Item, PixelItem, PreprocessOptions
from lm_adapter.testing import fake_model, fake_rows
from lm_adapter.types import EncodedRows, Limits, ModelInfo
from vision_encoder.layout.varint import encode_varint
from vision_encoder.v1 import encoder_pb2 as pb

MODEL = fake_model("qwen3_vl", out_width=4)


def digest_of(index: int) -> bytes:
    return hashlib.sha256(f"item {index}".encode()).digest()


def item_events(
    index: int, grid: Grid, *, model: ModelInfo = MODEL, chunk_bytes: int = 64
) -> list[pb.ItemEvent]:
    num_rows = model.num_rows(grid)
    payload = fake_rows(digest_of(index), num_rows, model.width).tobytes()
    offsets = range(0, len(payload), chunk_bytes)
    result = pb.ItemResult(
        key=hashlib.sha256(digest_of(index)).digest(),
        content_digest=digest_of(index),
        grid_thw=pb.GridTHW(t=grid.t, h=grid.h, w=grid.w),
        num_rows=num_rows,
        width=model.width,
        dtype=dtype_number(model.dtype),
        num_deepstack_levels=model.num_deepstack_levels,
        rows_bytes=len(payload),
        inline=pb.InlineRows(num_chunks=len(offsets)),
    )
    return [
        pb.ItemEvent(item_index=index, result=result),
        *(
            pb.ItemEvent(
                item_index=index, chunk=pb.RowsChunk(offset_bytes=at, data=payload[at : at + chunk_bytes])
            )
            for at in offsets
        ),
    ]


def assembler(num_items: int, *models: ModelInfo, max_rows_bytes: int = 1 << 20) -> Assembler:
    return Assembler([None] * num_items, models=models or (MODEL,), max_rows_bytes=max_rows_bytes)


def feed(assembly: Assembler, event: pb.ItemEvent) -> Any:
    return assembly.feed(event.SerializeToString())


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_interleaving_of_any_items_gives_their_rows(data: st.DataObject) -> None:
    num_items = data.draw(st.integers(1, 5))
    queues: list[list[pb.ItemEvent]] = []
    for index in range(num_items):
        if data.draw(st.integers(0, 4)) == 0:
            queues.append([pb.ItemEvent(item_index=index, failure=pb.ItemFailure(reason="QUEUE_FULL"))])
        else:
            sides = st.integers(1, 3)
            grid = Grid(data.draw(sides), 2 * data.draw(sides), 2 * data.draw(sides))
            queues.append(item_events(index, grid, chunk_bytes=data.draw(st.integers(1, 200))))
    sizes = [len(queue) for queue in queues]
    assembly = assembler(num_items)
    finished: dict[int, EncodedRows | ItemFailed] = {}
    while any(queues):
        index = data.draw(st.sampled_from([i for i, queue in enumerate(queues) if queue]))
        event = queues[index].pop(0)
        done = assembly.feed(event.SerializeToString())
        assert not isinstance(done, PlacedRows)
        assert (done is not None) == (not queues[index])
        if done is not None:
            finished[done[0]] = done[1]
    assembly.finish()
    assert sorted(finished) == list(range(num_items))
    for index, outcome in finished.items():
        if sizes[index] == 1:
            assert isinstance(outcome, ItemFailed)
            assert outcome.reason == "QUEUE_FULL"
        else:
            assert isinstance(outcome, EncodedRows)
            expected = fake_rows(digest_of(index), outcome.num_rows, outcome.width)
            np.testing.assert_array_equal(outcome.numpy(), expected)


def edited(**changes: object) -> list[pb.ItemEvent]:
    """Item 0's events, with fields of its result changed."""
    events = item_events(0, Grid(1, 4, 4))
    events[0].result.MergeFrom(pb.ItemResult(**changes))  # type: ignore[arg-type]
    return events


RESULT, *CHUNKS = edited()


def resized(chunk: pb.ItemEvent, num_bytes: int) -> pb.ItemEvent:
    changed = pb.ItemEvent()
    changed.CopyFrom(chunk)
    changed.chunk.data = bytes(num_bytes)
    return changed


def without_chunks() -> pb.ItemEvent:
    changed = pb.ItemEvent()
    changed.CopyFrom(RESULT)
    changed.result.inline.num_chunks = 0
    return changed


@pytest.mark.parametrize(
    ("events", "field_name", "figures"),
    [
        (edited(num_rows=5), "num_rows", ("5", "4")),
        (edited(width=20), "width", ("20", "16")),
        (edited(num_deepstack_levels=1), "num_deepstack_levels", ("1", "3")),
        (edited(dtype=pb.DTYPE_FLOAT16), "dtype", ("float16", "float32")),
        (edited(dtype=77), "dtype", ("dtype 77", "float32")),
        (edited(rows_bytes=9), "rows_bytes", ("9", "256")),
        (edited(grid_thw=pb.GridTHW(h=5)), "grid_thw", ("[1, 5, 4]", "multiples of 2")),
        (edited(key=b"k" * 31), "key", ("31", "32")),
        (edited(content_digest=b"d" * 33), "content_digest", ("33", "32")),
        (edited(place=pb.RowsPlace(generation=1)), "delivery", ("place", "inline")),
        ([without_chunks(), *CHUNKS], "num_chunks", ("0", "1")),
        ([*CHUNKS, RESULT], "result", ("chunk", "result")),
        ([RESULT, RESULT, *CHUNKS], "result", ("2", "1")),
        ([RESULT, *reversed(CHUNKS)], "chunk_offset", ("192", "0")),
        ([RESULT, *CHUNKS[1:]], "chunk_offset", ("64", "0")),
        ([RESULT, *CHUNKS[:-1], resized(CHUNKS[-1], 63)], "rows_bytes", ("255", "256")),
        ([RESULT, *CHUNKS[:-1], resized(CHUNKS[-1], 65)], "chunk_range", ("257", "256")),
    ],
)
def test_p22_results_and_chunks_that_break_a_rule_fail_their_own_item(
    events: list[pb.ItemEvent], field_name: str, figures: tuple[str, str]
) -> None:
    """Once; what comes of the item afterwards is let pass."""
    assembly = assembler(2)
    ((index, outcome),) = [done for event in events if (done := feed(assembly, event)) is not None]
    assert index == 0
    assert isinstance(outcome, InvalidRows)
    assert outcome.field == field_name
    assert (outcome.details["found"], outcome.details["expected"]) == figures
    assert outcome.reason == "INVALID_ROWS"
    is_named = all(figure.strip("[]") in str(outcome) for figure in figures)
    assert is_named or field_name == "result"  # a second one
    last = [feed(assembly, event) for event in item_events(1, Grid(1, 2, 2))][-1]
    assert isinstance(last[1], EncodedRows)
    assembly.finish()


def test_p22_rows_of_another_key_or_digest_are_refused() -> None:
    for assembly, field_name in (
        (Assembler([None], keys=[b"k" * 32]), "key"),
        (Assembler([b"d" * 32]), "content_digest"),
    ):
        done = assembly.feed(item_events(0, Grid(1, 2, 2))[0].SerializeToString())
        assert done is not None
        assert isinstance(done[1], InvalidRows)
        assert done[1].field == field_name


def test_p22_a_prefetched_key_of_another_length_fails_its_item_alone() -> None:
    status = prefetch_status(pb.PrefetchStatus(key=b"k" * 31, state=pb.KEY_STATE_RESIDENT))
    assert isinstance(status, InvalidRows)
    assert status.message == "key has 31 bytes, expected 32"


def huge_result() -> pb.ItemEvent:
    """Of 2**62 bytes."""
    event = item_events(0, Grid(1, 2, 2))[0]
    event.result.grid_thw.h = event.result.grid_thw.w = 2**20
    event.result.num_rows = 2**30
    event.result.width = 2**30
    event.result.rows_bytes = 2**62
    event.result.num_deepstack_levels = 0
    return event


def test_p22_a_huge_announcement_is_refused_before_any_memory_is_taken() -> None:
    done = Assembler([None], max_rows_bytes=1 << 30).feed(huge_result().SerializeToString())
    assert done is not None
    assert isinstance(done[1], InvalidRows)
    assert done[1].details == {
        "field": "rows_bytes",
        "found": str(2**62),
        "expected": str(2**30),
    }


def test_rows_that_this_process_has_no_memory_for_fail_their_item_alone() -> None:
    assembly = Assembler([None, None], max_rows_bytes=1 << 62)
    done = feed(assembly, huge_result())
    assert isinstance(done[1], ItemFailed)
    assert done[1].reason == "OUT_OF_MEMORY"
    assert done[1].details == {"needed": str(2**62)}
    for event in item_events(1, Grid(1, 2, 2)):
        done = feed(assembly, event)
    assert isinstance(done[1], EncodedRows)
    assembly.finish()


def test_several_models_each_allow_their_own_geometry() -> None:
    other = fake_model("kimi_k25", out_width=8)
    assembly = assembler(3, MODEL, other)
    for event in item_events(0, Grid(3, 2, 2)):
        first = feed(assembly, event)
    for event in item_events(1, Grid(3, 2, 2), model=other):
        second = feed(assembly, event)
    third = feed(assembly, item_events(2, Grid(1, 2, 2), model=replace(MODEL, width=32, out_width=8))[0])
    assert first is not None
    assert isinstance(first[1], EncodedRows)
    assert first[1].num_rows == 3
    assert second is not None
    assert isinstance(second[1], EncodedRows)
    assert second[1].num_rows == 1
    assert third is not None
    assert isinstance(third[1], InvalidRows)


@pytest.mark.parametrize(
    ("announced", "field_name", "figures"),
    [
        ({"spatial_merge_size": 0}, "spatial_merge_size", ("0", "1")),
        ({"num_deepstack_levels": 1}, "width", ("16", "8")),
        ({"width": 20}, "width", ("20", "16")),
        ({"out_width": 5}, "width", ("16", "20")),
    ],
)
def test_p22_rows_of_a_model_that_contradicts_itself_are_refused(
    announced: dict[str, Any], field_name: str, figures: tuple[str, str]
) -> None:
    """Deepstack levels are cut from the rows by the announced width and number of levels."""
    model = replace(MODEL, **announced)
    assembly = Assembler([None], models=[model])
    outcome = feed(assembly, edited(num_deepstack_levels=model.num_deepstack_levels, width=model.width)[0])
    assert outcome is not None
    assert isinstance(outcome[1], InvalidRows)
    assert outcome[1].field == field_name
    assert (outcome[1].details["found"], outcome[1].details["expected"]) == figures


def test_items_without_an_outcome_are_named_when_the_stream_ends() -> None:
    assembly = assembler(4)
    for event in item_events(2, Grid(1, 2, 2)):
        feed(assembly, event)
    feed(assembly, item_events(1, Grid(1, 2, 2))[0])
    with pytest.raises(TruncatedStream, match=r"1 of 4 items; missing: 0, 1, 3") as caught:
        assembly.finish()
    assert caught.value.retryable


@pytest.mark.parametrize("kind", ["result", "chunk", "failure"])
def test_events_for_no_item_or_for_a_finished_one_break_the_call(kind: str) -> None:
    late = {
        "result": item_events(0, Grid(1, 2, 2))[0],
        "chunk": item_events(0, Grid(1, 2, 2))[1],
        "failure": pb.ItemEvent(failure=pb.ItemFailure(reason="INTERNAL")),
    }[kind]
    assembly = assembler(1)
    for event in item_events(0, Grid(1, 2, 2)):
        feed(assembly, event)
    with pytest.raises(StreamViolation, match="item 0"):
        assembly.feed(late.SerializeToString())
    late.item_index = 1
    with pytest.raises(StreamViolation, match="item 1, the call has 1"):
        assembly.feed(late.SerializeToString())


def test_an_unknown_event_is_let_pass() -> None:
    assert assembler(1).feed(b"\x7a\x01x") is None
    assert assembler(1).feed(b"") is None


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.binary(max_size=40) | st.sampled_from([e.SerializeToString() for e in edited()]), max_size=6)
)
def test_p33_no_bytes_raise_anything_but_the_adapters_errors(messages: list[bytes]) -> None:
    assembly = assembler(1)
    for message in messages:
        try:
            assembly.feed(message)
        except StreamViolation:
            return


def parsed(message: bytes) -> tuple[int, int, bytes] | None:
    """A chunk as protobuf reads it; None for what is no chunk, or malformed."""
    try:
        event = pb.ItemEvent.FromString(message)
    except DecodeError:
        return None
    return (event.item_index, event.chunk.offset_bytes, event.chunk.data) if event.HasField("chunk") else None


VARINTS = st.integers(0, 2**64 - 1).map(encode_varint) | st.binary(max_size=11)
PIECES = st.sampled_from([b"\x08", b"\x1a", b"\x12", b"\x10", b"\x0a"]) | VARINTS


@settings(deadline=None, max_examples=2000)
@given(
    st.lists(PIECES, max_size=6).map(b"".join)
    | st.builds(chunk_event, st.integers(0, 2**34), st.integers(0, 2**40), st.binary(max_size=200)),
    st.lists(st.tuples(st.integers(0, 30), st.binary(max_size=2)), max_size=2),
)
def test_p33_a_chunk_is_read_as_protobuf_reads_it(message: bytes, edits: list[tuple[int, bytes]]) -> None:
    """Also of messages with bytes replaced, removed or added, near the head."""
    for at, piece in edits:
        message = message[:at] + piece + message[at + 1 :]
    found = read_chunk(message)
    assert found is None or tuple(found) == parsed(message)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**35 - 1), st.binary(min_size=1, max_size=300))
def test_a_chunk_as_a_service_writes_it_is_read_without_a_copy(index: int, offset: int, data: bytes) -> None:
    event = pb.ItemEvent(item_index=index, chunk=pb.RowsChunk(offset_bytes=offset, data=data))
    message = event.SerializeToString()
    found = read_chunk(message)
    assert found is not None
    assert isinstance(found.data, memoryview)
    assert found.data.obj is message
    assert found == (index, offset, data)


# Requests -------------------------------------------------------------------------------------------------


def test_p33_an_item_that_cannot_be_sent_fails_alone() -> None:
    items: list[Item] = [
        ImageItem(b"small"),
        ImageItem(b"x" * 5000),
        ImageItem(b"", options=PreprocessOptions(min_pixels=-1)),
        PixelItem(np.zeros((4, 6), np.complex64), Grid(1, 2, 2)),
        ImageItem(b"fine"),
    ]
    batches, refused = prepare_items(dict(enumerate(items)), Limits(max_message_bytes=4096))
    assert [list(batch) for batch in batches] == [[0, 4]]
    assert {index: failure.reason for index, failure in refused.items()} == {
        1: "MESSAGE_TOO_LARGE",
        2: "INVALID_REQUEST",
        3: "INVALID_REQUEST",
    }
    assert refused[1].details["allowed"] == "4096"
    assert "complex64" in str(refused[3])


@settings(deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=20), st.integers(1, 6))
def test_batches_hold_every_item_in_order_and_stay_within_the_limits(
    sizes: list[int], max_items: int
) -> None:
    items = [ImageItem(b"x" * size) for size in sizes]
    limits = Limits(max_message_bytes=8192, max_items_per_request=max_items)
    batches, _ = prepare_items(dict(enumerate(items)), limits)
    sent = [index for batch in batches for index in batch]
    assert sent == list(range(len(items)))
    for batch in batches:
        assert 1 <= len(batch) <= max_items
        request = pb.EncodeRequest(items=batch.values(), namespace="n" * 256, model="m" * 256)
        assert request.ByteSize() <= 8192


def test_pixels_of_another_type_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="found list"):
        prepare_items({0: PixelItem([[1.0]], Grid(1, 2, 2))}, Limits())  # type: ignore[arg-type]
