"""The mapping from errors to HTTP statuses, for every port that speaks HTTP. gRPC's is ``rpc/status.py``.

Overload is 503 and not 429: to SGLang and to proxies a 4xx is a mistake of the request, and a 503 may be sent
to another encoder.
"""

from __future__ import annotations

from encoder_service import errors

HTTP_STATUS_BY_ERROR: dict[type[errors.VisionEncoderError], int] = {
    errors.InvalidInput: 400,
    errors.BodyTooLarge: 413,
    errors.UnsupportedMediaType: 415,
    errors.Unauthenticated: 401,
    errors.PermissionDenied: 403,
    errors.NotFound: 404,
    errors.Overloaded: 503,
    errors.Unavailable: 503,
    errors.DeviceFault: 503,
    errors.TransportUnavailable: 504,
    errors.DeadlineExceeded: 504,
    errors.Cancelled: 499,  # nobody reads it
    errors.VisionEncoderError: 500,
}


def http_status(error: errors.VisionEncoderError) -> int:
    """That of the error's class or of its nearest ancestor in the table."""
    return next(HTTP_STATUS_BY_ERROR[cls] for cls in type(error).__mro__ if cls in HTTP_STATUS_BY_ERROR)
