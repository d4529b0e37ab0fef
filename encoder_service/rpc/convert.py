"""Conversion between protobuf messages and the service's records.

Owns the meaning of every field on the wire. Raises InvalidInput errors that name the field. Knows nothing of
calls or status codes. Rows never pass through a protobuf object: ``chunk_event`` writes the wire form of an
ItemEvent around their bytes, which costs one copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from google.protobuf.message import Message

from encoder_service.errors import (
    InvalidRequest,
    PixelTensorMismatch,
    TransportUnavailable,
    UnsupportedContent,
)
from encoder_service.ingest.identity import check_digest
from encoder_service.ingest.pixel_segments import SegmentTensor, check_rank
from encoder_service.pipeline import EncodeResult
from encoder_service.store.arena import TierName
from encoder_service.store.embedding_store import Location
from encoder_service.types import (
    CacheTier,
    Content,
    DigestOnly,
    EncodedFile,
    FrameArray,
    Grid,
    Item,
    Modality,
    PixelValues,
    PreprocessOptions,
)
from vision_encoder.layout.varint import encode_varint
from vision_encoder.v1 import encoder_pb2 as pb

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
MAX_ITEMS_PER_REQUEST = 256
# Bytes of rows in one message of a stream. The message fits into the smallest ``max_message_bytes``.
CHUNK_BYTES = (1 << 20) - 4096

MODALITY_NUMBERS = {Modality.IMAGE: pb.MODALITY_IMAGE, Modality.VIDEO: pb.MODALITY_VIDEO}
MODALITIES: dict[int, Modality] = {number: modality for modality, number in MODALITY_NUMBERS.items()}
DTYPES: dict[int, torch.dtype] = {
    pb.DTYPE_FLOAT32: torch.float32,
    pb.DTYPE_BFLOAT16: torch.bfloat16,
    pb.DTYPE_FLOAT16: torch.float16,
    pb.DTYPE_UINT8: torch.uint8,
}
DTYPE_NUMBERS: dict[torch.dtype, pb.DType.ValueType] = {
    dtype: pb.DType.ValueType(number) for number, dtype in DTYPES.items()
}
TIERS: dict[CacheTier, pb.CacheTier.ValueType] = {
    CacheTier.MISS: pb.CACHE_TIER_MISS,
    CacheTier.IN_FLIGHT: pb.CACHE_TIER_IN_FLIGHT,
    CacheTier.DEVICE: pb.CACHE_TIER_DEVICE,
    CacheTier.HOST: pb.CACHE_TIER_HOST,
}
TIERS_BY_DELIVERY: dict[int, TierName | None] = {
    pb.DELIVERY_UNSPECIFIED: None,
    pb.DELIVERY_INLINE: None,
    pb.DELIVERY_HOST: "host",
    pb.DELIVERY_DEVICE: "device",
}
DELIVERY_BY_TIER: dict[TierName, pb.Delivery.ValueType] = {
    "host": pb.DELIVERY_HOST,
    "device": pb.DELIVERY_DEVICE,
}


def grid_to_proto(grid: Grid) -> pb.GridTHW:
    return pb.GridTHW(t=grid.t, h=grid.h, w=grid.w)


def requested_tier(delivery: int) -> TierName | None:
    """The tier whose memory the caller has mapped; None for inline rows. Raises InvalidRequest."""
    if delivery not in TIERS_BY_DELIVERY:
        raise InvalidRequest(f"delivery {delivery} is unknown, the largest known is {max(TIERS_BY_DELIVERY)}")
    return TIERS_BY_DELIVERY[delivery]


def item_from_proto(
    message: pb.Item, segment: torch.Tensor | None = None, fetched: bytes | None = None
) -> Item:
    """An item with its content. segment: the tensor in the shared memory segment that the item names.
    fetched: the content of its URL. Copies an inline tensor, so a large one must not be converted on the
    event loop.

    Raises InvalidRequest (modality, missing content), InvalidDigest, InvalidOption, UnsupportedContent
    (URL), TransportUnavailable (shared memory), PixelTensorMismatch.
    """
    modality = MODALITIES.get(message.modality)
    if modality is None:
        known = ", ".join(str(value) for value in MODALITIES)
        raise InvalidRequest(f"modality {message.modality} is unknown, known are {known}")
    digest = message.content_digest or None
    if digest is not None:
        check_digest(digest)
    content = content_from_proto(message, segment, fetched)
    options = {field.name: value for field, value in message.options.ListFields()}
    return Item(modality, content, digest, PreprocessOptions(**options))


def content_from_proto(
    message: pb.Item, segment: torch.Tensor | None = None, fetched: bytes | None = None
) -> Content:
    """The item's content. Raises as ``item_from_proto``."""
    match message.WhichOneof("content"):
        case "encoded":
            return EncodedFile(message.encoded)
        case "pixels":
            return pixels_from_proto(message.pixels, segment)
        case "frames":
            if message.modality != pb.MODALITY_VIDEO:
                raise InvalidRequest("frames are a clip's content: set the modality to video")
            return frames_from_proto(message.frames)
        case "digest_only":
            return DigestOnly()
        case "url":
            if fetched is not None:
                return EncodedFile(fetched)
            raise UnsupportedContent("this server takes no URLs (its url_allow is empty); send the bytes")
        case _:
            raise InvalidRequest("the item has no content: set encoded, pixels, frames or digest_only")


