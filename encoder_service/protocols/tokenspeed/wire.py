"""Messages of gateways and prefill ranks as records: bytes in, values out, without state or I/O.

Owns what an item of a gateway means (SMG 1.13, ``vision_encoder.tokenspeed``), and a prefill rank's request
for rows (TokenSpeed 0.1.1, ``runtime/epd``), a message of 13 parts by ZMQ.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from encoder_service.errors import (
    GridMismatch,
    InvalidRequest,
    PixelTensorMismatch,
    TransportUnavailable,
    UnsupportedContent,
)
from encoder_service.ingest.identity import dtype_name
from encoder_service.ingest.pixel_segments import MAX_RANK
from encoder_service.rpc import convert
from encoder_service.towers.tower import Tower
from encoder_service.types import Grid, Item, Modality, PixelValues, RowsSpec
from vision_encoder.tokenspeed import common_pb2 as common
from vision_encoder.tokenspeed import tokenspeed_scheduler_pb2 as scheduler
from vision_encoder.v1 import encoder_pb2 as pb

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}

# -- items of a gateway --------------------------------------------------------------------------------

MODALITIES = {common.IMAGE: Modality.IMAGE, common.VIDEO: Modality.VIDEO}
# Names of the grid's tensor: Qwen's, then Kimi's.
GRID_TENSORS = {
    Modality.IMAGE: ("image_grid_thw", "grid_thws"),
    Modality.VIDEO: ("video_grid_thw", "grid_thws"),
}
GRID_FORMATS = {"int64": "<3q", "int32": "<3i", "uint32": "<3I"}
MAX_SIDE = 1 << 20
# Ranges of one item's placeholders: a clip has one or more for each frame.
MAX_RANGES = 65_536


def modality_of(message: scheduler.MultimodalItem, accepted: Collection[Modality]) -> Modality:
    """accepted: the tower's modalities. Raises UnsupportedContent."""
    modality = MODALITIES.get(message.modality)
    if modality is None or modality not in accepted:
        raise UnsupportedContent(f"modality {message.modality} is not taken, image and video are")
    return modality


def grid_of(message: scheduler.MultimodalItem, modality: Modality) -> Grid:
    """Raises InvalidRequest, GridMismatch."""
    tensors, names = message.model_specific_tensors, GRID_TENSORS[modality]
    name = next((name for name in names if name in tensors), None)
    if name is None:
        raise InvalidRequest(f"the item has no {' and no '.join(names)}")
    tensor = tensors[name]
    format_ = GRID_FORMATS.get(tensor.dtype)
    if format_ is None:
        raise InvalidRequest(f"{name} is {tensor.dtype[:32]!r}, needed is one of {', '.join(GRID_FORMATS)}")
    shape = tensor.shape[: MAX_RANK + 1]  # the message may have millions of dimensions
    if shape not in ([1, 3], [3]) or len(tensor.inline) != struct.calcsize(format_):
        raise GridMismatch(
            f"{name} has shape {shape} and {len(tensor.inline)} bytes inline, "
            f"needed is [1, 3] and {struct.calcsize(format_)}"
        )
    grid = Grid(*struct.unpack(format_, tensor.inline))
    if not all(1 <= side <= MAX_SIDE for side in grid):
        raise GridMismatch(f"{name} is {list(grid)}, allowed are sides from 1 to {MAX_SIDE}")
    return grid


