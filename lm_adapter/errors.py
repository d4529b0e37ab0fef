"""Every error that the adapter raises, and the mapping of gRPC's errors to them.

EncoderError
├── ItemFailed                one item failed, the other items did not: returned by ``encode``, raised by
│   │                         ``encode_one``; ``reason`` is the service's stable code
│   └── InvalidRows           rows that contradict the result, the model or the prompt
├── CallFailed                the whole call failed; ``completed`` holds the outcomes that had arrived
│   ├── RequestRefused        repeating the call gives the same answer, unless ``retryable``
│   ├── EncoderOverloaded     the service had no room for an item until the deadline
│   ├── EncoderUnavailable    no server was reached, or the connection broke
│   ├── EncoderFault          the server failed internally
│   ├── DeadlineExceeded      the call's deadline passed, on the client or the server
│   ├── CallCancelled         the client was closed during the call
│   ├── ProtocolMismatch      client and server have no protocol version in common
│   ├── ModelMismatch         the server's rows do not fit the caller's model, see ``check_server``
│   ├── StreamViolation       a message that no correct server sends
│   ├── TransportUnavailable  the client excludes inline rows, and no shared memory is attached
│   └── TruncatedStream       the stream ended with OK before all items had an outcome
├── MappingFailed             the encoder's memory cannot be mapped; the client falls back to inline rows
├── BrokerError               the broker cannot be reached or refuses; the client falls back to inline rows
├── InvalidRequest            wrong arguments, detected before anything is sent (also a ValueError)
└── MissingDependency         an optional package is needed (also an ImportError)

Each has ``reason``, ``retryable`` and ``retry_after_ms``; ``details`` holds the values in the message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import grpc
from google.protobuf.message import DecodeError

from vision_encoder.v1 import encoder_pb2 as pb

DATA_LOSS = 15
"""The gRPC status number for rows that arrived damaged."""

FAILURE_METADATA_KEY = "vision-encoder-failure-bin"
"""Trailing metadata of a failed call: a serialised ItemFailure with the service's reason."""


class EncoderError(Exception):
    """Base class of all errors of this module. ``str(error)`` is a full sentence."""

    default_reason: ClassVar[str] = "ENCODER_ERROR"
    default_retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        /,
        *,
        reason: str | None = None,
        retryable: bool | None = None,
        retry_after_ms: int = 0,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = self.default_reason if reason is None else reason
        self.retryable = self.default_retryable if retryable is None else retryable
        self.retry_after_ms = retry_after_ms
        self.details = {name: str(value) for name, value in (details or {}).items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reason}: {self.message})"


class ItemFailed(EncoderError):
    """One item failed. ``status`` is the gRPC status number for this kind of error. ``str(error)`` begins
    with the reason."""

    default_reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        /,
        *,
        reason: str | None = None,
        status: int = 13,
        retryable: bool | None = None,
        retry_after_ms: int = 0,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(
            message, reason=reason, retryable=retryable, retry_after_ms=retry_after_ms, details=details
        )
        self.status = status

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class InvalidRows(ItemFailed):
    """Rows that must not reach an engine. ``field`` names the wrong value; ``details`` and the message have
    the found and the expected value."""

    default_reason = "INVALID_ROWS"

    def __init__(self, field: str, message: str, /, *, found: object, expected: object) -> None:
        super().__init__(
            message, status=DATA_LOSS, details={"field": field, "found": found, "expected": expected}
        )
        self.field = field


class CallFailed(EncoderError):
    """The whole call failed. ``completed`` maps the index of each item that had finished to its EncodedRows
    (``prefetch``: its PrefetchStatus) or ItemFailed."""

    completed: Mapping[int, Any] = {}


class RequestRefused(CallFailed):
    default_reason = "REQUEST_REFUSED"


class EncoderOverloaded(CallFailed):
    default_reason = "OVERLOADED"
    default_retryable = True


class EncoderUnavailable(CallFailed):
    default_reason = "UNAVAILABLE"
    default_retryable = True


class EncoderFault(CallFailed):
    default_reason = "INTERNAL"


class DeadlineExceeded(CallFailed):
    default_reason = "DEADLINE_EXCEEDED"


class CallCancelled(CallFailed):
    default_reason = "CANCELLED"


class ProtocolMismatch(CallFailed):
    default_reason = "PROTOCOL_MISMATCH"


class ModelMismatch(CallFailed):
    default_reason = "MODEL_MISMATCH"


class StreamViolation(CallFailed):
    default_reason = "STREAM_VIOLATION"