def segment_from_proto(message: pb.Item) -> SegmentTensor | None:
    """The tensor in shared memory that an item names; None for other content. Raises PixelTensorMismatch."""
    if message.WhichOneof("content") != "pixels" or message.pixels.WhichOneof("source") != "shm":
        return None
    shm = message.pixels.shm
    return SegmentTensor(shm.name, pixel_dtype(shm.dtype), shape_of(shm), shm.offset_bytes)


def pixel_dtype(number: int) -> torch.dtype:
    """The torch dtype of a wire number. Raises PixelTensorMismatch for an unknown number."""
    dtype = DTYPES.get(number)
    if dtype is None:
        raise PixelTensorMismatch(f"pixel tensor dtype {number} is unknown", dtype=number)
    return dtype


def pixels_from_proto(message: pb.PixelTensor, segment: torch.Tensor | None = None) -> PixelValues:
    """A pixel tensor that does not share the message's memory. Raises PixelTensorMismatch,
    TransportUnavailable, InvalidRequest."""
    match message.WhichOneof("source"):
        case "inline":
            tensor = inline_tensor(message.inline)
        case "shm" if segment is not None:
            tensor = segment
        case "shm":
            raise TransportUnavailable(
                "this server takes no pixel tensors in shared memory; send them inline"
            )
        case _:
            raise InvalidRequest("the pixel tensor has no source: set inline or shm")
    grid = message.grid_thw
    return PixelValues(tensor, Grid(grid.t, grid.h, grid.w))


def frames_from_proto(message: pb.FrameArray) -> FrameArray:
    """Frames that do not share the message's memory. Raises PixelTensorMismatch, InvalidRequest."""
    if not message.HasField("inline"):
        raise InvalidRequest("the frames have no content: set inline")
    frames_THWC = inline_tensor(message.inline)
    if len(message.timestamps_s) > len(frames_THWC):
        raise InvalidRequest(
            f"there are {len(message.timestamps_s)} timestamps for {len(frames_THWC)} frames; send one per "
            "frame"
        )
    timestamps_s = tuple(message.timestamps_s) or None
    if timestamps_s is not None and message.fps:
        raise InvalidRequest(
            f"the frames have {message.fps} fps and {len(timestamps_s)} timestamps; send only one of the two"
        )
    return FrameArray(frames_THWC, message.fps or None, timestamps_s)