def check_rows(message: scheduler.MultimodalItem, grid: Grid, tower: Tower, max_bytes: int) -> None:
    """Checks that the prompt has as many placeholders as the item will have rows, and that the rows fit into
    the send buffer of ``max_bytes``. Raises GridMismatch, InvalidRequest, TransportUnavailable."""
    tower.check_grid(grid)
    if len(message.placeholders) > MAX_RANGES:
        raise InvalidRequest(
            f"the item has {len(message.placeholders)} ranges of placeholders, at most {MAX_RANGES} are taken"
        )
    num_placeholders = sum(placeholders.length for placeholders in message.placeholders)
    num_rows = tower.num_rows(grid)
    if num_placeholders != num_rows:
        raise GridMismatch(
            f"the item has {num_placeholders} placeholders, grid {list(grid)} gives {num_rows} rows"
        )
    num_bytes = num_rows * tower.width * tower.dtype.itemsize
    if num_bytes > max_bytes:
        raise TransportUnavailable(
            f"the item's rows have {num_bytes} bytes, tokenspeed_send_bytes is {max_bytes}",
            found_bytes=num_bytes,
            max_bytes=max_bytes,
        )


def pixels_shape(tensor: scheduler.TensorData) -> tuple[torch.dtype, tuple[int, ...]]:
    """Raises PixelTensorMismatch."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise PixelTensorMismatch(
            f"encoder_input is {tensor.dtype[:32]!r}, needed is one of {', '.join(DTYPES)}"
        )
    if not 1 <= len(tensor.shape) <= MAX_RANK:
        raise PixelTensorMismatch(
            f"encoder_input has {len(tensor.shape)} dimensions, 1 to {MAX_RANK} are accepted"
        )
    return dtype, tuple(tensor.shape)


def segment_item(message: scheduler.MultimodalItem, modality: Modality, grid: Grid) -> pb.Item:
    """An item whose pixels are in a gateway's shared memory, as a message of the service's own contract.
    Raises PixelTensorMismatch."""
    tensor = message.encoder_input
    dtype, shape = pixels_shape(tensor)
    item = pb.Item(
        modality=convert.MODALITY_NUMBERS[modality],
        content_digest=message.content_hash,
        pixels=pb.PixelTensor(
            grid_thw=convert.grid_to_proto(grid),
            shm=pb.ShmTensor(
                name=tensor.shm.name.removeprefix("/"),
                dtype=convert.DTYPE_NUMBERS[dtype],
                shape=shape,
                offset_bytes=tensor.shm.offset,
            ),
        ),
    )
    segment = convert.segment_from_proto(item)
    if segment is not None and tensor.shm.nbytes != segment.num_bytes:
        raise PixelTensorMismatch(
            f"the segment has {tensor.shm.nbytes} bytes, shape {shape} of {dtype} needs {segment.num_bytes}",
            found_bytes=tensor.shm.nbytes,
            needed_bytes=segment.num_bytes,
        )
    return item


def inline_item(message: scheduler.MultimodalItem, modality: Modality, grid: Grid) -> Item:
    """An item whose pixels are in the message. Copies them. Raises PixelTensorMismatch."""
    tensor = message.encoder_input
    pixels = convert.tensor_of(tensor.inline, *pixels_shape(tensor))
    return Item(modality, PixelValues(pixels, grid), message.content_hash or None)


# -- requests of prefill ranks -------------------------------------------------------------------------

# The first part of the message in which a rank registers. Each request repeats what it says.
REGISTRATION = b"None"
NUM_PARTS = 13
# Of one part. ZMQ ends the connection of a peer that sends more.
MAX_PART_BYTES = 256
MAX_RANKS = 256
MAX_ROOM = (1 << 63) - 1
MAX_ROWS = (1 << 31) - 1
MAX_PORT = 65_535


def parse_count(part: bytes, name: str, most: int) -> int:
    """Raises InvalidRequest."""
    if not re.fullmatch(rb"[0-9]{1,20}", part) or int(part) > most:
        raise InvalidRequest(f"{name} is {part[:32]!r}, needed is a number from 0 to {most}")
    return int(part)


def parse_text(part: bytes) -> str:
    return part.decode("ascii", "replace")


@dataclass(frozen=True)
class RowsRequest:
    """A prefill rank's request for rows [row_start, row_start + num_rows) of the ``span`` rows of a room, and
    its memory for them.

    host, port: where the rank receives its status. session: its Mooncake engine, host:port. Both are as sent;
    ``zmq_push.AllowedReceivers`` decides whether rows may go there. main, deepstack: addresses. width: of a
    row without deepstack. num_ranks: how many ranks request rows of the room.
    """

    room: int
    host: str
    port: int
    session: str
    main: int
    deepstack: int
    num_rows: int
    width: int
    dtype: torch.dtype
    has_deepstack: bool
    num_ranks: int
    row_start: int
    span: int

    @classmethod
    def parse(cls, parts: Sequence[bytes]) -> Self:
        """Ignores parts after NUM_PARTS. Raises InvalidRequest."""
        if len(parts) < NUM_PARTS:
            raise InvalidRequest(f"the message has {len(parts)} parts, needed are {NUM_PARTS}")
        room, host, port, session, main, deepstack, rows, width, dtype, deep, ranks, start, span = parts[
            :NUM_PARTS
        ]
        for address in (main, deepstack):
            if len(address) != 8:
                raise InvalidRequest(f"an address has {len(address)} bytes, needed are 8")
        name = parse_text(dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise InvalidRequest(f"dtype {name!r} is not known, {', '.join(DTYPES)} are")
        if deep not in (b"0", b"1"):
            raise InvalidRequest(f"has_deepstack is {deep!r}, needed is 0 or 1")
        num_ranks = parse_count(ranks, "the number of ranks", MAX_RANKS)
        if not num_ranks:
            raise InvalidRequest("the number of ranks is 0, needed is at least 1")
        return cls(
            room=parse_count(room, "the room", MAX_ROOM),
            host=parse_text(host),
            port=parse_count(port, "the port", MAX_PORT),
            session=parse_text(session),
            main=int.from_bytes(main, "little"),
            deepstack=int.from_bytes(deepstack, "little"),
            num_rows=parse_count(rows, "the number of rows", MAX_ROWS),
            width=parse_count(width, "the width", MAX_ROWS),
            dtype=DTYPES[name],
            has_deepstack=deep == b"1",
            num_ranks=num_ranks,
            row_start=parse_count(start, "the first row", MAX_ROWS),
            span=parse_count(span, "the span", MAX_ROWS),
        )

    def check(self, spec: RowsSpec) -> None:
        """Checks that the rank's memory is for rows of ``spec``. Raises TransportUnavailable."""
        width = spec.width // (1 + spec.num_deepstack_levels)
        for what, found, needed in (
            ("row width", self.width, width),
            ("row count", self.span, spec.num_rows),
            ("deepstack", self.has_deepstack, spec.num_deepstack_levels > 0),
        ):
            if found != needed:
                raise TransportUnavailable(f"the receiver's {what} is {found}, the encoder's is {needed}")
        if self.row_start + self.num_rows > self.span:
            raise TransportUnavailable(
                f"rows {self.row_start} to {self.row_start + self.num_rows} are wanted of {self.span}"
            )
        if self.num_rows and not (self.main and (self.deepstack or not self.has_deepstack)):
            raise TransportUnavailable("the receiver has no memory for its rows")


def check_requests(requests: Sequence[RowsRequest], spec: RowsSpec) -> None:
    """Checks the requests of one room's ranks, which have to agree. Raises TransportUnavailable."""
    first = requests[0]
    for request in requests:
        request.check(spec)
        if (request.dtype, request.num_ranks) != (first.dtype, first.num_ranks):
            raise TransportUnavailable(
                f"one rank wants {first.dtype} for {first.num_ranks} ranks, another {request.dtype} for "
                f"{request.num_ranks}"
            )


# -- statuses for prefill ranks ------------------------------------------------------------------------

SUCCESS, FAILED = b"5", b"0"
# The service is one rank.
SERVICE_RANK = b"0"


def status_message(room: int, status: bytes) -> list[bytes]:
    """The message that tells a rank that its room has ended."""
    return [str(room).encode(), status, SERVICE_RANK]
