"""Between protobuf messages and the service's records.

Owns the meaning of every field on the wire. Raises InvalidInput errors that name the field; knows nothing
of calls or status codes. Large rows never pass through a protobuf object: ``chunk_event`` writes the wire
form of an ItemEvent around the rows' own bytes, which costs one copy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch
from google.protobuf.message import Message

from encoder_service.errors import (
    InvalidRequest,
    PixelTensorMismatch,
    TransportUnavailable,
    UnsupportedContent,
)
from encoder_service.ingest.identity import check_digest
from encoder_service.pipeline import Delivered
from encoder_service.store.embedding_store import Tier
from encoder_service.store.leases import MAX_READERS
from encoder_service.transport.pixel_layout import PixelLayout
from encoder_service.transport.pixel_segments import SegmentRef
from encoder_service.transport.shared_memory import LeasedRows, LeaseTerms
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
from vision_encoder.v1 import encoder_pb2 as pb

PROTOCOL_VERSION = 1
NO_OPTIONS = PreprocessOptions()
MIN_PROTOCOL_VERSION = 1

MODALITIES: dict[int, Modality] = {pb.MODALITY_IMAGE: Modality.IMAGE, pb.MODALITY_VIDEO: Modality.VIDEO}
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
    CacheTier.SHARED: pb.CACHE_TIER_SHARED,
}


INLINE = (pb.DELIVERY_UNSPECIFIED, pb.DELIVERY_INLINE)
DELIVERY_BY_ARENA: dict[str, pb.Delivery.ValueType] = {
    "host": pb.DELIVERY_HOST_SHM,
    "device": pb.DELIVERY_DEVICE_LEASE,
}


def dtype_to_proto(dtype: torch.dtype) -> pb.DType.ValueType:
    """The wire's name of a dtype."""
    return DTYPE_NUMBERS[dtype]


def grid_to_proto(grid: Grid) -> pb.GridTHW:
    return pb.GridTHW(t=grid.t, h=grid.h, w=grid.w)


def grid_from_proto(grid: pb.GridTHW) -> Grid:
    return Grid(grid.t, grid.h, grid.w)


def check_delivery(delivery: int, offered: Collection[int] = INLINE) -> None:
    """Raises TransportUnavailable for deliveries this server does not offer, InvalidRequest for unknown."""
    if delivery in INLINE or delivery in offered:
        return
    if delivery in pb.Delivery.values():
        name = pb.Delivery.Name(pb.Delivery.ValueType(delivery))
        raise TransportUnavailable(f"{name} is not offered here; ask for inline rows", delivery=name)
    raise InvalidRequest(f"delivery {delivery} is unknown, the largest known is {max(pb.Delivery.values())}")


def tier_to_read(delivery: int) -> Tier:
    """Where rows have to be for a delivery: chunks are cut on the host."""
    return "device" if delivery == pb.DELIVERY_DEVICE_LEASE else "host"


def lease_terms(options: pb.LeaseOptions, tier: Tier | None = None) -> LeaseTerms:
    """What a lease is asked for; owner_id is the broker's text in UTF-8, not looked up here. Raises
    InvalidRequest for more readers than a lease can have."""
    if options.num_readers > MAX_READERS:
        raise InvalidRequest(
            f"a lease for {options.num_readers} readers was asked for, at most {MAX_READERS} are possible",
            found=options.num_readers,
            allowed=MAX_READERS,
        )
    return LeaseTerms(
        owner_id(options.owner_id),
        options.num_readers or 1,
        lease_s(options.lease_ms),
        tier,
    )


def owner_id(named: bytes) -> str:
    """The broker's text for a connection; not looked up here."""
    return named.decode(errors="replace")


def lease_s(lease_ms: int) -> float | None:
    """Seconds of a lease; None for the server's default."""
    return lease_ms / 1e3 if lease_ms else None


