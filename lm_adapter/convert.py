"""Conversion between the adapter's records and the wire's messages.

Owns the names of enum values and the packing of items. Results are validated in ``assembly``, not here.
"""

from __future__ import annotations

from operator import attrgetter

from lm_adapter.errors import InvalidRequest, ItemFailed
from lm_adapter.items import (
    ClipItem,
    DigestItem,
    FramesItem,
    Grid,
    ImageItem,
    Item,
    Modality,
    PixelItem,
    PreprocessOptions,
    UrlItem,
)
from lm_adapter.types import (
    CacheTier,
    KeyState,
    KeyStatus,
    Limits,
    ModelInfo,
    PrefetchStatus,
    ServerInfo,
    StageTimings,
    TransportInfo,
)
from vision_encoder.v1 import encoder_pb2 as pb

_MODALITIES = {Modality.IMAGE: pb.MODALITY_IMAGE, Modality.VIDEO: pb.MODALITY_VIDEO}
_MODALITY_OF = {number: modality for modality, number in _MODALITIES.items()}
_DTYPES = {
    "float32": pb.DTYPE_FLOAT32,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "float16": pb.DTYPE_FLOAT16,
    "uint8": pb.DTYPE_UINT8,
}
_DTYPE_OF: dict[int, str] = {number: name for name, number in _DTYPES.items()}
_TIERS: dict[int, CacheTier] = {
    pb.CACHE_TIER_MISS: CacheTier.MISS,
    pb.CACHE_TIER_IN_FLIGHT: CacheTier.IN_FLIGHT,
    pb.CACHE_TIER_DEVICE: CacheTier.DEVICE,
    pb.CACHE_TIER_HOST: CacheTier.HOST,
}
_KEY_STATES: dict[int, KeyState] = {
    pb.KEY_STATE_ABSENT: KeyState.ABSENT,
    pb.KEY_STATE_IN_FLIGHT: KeyState.IN_FLIGHT,
    pb.KEY_STATE_RESIDENT: KeyState.RESIDENT,
}


_TIMINGS = attrgetter(*StageTimings.__dataclass_fields__)


def dtype_number(name: str) -> pb.DType.ValueType:
    """Raises InvalidRequest for a dtype that has no number on the wire."""
    if name not in _DTYPES:
        raise InvalidRequest(f"dtype {name} cannot be sent; the wire has {', '.join(_DTYPES)}")
    return _DTYPES[name]


def dtype_name(number: int) -> str:
    """``float32``, ...; ``dtype <n>`` for an unknown number."""
    return _DTYPE_OF.get(number) or f"dtype {number}"


def tier(number: int) -> CacheTier:
    return _TIERS.get(number, CacheTier.UNKNOWN)


def grid(message: pb.GridTHW) -> Grid:
    return Grid(message.t, message.h, message.w)


def chunk_grids(result: pb.ItemResult) -> tuple[Grid, ...]:
    return tuple([grid(each) for each in result.chunk_grids])


def timings(message: pb.StageTimings) -> StageTimings:
    return StageTimings(*_TIMINGS(message))


def item_message(item: Item) -> pb.Item:
    """Raises InvalidRequest for values that the wire cannot carry, TypeError for another type."""
    try:
        return _item_message(item)
    except ValueError as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"an item does not fit the wire: {error}") from error


def _item_message(item: Item) -> pb.Item:
    if not isinstance(item, Item):
        raise TypeError(
            "an item is an ImageItem, ClipItem, FramesItem, PixelItem, DigestItem or UrlItem, found "
            f"{type(item).__name__}"
        )
    message = pb.Item(modality=_MODALITIES[item.modality], content_digest=item.digest or b"")
    match item:
        case ImageItem() | ClipItem():
            message.encoded = item.data
            _set_options(message, item.options)
        case FramesItem():
            array = item.array()
            message.frames.inline.CopyFrom(
                pb.InlineTensor(dtype=pb.DTYPE_UINT8, shape=array.shape, data=array.tobytes())
            )
            message.frames.fps = item.fps or 0.0
            message.frames.timestamps_s.extend(item.timestamps_s or ())
            _set_options(message, item.options)
        case PixelItem():
            message.pixels.grid_thw.CopyFrom(pb.GridTHW(t=item.grid[0], h=item.grid[1], w=item.grid[2]))
            dtype, shape, data = item.packed()
            tensor = pb.InlineTensor(dtype=dtype_number(dtype), shape=shape, data=data.tobytes())
            message.pixels.inline.CopyFrom(tensor)
        case DigestItem():
            message.digest_only.SetInParent()
            _set_options(message, item.options)
        case UrlItem():
            message.url = item.url
            _set_options(message, item.options)
    return message


def _set_options(message: pb.Item, options: PreprocessOptions) -> None:
    for name, value in options.given().items():
        setattr(message.options, name, value)


def item_failed(message: pb.ItemFailure) -> ItemFailed:
    return ItemFailed(
        message.message or message.reason or "the item failed without a message",
        reason=message.reason or "INTERNAL",
        status=message.status,
        retryable=message.retryable,
        retry_after_ms=message.retry_after_ms,
        details=message.details,
    )


def server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        protocol_version=message.protocol_version,
        min_protocol_version=message.min_protocol_version,
        server_version=message.server_version,
        instance_id=message.instance_id,
        device=message.device,
        models=tuple(_model_info(model) for model in message.models),
        limits=Limits(**{name: getattr(message.limits, name) for name in Limits.__dataclass_fields__}),
        transports=tuple(
            TransportInfo(
                delivery=pb.Delivery.Name(transport.delivery).removeprefix("DELIVERY_").lower()
                if transport.delivery in pb.Delivery.values()
                else f"delivery {transport.delivery}",
                broker_path=transport.broker_path,
                host_id=transport.host_id,
                device_uuid=transport.device_uuid,
            )
            for transport in message.transports
        ),
    )


def _model_info(message: pb.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        family=message.family,
        model_fingerprint=message.model_fingerprint,
        preprocess_fingerprint=message.preprocess_fingerprint,
        dtype=dtype_name(message.dtype),
        out_width=message.out_width,
        num_deepstack_levels=message.num_deepstack_levels,
        width=message.width,
        patch_size=message.patch_size,
        spatial_merge_size=message.spatial_merge_size,
        temporal_patch_size=message.temporal_patch_size,
        patch_dim=message.patch_dim,
        merges_time=message.merges_time,
        modalities=tuple(_MODALITY_OF[number] for number in message.modalities if number in _MODALITY_OF),
    )


def key_state(number: int) -> KeyState:
    return _KEY_STATES.get(number, KeyState.UNKNOWN)


def key_status(message: pb.KeyStatus) -> KeyStatus:
    return KeyStatus(
        key=message.key,
        state=key_state(message.state),
        grid_thw=grid(message.grid_thw) if message.HasField("grid_thw") else None,
        num_rows=message.num_rows,
        tier=tier(message.tier),
    )


def prefetch_status(message: pb.PrefetchStatus) -> PrefetchStatus | ItemFailed:
    if message.HasField("failure"):
        return item_failed(message.failure)
    return PrefetchStatus(
        key=message.key,
        content_digest=message.content_digest,
        state=key_state(message.state),
        grid_thw=grid(message.grid_thw) if message.HasField("grid_thw") else None,
        num_rows=message.num_rows,
    )
