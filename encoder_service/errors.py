"""All errors of the service.

VisionEncoderError
├── InvalidInput                 the caller's item is invalid; sending it again gives the same answer
│   ├── InvalidRequest           a field of the request has no meaning here
│   ├── BodyTooLarge             over the limit of an HTTP request's body
│   ├── UnsupportedMediaType     an HTTP request's body of a type or coding that is not taken
│   ├── InvalidOption            a preprocessing option that the family lacks, or a value out of bounds
│   ├── InvalidDigest            a digest or key of the wrong length
│   ├── UndecodableImage         the bytes are not an image that can be read
│   ├── UndecodableClip          the bytes are not a clip, or a part of it cannot be read
│   ├── ImageTooLarge            over the byte, pixel or patch limit
│   ├── ClipTooLarge             over the byte, pixel, frame, duration or patch limit of clips
│   ├── AspectRatioExceeded      longer side over the family's multiple of the shorter
│   ├── GridMismatch             the grid disagrees with the rows, the merge size or the family
│   ├── PixelTensorMismatch      wrong dtype, rank, width or byte count of a pixel tensor
│   ├── NonFinitePixels          NaN or infinity in a pixel tensor
│   ├── UnsupportedContent       a kind of content that this server does not accept
│   ├── UrlRefused               a URL that the address rules or the allow-list refuse
│   └── UrlContent               the URL has no content, or content that is not accepted
├── Unauthenticated              no token, or an unknown one
├── PermissionDenied             a token of another namespace
├── NotFound
│   ├── UnknownModel
│   └── UnknownKey               neither stored nor being encoded
├── Overloaded                   retry later
│   ├── QueueFull
│   ├── StoreFull
│   └── TooManyCalls             too many calls are in progress
├── Unavailable                  retry elsewhere
│   ├── NotReady
│   ├── Draining
│   └── UrlUnreachable           the server of a URL did not answer, or not in time
├── TransportUnavailable         this delivery is not possible between these hosts
├── DeadlineExceeded             the deadline passed, or the caller sent or read too slowly
├── Cancelled                    every caller left
├── DeviceFault                  the device failed; the process leaves service
├── InternalError                a defect of the service; only this item fails
└── StartupError                 the service cannot start; never travels over the wire
    ├── ConfigurationError
    └── CheckpointError
        ├── UnsupportedCheckpoint
        ├── MissingTensors
        ├── UnexpectedTensors
        ├── MismatchedTensors
        └── UninitialisedTensors

Each class has a stable ``reason``, which is sent to clients and which dashboards match on, and ``retryable``.
``details`` has the numbers of the message: the actual one and the limit.
"""

from __future__ import annotations

from typing import ClassVar


class VisionEncoderError(Exception):
    """Base of all errors. ``str(error)`` is a sentence that can be shown to the caller. retry_after_ms: 0 for
    no advice."""

    reason: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, *, retry_after_ms: int = 0, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.details: dict[str, str] = {name: str(value) for name, value in details.items()}


class InvalidInput(VisionEncoderError):
    reason = "INVALID_INPUT"


class InvalidRequest(InvalidInput):
    reason = "INVALID_REQUEST"


class BodyTooLarge(InvalidInput):
    reason = "BODY_TOO_LARGE"


class UnsupportedMediaType(InvalidInput):
    reason = "UNSUPPORTED_MEDIA_TYPE"


class InvalidOption(InvalidInput):
    reason = "INVALID_OPTION"


class InvalidDigest(InvalidInput):
    reason = "INVALID_DIGEST"


class UndecodableImage(InvalidInput):
    reason = "UNDECODABLE_IMAGE"


class UndecodableClip(InvalidInput):
    reason = "UNDECODABLE_CLIP"


class ImageTooLarge(InvalidInput):
    reason = "IMAGE_TOO_LARGE"


class ClipTooLarge(InvalidInput):
    reason = "CLIP_TOO_LARGE"


class AspectRatioExceeded(InvalidInput):
    reason = "ASPECT_RATIO_EXCEEDED"


class GridMismatch(InvalidInput):
    reason = "GRID_MISMATCH"


class PixelTensorMismatch(InvalidInput):
    reason = "PIXEL_TENSOR_MISMATCH"


class NonFinitePixels(InvalidInput):
    reason = "NON_FINITE_PIXELS"


class UnsupportedContent(InvalidInput):
    reason = "UNSUPPORTED_CONTENT"


class UrlRefused(InvalidInput):
    reason = "URL_REFUSED"


class UrlContent(InvalidInput):
    reason = "URL_CONTENT"


class Unauthenticated(VisionEncoderError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(VisionEncoderError):
    reason = "PERMISSION_DENIED"


class NotFound(VisionEncoderError):
    reason = "NOT_FOUND"


class UnknownModel(NotFound):
    reason = "UNKNOWN_MODEL"


class UnknownKey(NotFound):
    reason = "UNKNOWN_KEY"


class Overloaded(VisionEncoderError):
    reason = "OVERLOADED"
    retryable = True


class QueueFull(Overloaded):
    reason = "QUEUE_FULL"


class StoreFull(Overloaded):
    reason = "STORE_FULL"


class TooManyCalls(Overloaded):
    reason = "TOO_MANY_CALLS"


class Unavailable(VisionEncoderError):
    reason = "UNAVAILABLE"
    retryable = True


class NotReady(Unavailable):
    reason = "NOT_READY"


class Draining(Unavailable):
    reason = "DRAINING"


class UrlUnreachable(Unavailable):
    reason = "URL_UNREACHABLE"


class TransportUnavailable(VisionEncoderError):
    reason = "TRANSPORT_UNAVAILABLE"


class DeadlineExceeded(VisionEncoderError):
    reason = "DEADLINE_EXCEEDED"


class Cancelled(VisionEncoderError):
    reason = "CANCELLED"


class DeviceFault(VisionEncoderError):
    reason = "DEVICE_FAULT"
    retryable = True


class InternalError(VisionEncoderError):
    reason = "INTERNAL"


class StartupError(VisionEncoderError):
    reason = "STARTUP"


class ConfigurationError(StartupError):
    reason = "CONFIGURATION"


class CheckpointError(StartupError):
    reason = "CHECKPOINT"


class UnsupportedCheckpoint(CheckpointError):
    reason = "UNSUPPORTED_CHECKPOINT"


class MissingTensors(CheckpointError):
    reason = "MISSING_TENSORS"


class UnexpectedTensors(CheckpointError):
    reason = "UNEXPECTED_TENSORS"


class MismatchedTensors(CheckpointError):
    reason = "MISMATCHED_TENSORS"


class UninitialisedTensors(CheckpointError):
    reason = "UNINITIALISED_TENSORS"


def missing_module(error: ModuleNotFoundError) -> str:
    """The sentence for a command whose packages are not installed."""
    return (
        f"the module {error.name} is not installed; the commands and the service need the extra serve: "
        "pip install '.[serve]' in a checkout"
    )


def forget_traceback(error: BaseException) -> None:
    """Drops the traceback of a failure and of its causes. Its frames hold the request's content, which nobody
    counts any more, and some hold the failure: only a garbage collection would free both."""
    cause: BaseException | None = error
    while cause is not None and cause.__traceback__ is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