def item_from_proto(
    message: pb.Item, shared_pixels: torch.Tensor | None = None, fetched: bytes | None = None
) -> Item:
    """An item with its content. May copy a pixel tensor: not for the event loop when that is large.
    shared_pixels: what the segment held that the item names, where it names one; fetched: what lay at the
    item's URL, where it has one.

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
    content = content_from_proto(message, shared_pixels, fetched)
    options = options_from_proto(message.options) if message.HasField("options") else NO_OPTIONS
    return Item(modality, content, digest, options)


def content_from_proto(
    message: pb.Item, shared_pixels: torch.Tensor | None = None, fetched: bytes | None = None
) -> Content:
    """The item's content. Raises as ``item_from_proto``."""
    match message.WhichOneof("content"):
        case "encoded":
            return EncodedFile(message.encoded)
        case "pixels":
            return pixels_from_proto(message.pixels, shared_pixels)
        case "frames":
            if message.modality != pb.MODALITY_VIDEO:
                raise InvalidRequest("frames are a clip's content: set the modality to video")
            return frames_from_proto(message.frames, shared_pixels)
        case "digest_only":
            return DigestOnly()
        case "url":
            if fetched is not None:
                return EncodedFile(fetched)
            raise UnsupportedContent("this server takes no URLs; send the bytes")
        case _:
            raise InvalidRequest("the item has no content: set encoded, pixels, frames or digest_only")


def options_from_proto(message: pb.PreprocessOptions) -> PreprocessOptions:
    """The options that were set, the others None."""
    given = {field.name: value for field, value in message.ListFields()}
    return PreprocessOptions(**given)


def shm_of(message: pb.Item) -> pb.ShmTensor | None:
    """The tensor in shared memory that is an item's content, or None."""
    kind = message.WhichOneof("content")
    if kind not in ("pixels", "frames"):
        return None
    holder = message.pixels if kind == "pixels" else message.frames
    return holder.shm if holder.WhichOneof("source") == "shm" else None


def segment_from_proto(message: pb.Item) -> SegmentRef | None:
    """The segment of shared memory that an item names; None for any other content."""
    shm = shm_of(message)
    if shm is None:
        return None
    return SegmentRef(shm.name, shm.segment_id, owner_id(shm.owner_id), shm.unlink_after_read)


def layout_from_proto(shm: pb.ShmTensor) -> PixelLayout:
    """Where in its segment a tensor is said to lie; not checked. Raises PixelTensorMismatch."""
    return PixelLayout(pixel_dtype(shm.dtype), tuple(shm.shape), shm.offset_bytes, tuple(shm.stride_bytes))


def pixel_dtype(number: int) -> torch.dtype:
    """Raises PixelTensorMismatch."""
    dtype = DTYPES.get(number)
    if dtype is None:
        raise PixelTensorMismatch(f"pixel tensor dtype {number} is unknown", dtype=number)
    return dtype


def pixels_from_proto(message: pb.PixelTensor, shared: torch.Tensor | None = None) -> PixelValues:
    """A pixel tensor of its own memory. Raises PixelTensorMismatch, TransportUnavailable."""
    source = message.WhichOneof("source")
    if source == "shm":
        if shared is not None:
            return PixelValues(shared, grid_from_proto(message.grid_thw))
        raise TransportUnavailable("pixel tensors in shared memory are not taken here; send them inline")
    if source is None:
        raise InvalidRequest("the pixel tensor has no source: set inline or shm")
    return PixelValues(inline_tensor(message.inline), grid_from_proto(message.grid_thw))


def frames_from_proto(message: pb.FrameArray, shared: torch.Tensor | None = None) -> FrameArray:
    """Frames of their own memory. Raises PixelTensorMismatch, TransportUnavailable, InvalidRequest."""
    source = message.WhichOneof("source")
    if source is None:
        raise InvalidRequest("the frames have no source: set inline or shm")
    if source == "shm" and shared is None:
        raise TransportUnavailable("frames in shared memory are not taken here; send them inline")
    tensor = shared if source == "shm" and shared is not None else inline_tensor(message.inline)
    timestamps_s = tuple(message.timestamps_s) or None
    if timestamps_s is not None and message.fps:
        raise InvalidRequest(
            f"frames have {message.fps} fps and {len(timestamps_s)} timestamps, needed is one of the two"
        )
    return FrameArray(tensor, message.fps or None, timestamps_s)


