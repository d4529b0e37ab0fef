"""Client side of the vision encoder service: from images to validated rows, for any language-model engine.

Imports grpcio, protobuf and numpy only; torch where a tensor is asked for. ``keys`` derives embedding keys,
``testing`` has a server for users' own tests, ``engines`` one module per engine.
"""

from lm_adapter.arriving import ArrivingRows
from lm_adapter.async_client import AsyncVisionEncoderClient
from lm_adapter.checks import check_rows
from lm_adapter.client import VisionEncoderClient
from lm_adapter.errors import (
    CallCancelled,
    CallFailed,
    DeadlineExceeded,
    EncoderError,
    EncoderFault,
    EncoderOverloaded,
    EncoderUnavailable,
    InvalidRequest,
    InvalidRows,
    ItemFailed,
    MissingDependency,
    ProtocolMismatch,
    RequestRefused,
    StaleRows,
    StreamViolation,
    TransportUnavailable,
    TruncatedStream,
)
from lm_adapter.fleet import AsyncFleetClient, FleetClient, FleetSettings
from lm_adapter.leases import LeaseRecord
from lm_adapter.transport.channel import ClientTls
from lm_adapter.transport.followed import TokenFile
from lm_adapter.transport.settings import TransportChoice
from lm_adapter.types import (
    CacheTier,
    ClipItem,
    DigestItem,
    EncodedRows,
    FramesItem,
    Grid,
    ImageItem,
    Item,
    KeyState,
    KeyStatus,
    LeaseStatus,
    Limits,
    Modality,
    ModelInfo,
    Outcome,
    PixelItem,
    PrefetchStatus,
    PreprocessOptions,
    ServerInfo,
    StageTimings,
    TransportInfo,
    UrlItem,
)

__all__ = [
    "ArrivingRows",
    "AsyncFleetClient",
    "AsyncVisionEncoderClient",
    "CacheTier",
    "CallCancelled",
    "CallFailed",
    "ClientTls",
    "ClipItem",
    "DeadlineExceeded",
    "DigestItem",
    "EncodedRows",
    "EncoderError",
    "EncoderFault",
    "EncoderOverloaded",
    "EncoderUnavailable",
    "FleetClient",
    "FleetSettings",
    "FramesItem",
    "Grid",
    "ImageItem",
    "InvalidRequest",
    "InvalidRows",
    "Item",
    "ItemFailed",
    "KeyState",
    "KeyStatus",
    "LeaseRecord",
    "LeaseStatus",
    "Limits",
    "MissingDependency",
    "Modality",
    "ModelInfo",
    "Outcome",
    "PixelItem",
    "PrefetchStatus",
    "PreprocessOptions",
    "ProtocolMismatch",
    "RequestRefused",
    "ServerInfo",
    "StageTimings",
    "StaleRows",
    "StreamViolation",
    "TokenFile",
    "TransportChoice",
    "TransportInfo",
    "TransportUnavailable",
    "TruncatedStream",
    "UrlItem",
    "VisionEncoderClient",
    "check_rows",
]

__version__ = "0.1.0"
