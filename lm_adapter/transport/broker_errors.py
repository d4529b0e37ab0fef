"""What can go wrong with the broker, by stable reasons.

BrokerError (an EncoderError)
├── BrokerUnavailable        nobody to talk to now: NO_SOCKET, NOT_LISTENING, TIMEOUT, CONNECTION_LOST,
│                            BROKER_SILENT, BROKER_STOPPING, NOT_CONNECTED, CLOSED, FORKED
├── BrokerRefused            this client is not let in: the broker's reason (PROTOCOL_MISMATCH,
│                            UNAUTHENTICATED, UID_NOT_ALLOWED, TOO_MANY_CONNECTIONS), or PERMISSION_DENIED
│                            and PATH_TOO_LONG, which the socket's path decides
├── BrokerRequestFailed      one request failed, the connection lives: UNKNOWN_ARENA, NO_PROBE_SLOT,
│                            UNKNOWN_REQUEST, DESCRIPTORS_UNREAD, DESCRIPTORS_EXHAUSTED,
│                            DESCRIPTORS_IN_FLIGHT, DESCRIPTORS_LOST (this process has none left); of a
│                            segment: NOT_OFFERED, NOT_SEALED, WRONG_SIZE, TOO_MANY_SEGMENTS,
│                            DESCRIPTOR_MISSING
└── BrokerViolation          bytes that no correct broker sends; the connection ends
"""

from __future__ import annotations

from lm_adapter.errors import EncoderError

__all__ = ["BrokerError", "BrokerRefused", "BrokerRequestFailed", "BrokerUnavailable", "BrokerViolation"]


class BrokerError(EncoderError):
    default_reason = "BROKER_ERROR"


class BrokerUnavailable(BrokerError):
    default_reason = "CONNECTION_LOST"
    default_retryable = True


class BrokerRefused(BrokerError):
    default_reason = "REFUSED"


class BrokerRequestFailed(BrokerError):
    default_reason = "REQUEST_FAILED"


class BrokerViolation(BrokerError):
    default_reason = "PROTOCOL_VIOLATION"
