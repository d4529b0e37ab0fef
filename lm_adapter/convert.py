"""Conversion between the adapter's records and the wire's messages.

Owns the names of enum values and the packing of items. Results are validated in ``assembly``, not here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from lm_adapter.checks import check_digest
from lm_adapter.errors import InvalidRequest, InvalidRows, ItemFailed
from lm_adapter.items import (
    ClipItem,
    DigestItem,
    FramesItem,
    Grid,
    ImageItem,
    Item,
    Modality,
    PixelItem,
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


def _names(enum: Any, prefix: str) -> dict[Any, str]:
    """The values of an enum but UNSPECIFIED, by number: ``CACHE_TIER_MISS`` is ``miss``."""
    return {number: name.removeprefix(prefix).lower() for name, number in enum.items() if number}


MODALITY_OF = {number: Modality(name) for number, name in _names(pb.Modality, "MODALITY_").items()}
_MODALITIES = {modality: number for number, modality in MODALITY_OF.items()}
_DTYPE_OF = _names(pb.DType, "DTYPE_")
_DTYPES: dict[str, pb.DType.ValueType] = {name: number for number, name in _DTYPE_OF.items()}
_DELIVERY_OF = _names(pb.Delivery, "DELIVERY_")
_TIERS = {number: CacheTier(name) for number, name in _names(pb.CacheTier, "CACHE_TIER_").items()}
_KEY_STATES = {number: KeyState(name) for number, name in _names(pb.KeyState, "KEY_STATE_").items()}
RecordT = TypeVar("RecordT")


def dtype_number(name: str) -> pb.DType.ValueType:
    """Raises InvalidRequest for a dtype that has no number on the wire."""
    if name not in _DTYPES:
        raise InvalidRequest(f"dtype {name} cannot be sent; the wire has {', '.join(_DTYPES)}")
    return _DTYPES[name]


def dtype_name(number: int) -> str:
    """``float32``, ...; ``dtype <n>`` for an unknown number."""
    return _DTYPE_OF.get(number) or f"dtype {number}"


def _delivery_name(number: int) -> str:
    return _DELIVERY_OF.get(number) or f"delivery {number}"


def tier(number: int) -> CacheTier:
    return _TIERS.get(number, CacheTier.UNKNOWN)


def grid(message: pb.GridTHW) -> Grid:
    return Grid(message.t, message.h, message.w)


def timings(message: pb.StageTimings) -> StageTimings:
    return _record(StageTimings, message)


def item_message(item: Item) -> pb.Item:
    """Raises ValueError for values that the wire cannot carry, TypeError for content of another type."""
    message = pb.Item(modality=_MODALITIES[item.modality], content_digest=item.digest or b"")
    match item:
        case ImageItem() | ClipItem():
            message.encoded = item.data
        case FramesItem():
            array = item.array()
            message.frames.inline.CopyFrom(
                pb.InlineTensor(dtype=pb.DTYPE_UINT8, shape=array.shape, data=array.tobytes())
            )
            message.frames.fps = item.fps or 0.0
            message.frames.timestamps_s.extend(item.timestamps_s or ())
        case PixelItem():
            message.pixels.grid_thw.CopyFrom(pb.GridTHW(t=item.grid[0], h=item.grid[1], w=item.grid[2]))
            dtype, shape, data = item.packed()
            tensor = pb.InlineTensor(dtype=dtype_number(dtype), shape=shape, data=data.tobytes())
            message.pixels.inline.CopyFrom(tensor)
        case DigestItem():
            message.digest_only.SetInParent()
        case UrlItem():
            message.url = item.url
    if not isinstance(item, PixelItem):
        for name, value in item.options.given().items():
            setattr(message.options, name, value)
    return message


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
    return _record(
        ServerInfo,
        message,
        models=tuple(_model_info(model) for model in message.models),
        limits=_record(Limits, message.limits),
        transports=tuple(
            _record(TransportInfo, transport, delivery=_delivery_name(transport.delivery))
            for transport in message.transports
        ),
        unusable_kernels=dict(message.unusable_kernels),
    )


def _model_info(message: pb.ModelInfo) -> ModelInfo:
    modalities = tuple(MODALITY_OF[n] for n in message.modalities if n in MODALITY_OF)
    return _record(ModelInfo, message, dtype=dtype_name(message.dtype), modalities=modalities)


def key_state(number: int) -> KeyState:
    return _KEY_STATES.get(number, KeyState.UNKNOWN)


def key_status(message: pb.KeyStatus) -> KeyStatus:
    return _record(KeyStatus, message, tier=tier(message.tier), **_state_and_grid(message))


def prefetch_status(message: pb.PrefetchStatus, routing_digest: bytes = b"") -> PrefetchStatus | ItemFailed:
    """A key that is not of 32 bytes makes the item's failure."""
    if message.HasField("failure"):
        return item_failed(message.failure)
    try:
        check_digest("key", message.key, None)
    except InvalidRows as error:
        return error
    return _record(
        PrefetchStatus,
        message,
        routing_digest=routing_digest,
        timestamps_s=tuple(message.timestamps_s),
        **_state_and_grid(message),
    )


def _state_and_grid(message: pb.KeyStatus | pb.PrefetchStatus) -> dict[str, Any]:
    grid_thw = grid(message.grid_thw) if message.HasField("grid_thw") else None
    return {"state": key_state(message.state), "grid_thw": grid_thw}


def _record(kind: type[RecordT], message: Any, **converted: Any) -> RecordT:
    """A record with these fields, and the message's of the same names for the others."""
    names: Iterable[str] = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{name: getattr(message, name) for name in names if name not in converted}, **converted)