def inline_tensor(tensor: pb.InlineTensor) -> torch.Tensor:
    """A tensor of its own memory. Raises PixelTensorMismatch."""
    dtype = pixel_dtype(tensor.dtype)
    shape = tuple(tensor.shape)
    data = tensor.data  # read once: every access copies
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
    delivered: Delivered,
    chunk_bytes: int,
    leased: LeasedRows | None = None,
    delivery_ms: float = 0.0,
) -> pb.ItemEvent:
    """Everything about an item's rows but the rows: those are where the lease says, or follow inline in
    chunks of ``chunk_bytes``. delivery_ms: since they were ready."""
    spec = delivered.encoded.spec
    result = pb.ItemResult(
        key=delivered.encoded.key,
        content_digest=delivered.encoded.content_digest,
        grid_thw=grid_to_proto(delivered.encoded.grid),
        num_rows=spec.num_rows,
        width=spec.width,
        dtype=dtype_to_proto(spec.dtype),
        num_deepstack_levels=spec.num_deepstack_levels,
        tier=TIERS[delivered.tier],
        timings=pb.StageTimings(**delivered.timings.as_mapping(), delivery_ms=delivery_ms),
        rows_bytes=spec.num_bytes,
    )
    if (clip := delivered.encoded.clip) is not None:
        result.timestamps_s.extend(clip.timestamps_s)
        result.chunk_grids.extend(map(grid_to_proto, clip.chunk_grids))
    if leased is None:
        result.inline.num_chunks = math.ceil(spec.num_bytes / chunk_bytes)
    else:
        place_rows(result, leased)
    return pb.ItemEvent(item_index=index, result=result)


def place_rows(result: pb.ItemResult, leased: LeasedRows) -> None:
    """Says in the result where its rows lie."""
    rows = result.lease if leased.arena.kind == "device" else result.host
    rows.arena_id = leased.arena.arena_id
    rows.slot_index = leased.slot_index
    rows.offset_bytes = leased.offset_bytes
    rows.generation = leased.generation
    rows.lease_id = leased.lease_id
    rows.expires_at_unix_ms = leased.expires_at_unix_ms
    if leased.arena.kind == "device":
        result.lease.device_uuid = leased.arena.device_uuid
        result.lease.dtype = result.dtype
        result.lease.shape.extend((result.num_rows, result.width))


def chunk_events(index: int, rows: torch.Tensor, chunk_bytes: int) -> Iterator[bytes]:
    """The rows [R, W] of item ``index`` as serialised ItemEvents, in order of offset."""
    payload = rows.reshape(-1).view(torch.uint8).numpy().data
    for offset in range(0, len(payload), chunk_bytes):
        yield chunk_event(index, offset, payload[offset : offset + chunk_bytes])


def chunk_event(index: int, offset_bytes: int, data: memoryview) -> bytes:
    """The wire form of ``ItemEvent{item_index, chunk{offset_bytes, data}}``: field tags and lengths as the
    protobuf encoding defines them (protobuf.dev/programming-guides/encoding), then the bytes themselves.
    Zero-valued scalars are left out, as proto3 does."""
    inner = b"" if offset_bytes == 0 else tag(1, 0) + varint(offset_bytes)
    inner += tag(2, 2) + varint(len(data))
    head = b"" if index == 0 else tag(1, 0) + varint(index)
    head += tag(3, 2) + varint(len(inner) + len(data))
    return b"".join((head, inner, data))


def tag(field: int, wire_type: int) -> bytes:
    return varint(field << 3 | wire_type)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def serialize_event(event: Message | bytes) -> bytes:
    """The stream's serializer: chunks are written already."""
    return event if isinstance(event, bytes) else event.SerializeToString()
