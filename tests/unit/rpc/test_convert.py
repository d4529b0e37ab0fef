"""Messages to records and back: what is refused and why, and the hand-written chunks equal protobuf's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.errors import (
    InvalidDigest,
    InvalidRequest,
    PixelTensorMismatch,
    TransportUnavailable,
    UnsupportedContent,
)
from encoder_service.pipeline import EncodeResult
from encoder_service.rpc import convert
from encoder_service.store.arena import TierName
from encoder_service.store.embedding_store import Location, PinnedRows
from encoder_service.types import CacheTier, ClipFacts, EncodedItem, Grid, StageTimings
from vision_encoder.v1 import encoder_pb2 as pb


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.binary(max_size=400))
def test_a_chunk_is_what_protobuf_would_have_written(index: int, offset: int, data: bytes) -> None:
    written = convert.chunk_event(index, offset, memoryview(data))
    event = pb.ItemEvent(item_index=index, chunk=pb.RowsChunk(offset_bytes=offset, data=data))
    assert pb.ItemEvent.FromString(written) == event
    if data:
        assert written == event.SerializeToString(deterministic=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_cover_the_rows_in_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "CHUNK_BYTES", 100)
    rows = torch.randn(7, 48).to(dtype)
    events = [pb.ItemEvent.FromString(chunk) for chunk in convert.chunk_events(3, rows)]
    assert [event.chunk.offset_bytes for event in events] == list(range(0, rows.nbytes, 100))
    data = b"".join(event.chunk.data for event in events)
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=dtype).reshape(7, 48), rows)
    encoded = EncodedItem(b"k" * 32, b"d" * 32, Grid(1, 2, 14), rows, 2)
    delivered = EncodeResult(PinnedRows(encoded), CacheTier.MISS, StageTimings(tower_ms=2.5), 0.0)
    result = convert.result_event(3, delivered).result
    assert result.inline.num_chunks == len(events)
    assert result.rows_bytes == rows.nbytes
    assert (result.num_rows, result.width, result.num_deepstack_levels) == (7, 48, 2)
    assert convert.DTYPES[result.dtype] is dtype
    assert result.timings.tower_ms == 2.5
    assert result.tier == pb.CACHE_TIER_MISS


def item(**fields: object) -> pb.Item:
    return pb.Item(modality=pb.MODALITY_IMAGE, **fields)  # type: ignore[arg-type]


def tensor(dtype: int = pb.DTYPE_FLOAT32, shape: Sequence[int] = (), data: bytes = b"1") -> pb.Item:
    inline = pb.InlineTensor(dtype=dtype, shape=shape, data=data)  # type: ignore[arg-type]
    return item(pixels=pb.PixelTensor(inline=inline))


FRAME = pb.InlineTensor(dtype=pb.DTYPE_UINT8, shape=[1, 1, 1, 3], data=b"123")
CLIP = pb.Item(modality=pb.MODALITY_VIDEO, frames=pb.FrameArray(inline=FRAME, timestamps_s=[0.0] * 4))
SHARED = item(pixels=pb.PixelTensor(shm=pb.ShmTensor(name="/x")))


@pytest.mark.parametrize(
    ("message", "error", "text"),
    [
        (pb.Item(encoded=b"x"), InvalidRequest, "modality 0 is unknown"),
        (pb.Item(modality=77, encoded=b"x"), InvalidRequest, "modality 77 is unknown"),  # type: ignore[arg-type]
        (item(), InvalidRequest, "no content"),
        (item(url="http://x"), UnsupportedContent, "takes no URLs"),
        (item(encoded=b"x", content_digest=b"123"), InvalidDigest, "has 3 bytes, needs 32"),
        (SHARED, TransportUnavailable, "shared memory"),
        (item(pixels=pb.PixelTensor()), InvalidRequest, "no source"),
        (tensor(99, [1]), PixelTensorMismatch, "dtype 99 is unknown"),
        (tensor(0, [1]), PixelTensorMismatch, "dtype 0 is unknown"),
        (tensor(shape=[2, 3]), PixelTensorMismatch, "has 1 bytes, .* needs 24"),
        (tensor(shape=[0, 3], data=b""), PixelTensorMismatch, "is empty"),
        # The product of so many takes hours.
        (tensor(shape=[2**63] * 200_000), PixelTensorMismatch, "has 200000 dim"),
        (tensor(data=b"1234"), PixelTensorMismatch, "has 0 dimensions"),
        (tensor(shape=[2**40, 2**40]), PixelTensorMismatch, "has 1 bytes"),
        (CLIP, InvalidRequest, "4 timestamps for 1 frames"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(message: pb.Item, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        convert.item_from_proto(message)


def test_deliveries_name_the_memory_that_the_caller_has_mapped() -> None:
    assert convert.requested_tier(pb.DELIVERY_UNSPECIFIED) is None
    assert convert.requested_tier(pb.DELIVERY_INLINE) is None
    assert convert.requested_tier(pb.DELIVERY_HOST) == "host"
    assert convert.requested_tier(pb.DELIVERY_DEVICE) == "device"
    with pytest.raises(InvalidRequest, match="delivery 42 is unknown"):
        convert.requested_tier(42)


@pytest.mark.parametrize("tier", ["host", "device"])
def test_placed_rows_are_described_and_not_sent(tier: TierName) -> None:
    rows = torch.randn(7, 48)
    clip = ClipFacts((0.0, 0.5), (Grid(1, 2, 14),))
    encoded = EncodedItem(b"k" * 32, b"d" * 32, Grid(1, 2, 14), rows, 2, clip)
    place = Location(b"a" * 16, 99, 3, 77, 256, tier)
    delivered = EncodeResult(PinnedRows(encoded), CacheTier.HOST, StageTimings(), 0.0)
    result = convert.result_event(0, delivered, place).result
    assert result.WhichOneof("rows") == "place"
    assert (result.place.arena_id, result.place.instance) == (b"a" * 16, 99)
    assert (result.place.slot_index, result.place.generation, result.place.offset_bytes) == (3, 77, 256)
    assert result.place.delivery == {"host": pb.DELIVERY_HOST, "device": pb.DELIVERY_DEVICE}[tier]
    assert result.rows_bytes == rows.nbytes
    assert list(result.timestamps_s) == [0.0, 0.5]
    assert list(result.chunk_grids) == [pb.GridTHW(t=1, h=2, w=14)]
