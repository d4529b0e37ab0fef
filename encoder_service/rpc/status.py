"""Errors as gRPC tells them: the only place that knows both.

Every class of ``errors.py`` has a status here, by itself or by its nearest ancestor; a test walks the tree.
A failure of one item travels as an ItemFailure in the stream; a failure of the whole call as the call's
status, with the same ItemFailure serialised in the trailing metadata under ``FAILURE_METADATA_KEY``.
"""

from __future__ import annotations

import asyncio

import grpc

from encoder_service import errors
from vision_encoder.v1 import encoder_pb2 as pb

FAILURE_METADATA_KEY = "vision-encoder-failure-bin"

STATUS_BY_ERROR: dict[type[errors.VisionEncoderError], grpc.StatusCode] = {
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.StaleLease: grpc.StatusCode.ABORTED,
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
    """The status of an error: its class's, or its nearest listed ancestor's."""
    for cls in type(error).__mro__:
        if cls in STATUS_BY_ERROR:
            return STATUS_BY_ERROR[cls]
    return grpc.StatusCode.INTERNAL


def as_service_error(error: BaseException) -> errors.VisionEncoderError:
    """Foreign exceptions mapped to ours, in one place."""
    if isinstance(error, errors.VisionEncoderError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return errors.Draining("the service stopped before the item was encoded")
    return errors.InternalError(f"{type(error).__name__}: {error}")


def failure_of(error: BaseException) -> pb.ItemFailure:
    """An error as it travels."""
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
