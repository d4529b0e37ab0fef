"""What an engine's client gets for a failed item: an HTTP status and a text."""

from __future__ import annotations

from lm_adapter.errors import EncoderError

MAX_MESSAGE_CHARS = 2000
MAX_REASON_CHARS = 100
STATUSES = {
    "UNAUTHENTICATED": 502,
    "PERMISSION_DENIED": 502,
    "INVALID_ROWS": 502,
    "STREAM_VIOLATION": 502,
    "DEADLINE_EXCEEDED": 504,
    "QUEUE_FULL": 503,
    "OVERLOADED": 503,
    "ENGINE_UNAVAILABLE": 503,
    "UNKNOWN_KEY": 503,
    "INVALID_REQUEST": 400,
    "IDENTIFIER_REUSED": 400,
    "ROWS_TOO_LARGE": 400,
    "MESSAGE_TOO_LARGE": 400,
}
CLIENTS_FAULT = (3, 9, 11)
"""gRPC statuses of items that fail in the same way wherever they are sent."""


def status_of(error: EncoderError) -> int:
    """The HTTP status for an item without rows."""
    if error.reason in STATUSES:
        return STATUSES[error.reason]
    if getattr(error, "status", 0) in CLIENTS_FAULT:
        return 400
    return 503 if error.retryable else 502


def message_of(error: EncoderError) -> str:
    """Reason and message, as the client reads them, each cut to its limit."""
    return f"{error.reason[:MAX_REASON_CHARS]}: {error.message[:MAX_MESSAGE_CHARS]}"
