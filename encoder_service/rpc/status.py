"""The mapping from errors to gRPC statuses. No other module knows both.

Every class of ``errors.py`` has a status here, its own or that of its nearest ancestor. The failure of an
item is an ItemFailure in the stream. The failure of a call is the call's status, with the same ItemFailure
serialised in the trailing metadata under ``FAILURE_METADATA_KEY``.

If a retry helps, the trailing metadata state the delay in two more forms, for clients other than
``lm_adapter``: ``google.rpc.RetryInfo`` in the status details, and the pushback of gRPC's built-in retries.

gRPC clients take 8 KiB of metadata by default, and refuse more by chance. The text of a call's failure stands
there up to three times, so it is shortened; that of an item's failure is not.
"""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import grpc
from google.protobuf.any_pb2 import Any as PackedMessage
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from starlette.requests import ClientDisconnect

from encoder_service import errors
from vision_encoder.v1 import encoder_pb2 as pb

FAILURE_METADATA_KEY = "vision-encoder-failure-bin"
# Keys that gRPC defines: a serialised google.rpc.Status, and the delay of built-in retries in milliseconds.
STATUS_METADATA_KEY = "grpc-status-details-bin"
PUSHBACK_METADATA_KEY = "grpc-retry-pushback-ms"
ERROR_DOMAIN = "vision_encoder.v1"
# The text of a call's failure and the details of it, in bytes as they are sent.
MAX_TEXT_BYTES = 1200
MAX_DETAILS_BYTES = 1000
# What gRPC does not percent-encode in a status message: printable ASCII without "%".
_UNESCAPED = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

STATUS_BY_ERROR: dict[type[errors.VisionEncoderError], grpc.StatusCode] = {
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.TransportUnavailable: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.DeviceFault: grpc.StatusCode.INTERNAL,
    errors.InternalError: grpc.StatusCode.INTERNAL,
    errors.StartupError: grpc.StatusCode.INTERNAL,
}


def status_of(error: errors.VisionEncoderError) -> grpc.StatusCode:
    """The status of an error: that of its class or of its nearest listed ancestor."""
    for cls in type(error).__mro__:
        if cls in STATUS_BY_ERROR:
            return STATUS_BY_ERROR[cls]
    return grpc.StatusCode.INTERNAL


def as_service_error(error: BaseException) -> errors.VisionEncoderError:
    """The error itself, or the service's error for another exception."""
    if isinstance(error, errors.VisionEncoderError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return errors.Draining("the service stopped before the item was encoded")
    if isinstance(error, ClientDisconnect):
        return errors.Cancelled("the caller has hung up")
    return errors.InternalError(f"{type(error).__name__}: {error}")


def failure_of(error: BaseException) -> pb.ItemFailure:
    """The error as its wire message."""
    known = as_service_error(error)
    code: int = status_of(known).value[0]
    return pb.ItemFailure(
        reason=known.reason,
        status=code,
        message=known.message,
        retryable=known.retryable,
        retry_after_ms=known.retry_after_ms,
        details=known.details,
    )


def status_text(error: errors.VisionEncoderError) -> str:
    """The call's status message, at most MAX_TEXT_BYTES long."""
    return _shortened(f"{error.reason}: {error.message}")


def trailing_metadata(error: errors.VisionEncoderError) -> tuple[tuple[str, str | bytes], ...]:
    """The trailing metadata of a failed call."""
    failure = failure_of(error)
    failure.message = _shortened(failure.message)
    if (
        sum(len(name.encode()) + len(value.encode()) for name, value in failure.details.items())
        > MAX_DETAILS_BYTES
    ):
        failure.details.clear()
    metadata: list[tuple[str, str | bytes]] = [(FAILURE_METADATA_KEY, failure.SerializeToString())]
    if error.retryable and error.retry_after_ms:
        metadata.append((STATUS_METADATA_KEY, retry_status(error).SerializeToString()))
        metadata.append((PUSHBACK_METADATA_KEY, str(error.retry_after_ms)))
    return tuple(metadata)


def retry_status(error: errors.VisionEncoderError) -> Status:
    """The error and its retry delay as a google.rpc.Status. Code and message are those of the call."""
    code: int = status_of(error).value[0]
    advice = RetryInfo()
    advice.retry_delay.FromMilliseconds(error.retry_after_ms)
    status = Status(code=code, message=status_text(error))
    for detail in (ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN), advice):
        packed = PackedMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _shortened(text: str) -> str:
    """The text, or as much of its start as has MAX_TEXT_BYTES in gRPC's percent-encoding."""
    if len(quote(text, safe=_UNESCAPED)) <= MAX_TEXT_BYTES:
        return text
    room = MAX_TEXT_BYTES - len("...")
    size = 0
    for index, character in enumerate(text):
        size += len(quote(character, safe=_UNESCAPED))
        if size > room:
            return text[:index] + "..."
    return text