def inline_tensor(tensor: pb.InlineTensor) -> torch.Tensor:
    """A copy of an inline tensor. Raises PixelTensorMismatch."""
    # Every access to ``data`` copies it.
    return tensor_of(tensor.data, pixel_dtype(tensor.dtype), shape_of(tensor))


def shape_of(tensor: pb.InlineTensor | pb.ShmTensor) -> tuple[int, ...]:
    """Raises PixelTensorMismatch for too many dimensions."""
    check_rank(len(tensor.shape))  # first: the product of thousands of large numbers takes minutes
    return tuple(tensor.shape)


def tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that owns its memory. Raises PixelTensorMismatch."""
    needed = math.prod(shape) * dtype.itemsize
    if len(data) != needed:
        raise PixelTensorMismatch(
            f"pixel tensor has {len(data)} bytes, shape {shape} of {dtype} needs {needed}",
            found_bytes=len(data),
            needed_bytes=needed,
        )
    if not data:
        raise PixelTensorMismatch(f"pixel tensor of shape {shape} is empty")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def result_event(
    index: int,
    delivered: EncodeResult,
    place: Location | None = None,
    delivery_ms: float = 0.0,
) -> pb.ItemEvent:
    """The description of an item's rows, without the rows. They are at ``place``. If it is None, they follow
    inline in chunks of CHUNK_BYTES. delivery_ms: milliseconds since the rows were ready."""
    encoded, spec = delivered.encoded, delivered.encoded.spec
    result = pb.ItemResult(
        key=encoded.key,
        content_digest=encoded.content_digest,
        grid_thw=grid_to_proto(encoded.grid),
        num_rows=spec.num_rows,
        width=spec.width,
        dtype=DTYPE_NUMBERS[spec.dtype],
        num_deepstack_levels=spec.num_deepstack_levels,
        tier=TIERS[delivered.tier],
        timings=pb.StageTimings(**vars(delivered.timings), delivery_ms=delivery_ms),
        rows_bytes=spec.num_bytes,
    )
    if (clip := encoded.clip) is not None:
        result.timestamps_s.extend(clip.timestamps_s)
        result.chunk_grids.extend(map(grid_to_proto, clip.chunk_grids))
    if place is None:
        result.inline.num_chunks = math.ceil(spec.num_bytes / CHUNK_BYTES)
    else:
        result.place.arena_id = place.arena_id
        result.place.instance = place.instance
        result.place.slot_index = place.slot_index
        result.place.generation = place.generation
        result.place.offset_bytes = place.offset_bytes
        result.place.delivery = DELIVERY_BY_TIER[place.tier]
    return pb.ItemEvent(item_index=index, result=result)


def chunk_events(index: int, rows: torch.Tensor) -> Iterator[bytes]:
    """The rows [R, W] of item ``index`` as serialised ItemEvents, in order of offset."""
    payload = rows.reshape(-1).view(torch.uint8).numpy().data
    for offset in range(0, len(payload), CHUNK_BYTES):
        yield chunk_event(index, offset, payload[offset : offset + CHUNK_BYTES])


def chunk_event(index: int, offset_bytes: int, data: memoryview) -> bytes:
    """The wire form of ``ItemEvent{item_index, chunk{offset_bytes, data}}``: field tags and lengths as the
    protobuf encoding defines them (protobuf.dev/programming-guides/encoding), followed by the bytes. Scalars
    that are zero are left out, as in proto3."""
    inner = b"" if offset_bytes == 0 else tag(1, 0) + encode_varint(offset_bytes)
    inner += tag(2, 2) + encode_varint(len(data))
    head = b"" if index == 0 else tag(1, 0) + encode_varint(index)
    head += tag(3, 2) + encode_varint(len(inner) + len(data))
    return b"".join((head, inner, data))


def tag(field: int, wire_type: int) -> bytes:
    return encode_varint(field << 3 | wire_type)


def serialize_event(event: Message | bytes) -> bytes:
    """The serialiser of the stream. Chunks are already serialised."""
    return event if isinstance(event, bytes) else event.SerializeToString()
