"""TokenSpeed's and SMG's messages as records."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.errors import (
    GridMismatch,
    InvalidRequest,
    PixelTensorMismatch,
    TransportUnavailable,
    UnsupportedContent,
    VisionEncoderError,
)
from encoder_service.protocols.tokenspeed import wire
from encoder_service.types import Grid, Modality, PixelValues, RowsSpec
from tests.fakes import FakeTower
from tests.integration.tokenspeed import GRID, image
from vision_encoder.tokenspeed import common_pb2 as common
from vision_encoder.tokenspeed import tokenspeed_scheduler_pb2 as scheduler

# As TokenSpeed 0.1.1's receiver sends it.
PARTS = [
    *(b"8232471665173244710", b"10.0.0.7", b"41234", b"10.0.0.7:15499"),
    *((0x7F6CA27FD010).to_bytes(8, "little"), (0x7F6CA2800000).to_bytes(8, "little")),
    *(b"35", b"4096", b"torch.bfloat16", b"1", b"2", b"35", b"70"),
]
REQUEST = wire.RowsRequest(
    room=8232471665173244710,
    host="10.0.0.7",
    port=41234,
    session="10.0.0.7:15499",
    main=0x7F6CA27FD010,
    deepstack=0x7F6CA2800000,
    num_rows=35,
    width=4096,
    dtype=torch.bfloat16,
    has_deepstack=True,
    num_ranks=2,
    row_start=35,
    span=70,
)
SPEC = RowsSpec(num_rows=70, width=4096 * 3, dtype=torch.float32, num_deepstack_levels=2)
NUMBERS = st.from_regex(rb"[0-9]{1,21}", fullmatch=True)


def test_a_request_of_a_prefill_rank() -> None:
    assert wire.RowsRequest.parse([*PARTS, b"of a later version"]) == REQUEST
    assert wire.RowsRequest.parse([*PARTS[:8], b"bfloat16", *PARTS[9:]]) == REQUEST
    with pytest.raises(InvalidRequest, match="has 12 parts, needed are 13"):
        wire.RowsRequest.parse(PARTS[:12])


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (0, b"-1", "room is b'-1', needed is a number from 0"),
        (4, b"1234", "address has 4 bytes, needed are 8"),
        (8, b"int4", "dtype 'int4' is not known"),
        (10, b"0", "needed is at least 1"),
        (10, b"257", "number of ranks is b'257', needed is a number from 0 to 256"),
    ],
)
def test_p33_broken_parts_are_refused(index: int, value: bytes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        wire.RowsRequest.parse([*PARTS[:index], value, *PARTS[index + 1 :]])


@given(st.dictionaries(st.integers(0, 12), NUMBERS | st.binary(max_size=24)))
def test_p33_a_request_is_read_as_it_was_sent_or_refused(changed: dict[int, bytes]) -> None:
    parts = [changed.get(index, part) for index, part in enumerate(PARTS)]
    with contextlib.suppress(InvalidRequest):
        request = wire.RowsRequest.parse(parts)
        numbers = (request.room, request.port, request.num_rows, request.width, request.num_ranks)
        assert (*numbers, request.row_start, request.span) == tuple(
            int(parts[index]) for index in (0, 2, 6, 7, 10, 11, 12)
        )
        assert (request.main.to_bytes(8, "little"), request.deepstack.to_bytes(8, "little")) == (*parts[4:6],)
        assert request.room < 1 << 63
        assert 1 <= request.num_ranks <= 256
        assert max(request.num_rows, request.width, request.row_start, request.span) < 1 << 31


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"width": 4097}, "row width is 4097, the encoder's is 4096"),
        ({"span": 69}, "row count is 69, the encoder's is 70"),
        ({"row_start": 36}, "rows 36 to 71 are wanted of 70"),
        ({"has_deepstack": False}, "deepstack is False, the encoder's is True"),
        ({"main": 0}, "no memory"),
        ({"deepstack": 0}, "no memory"),
        ({"dtype": torch.float16}, "one rank wants torch.bfloat16 for 2 ranks, another torch.float16 for 2"),
        ({"num_ranks": 3}, "another torch.bfloat16 for 3"),
    ],
)
def test_p22_memory_for_other_rows_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(TransportUnavailable, match=text):
        wire.check_requests([REQUEST, replace(REQUEST, **changed)], SPEC)
    wire.check_requests([REQUEST, replace(REQUEST, num_rows=0, row_start=70, main=0, deepstack=0)], SPEC)


# -- items of a gateway --------------------------------------------------------------------------------

PIXELS = torch.arange(96 * 16, dtype=torch.float32).view(96, 16)
TENSORS = st.builds(
    scheduler.TensorData,
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "int32", "int8", ""]),
    shape=st.lists(st.sampled_from([0, 1, 2, 3, (1 << 32) - 1]), max_size=10),
    inline=st.binary(max_size=24),
)


def item_with(name: str, dtype: str, shape: list[int], data: bytes) -> scheduler.MultimodalItem:
    item = scheduler.MultimodalItem()
    item.model_specific_tensors[name].CopyFrom(scheduler.TensorData(dtype=dtype, shape=shape, inline=data))
    return item


@pytest.mark.parametrize(
    ("name", "modality"),
    [("image_grid_thw", Modality.IMAGE), ("video_grid_thw", Modality.VIDEO), ("grid_thws", Modality.IMAGE)],
)
def test_grids_have_their_models_names(name: str, modality: Modality) -> None:
    item = item_with(name, "int64", [1, 3], struct.pack("<3q", 4, 10, 14))
    assert wire.grid_of(item, modality) == Grid(4, 10, 14)
    item = item_with(name, "uint32", [3], struct.pack("<3I", 4, 10, 14))
    assert wire.grid_of(item, modality) == Grid(4, 10, 14)


@pytest.mark.parametrize(
    ("item", "error", "text"),
    [
        (scheduler.MultimodalItem(), InvalidRequest, "no image_grid_thw and no grid_thws"),
        (item_with("grid_thws", "int64", [2, 3], bytes(48)), GridMismatch, "48 bytes inline"),
        (item_with("grid_thws", "int64", [1, 3], bytes(16)), GridMismatch, r"needed is \[1, 3\] and 24"),
        (item_with("grid_thws", "int64", [1, 3], struct.pack("<3q", 1, -8, 2)), GridMismatch, r"1, -8, 2"),
        (item_with("grid_thws", "int64", [1, 3], struct.pack("<3q", 1, 2, 1 << 40)), GridMismatch, "1048576"),
        (item_with("grid_thws", "bool", [1, 3], b"123"), InvalidRequest, "is 'bool'"),
    ],
)
def test_p33_other_grids_are_refused(
    item: scheduler.MultimodalItem, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        wire.grid_of(item, Modality.IMAGE)


def test_p46_a_shape_of_many_dimensions_is_not_copied() -> None:
    item = item_with("image_grid_thw", "int64", [1] * 1_000_000, bytes(24))
    tracemalloc.start()
    with pytest.raises(GridMismatch):
        wire.grid_of(item, Modality.IMAGE)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize("modality", [common.AUDIO, common.VIDEO])
def test_modalities_that_the_tower_lacks_are_refused(modality: common.Modality.ValueType) -> None:
    with pytest.raises(UnsupportedContent, match=f"modality {modality} is not taken"):
        wire.modality_of(scheduler.MultimodalItem(modality=modality), [Modality.IMAGE])


def test_p33_the_prompt_has_a_placeholder_for_each_row() -> None:
    tower, item = FakeTower(), image(PIXELS)
    wire.check_rows(item, GRID, tower, 1 << 20)
    num_bytes = 24 * tower.width * 4
    with pytest.raises(TransportUnavailable, match=f"have {num_bytes} bytes, tokenspeed_send_bytes is 10"):
        wire.check_rows(item, GRID, tower, 10)
    item.placeholders[0].length -= 1
    with pytest.raises(GridMismatch, match=r"has 23 placeholders, grid \[1, 8, 12\] gives 24 rows"):
        wire.check_rows(item, GRID, tower, 1 << 20)
    item.placeholders.extend([scheduler.PlaceholderRange()] * 65_536)
    with pytest.raises(InvalidRequest, match="65537 ranges of placeholders, at most 65536"):
        wire.check_rows(item, GRID, tower, 1 << 20)


def test_pixels_of_an_item() -> None:
    message = image(PIXELS)
    item = wire.inline_item(message, Modality.IMAGE, GRID)
    assert (item.modality, item.content_digest) == (Modality.IMAGE, message.content_hash)
    assert isinstance(item.content, PixelValues)
    assert torch.equal(item.content.pixel_values, PIXELS)
    message.encoder_input.shm.CopyFrom(common.ShmHandle(name="/smg-1", offset=32, nbytes=PIXELS.nbytes))
    segment = wire.segment_item(message, Modality.IMAGE, GRID).pixels.shm
    assert (segment.name, segment.offset_bytes, *segment.shape) == ("smg-1", 32, 96, 16)
    message.encoder_input.shm.nbytes -= 1
    with pytest.raises(PixelTensorMismatch, match=f"has {PIXELS.nbytes - 1} bytes"):
        wire.segment_item(message, Modality.IMAGE, GRID)


@settings(deadline=None)
@given(TENSORS, TENSORS)
def test_p33_any_tensors_are_read_or_refused(
    grid: scheduler.TensorData, pixels: scheduler.TensorData
) -> None:
    message = image(PIXELS)
    message.model_specific_tensors["image_grid_thw"].CopyFrom(grid)
    with contextlib.suppress(VisionEncoderError):
        assert min(wire.grid_of(message, Modality.IMAGE)) >= 1
    message.encoder_input.CopyFrom(pixels)
    with contextlib.suppress(VisionEncoderError):
        wire.inline_item(message, Modality.IMAGE, GRID)
    message.encoder_input.shm.CopyFrom(common.ShmHandle(name="smg-1", nbytes=12))
    with contextlib.suppress(VisionEncoderError):
        wire.segment_item(message, Modality.IMAGE, GRID)