class TransportUnavailable(CallFailed):
    default_reason = "TRANSPORT_UNAVAILABLE"
    default_retryable = True


class TruncatedStream(CallFailed):
    default_reason = "TRUNCATED_STREAM"
    default_retryable = True


class MappingFailed(EncoderError):
    default_reason = "MAPPING_FAILED"


class BrokerError(EncoderError):
    default_reason = "BROKER_UNAVAILABLE"
    default_retryable = True


class InvalidRequest(EncoderError, ValueError):
    default_reason = "INVALID_REQUEST"


class MissingDependency(EncoderError, ImportError):
    default_reason = "MISSING_DEPENDENCY"

    def __init__(self, package: str, purpose: str, remedy: str = "") -> None:
        """remedy: the command that installs it."""
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed" + (remedy and f": {remedy}"),
            details={"package": package},
        )


_KINDS: dict[grpc.StatusCode, tuple[type[CallFailed], str]] = {
    # The client handles its own cancellations before they get here.
    grpc.StatusCode.CANCELLED: (EncoderUnavailable, "the encoder went away in"),
    grpc.StatusCode.UNAVAILABLE: (EncoderUnavailable, "the encoder went away in"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlineExceeded, "the deadline passed in"),
    grpc.StatusCode.UNIMPLEMENTED: (ProtocolMismatch, "the server does not speak vision_encoder.v1, in"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (EncoderOverloaded, "the encoder is overloaded, in"),
    grpc.StatusCode.INTERNAL: (EncoderFault, "the encoder failed in"),
    grpc.StatusCode.UNKNOWN: (EncoderFault, "the encoder failed in"),
    grpc.StatusCode.DATA_LOSS: (EncoderFault, "the encoder failed in"),
}
# How gRPC's text begins without a connection; a broken one may be INTERNAL or UNKNOWN, with the texts below.
_NO_CONNECTION_TEXTS = ("failed to connect", "connections to all", "errors resolving", "dns resolution")
_CUT_TEXTS = ("rst_stream", "stream removed", "socket closed", "connection reset", "goaway")


def from_rpc_error(
    error: grpc.RpcError, *, target: str, method: str, num_items: int = 0, num_arrived: int = 0
) -> CallFailed:
    """The adapter's error for a gRPC error.

    num_items, num_arrived: items requested, and items with a result or a failure; only for streaming calls.
    """
    code, text, failure = _read_rpc_error(error)
    progress = f" after {num_arrived} of {num_items} items had arrived" if num_items else ""
    where = f"{method} at {target}{progress}"
    details: dict[str, object] = {
        **failure.details,
        "status": code.name,
        "target": target,
        "num_items": num_items,
        "num_arrived": num_arrived,
    }
    kind, message = _KINDS.get(code, (RequestRefused, "the encoder refused"))
    reason = code.name if kind is RequestRefused else None
    lowered = text.lower()
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and any(
        mark in lowered for mark in _CUT_TEXTS
    ):
        kind, message = _KINDS[grpc.StatusCode.UNAVAILABLE]
    elif kind is EncoderUnavailable and lowered.startswith(_NO_CONNECTION_TEXTS):
        message, where = "no encoder answers at", f"{target} ({method}{progress})"
        text = re.sub(r"^.*last error: [A-Z_]+: \S+: ", "", text)
        text += "; check the address, and that `vision-encoder serve` runs there"
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in lowered:
        kind, message, reason = RequestRefused, "over the size limit is a message of", "MESSAGE_TOO_LARGE"
    retryable = True if code is grpc.StatusCode.ABORTED else None
    return kind(
        f"{message} {where}: {text}",
        reason=failure.reason or reason,
        retryable=failure.retryable if failure.reason else retryable,
        retry_after_ms=failure.retry_after_ms,
        details=details,
    )


def _read_rpc_error(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, pb.ItemFailure]:
    """Status, text, and the service's ItemFailure, which is empty if there is none (as when the connection
    broke). The type grpc.RpcError itself guarantees none of the three."""
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    text = error.details() if hasattr(error, "details") else str(error)
    metadata: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    failure = pb.ItemFailure()
    for name, value in metadata or ():
        if name == FAILURE_METADATA_KEY and isinstance(value, bytes):
            try:
                failure = pb.ItemFailure.FromString(value)
            except DecodeError:
                text = f"{text} (with an unreadable ItemFailure)"
    return code or grpc.StatusCode.UNKNOWN, text or "no details", failure
