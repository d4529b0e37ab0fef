"""Client of the vision encoder service: sends images and clips, returns validated rows to any LLM engine.

Importing this package imports grpcio, protobuf, numpy and blake3; torch only when a tensor is requested.
Other modules: ``keys`` derives embedding keys; ``splice``, ``placeholders``, ``mrope`` and ``rotary`` build
a prefill; ``testing`` has a fake server for users' tests; ``engines`` has one module per engine."""

from lm_adapter.channel import ClientTls
from lm_adapter.checks import check_rows
from lm_adapter.client import AsyncVisionEncoderClient
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
    ModelMismatch,
    ProtocolMismatch,
    RequestRefused,
    StreamViolation,
    TransportUnavailable,
    TruncatedStream,
)
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
from lm_adapter.shm.attachment import Transport
from lm_adapter.sync import VisionEncoderClient
from lm_adapter.types import (
    CacheTier,
    EncodedRows,
    KeyState,
    KeyStatus,
    Limits,
    ModelInfo,
    Outcome,
    PrefetchStatus,
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
    "ClipItem",
    "DeadlineExceeded",
    "DigestItem",
    "EncodedRows",
    "EncoderError",
    "EncoderFault",
    "EncoderOverloaded",
    "EncoderUnavailable",
    "FramesItem",
    "Grid",
    "ImageItem",
    "InvalidRequest",
    "InvalidRows",
    "Item",
    "ItemFailed",
    "KeyState",
    "KeyStatus",
    "Limits",
    "MissingDependency",
    "Modality",
    "ModelInfo",
    "ModelMismatch",
    "Outcome",
    "PixelItem",
    "PrefetchStatus",
    "PreprocessOptions",
    "ProtocolMismatch",
    "RequestRefused",
    "ServerInfo",
    "StageTimings",
    "StreamViolation",
    "Transport",
    "TransportInfo",
    "TransportUnavailable",
    "TruncatedStream",
    "UrlItem",
    "VisionEncoderClient",
    "check_rows",
]

__version__ = "0.2.0"
