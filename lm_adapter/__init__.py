"""Client side of the vision encoder service: from images to validated rows, for any language-model engine.

Imports grpcio, protobuf and numpy only; torch where a tensor is asked for. ``keys`` derives embedding keys,
``testing`` has a server for users' own tests, ``engines`` one module per engine.
"""

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
from lm_adapter.leases import LeaseRecord
from lm_adapter.transport.channel import ClientTls
from lm_adapter.transport.settings import TransportChoice
from lm_adapter.types import (
    CacheTier,
    DigestItem,
    EncodedRows,
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
)

__all__ = [
    "AsyncVisionEncoderClient",
    "CacheTier",
    "CallCancelled",
    "CallFailed",
    "ClientTls",
    "DeadlineExceeded",
    "DigestItem",
    "EncodedRows",
    "EncoderError",
    "EncoderFault",
    "EncoderOverloaded",
    "EncoderUnavailable",
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
    "TransportChoice",
    "TransportInfo",
    "TransportUnavailable",
    "TruncatedStream",
    "VisionEncoderClient",
    "check_rows",
]

__version__ = "0.1.0"
