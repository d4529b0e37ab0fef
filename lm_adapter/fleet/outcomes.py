"""What an item's failure means in a fleet: whether another replica may do better, and how it is told.

Owns that distinction, and the turning of a call's failure into that of one item.
"""

from __future__ import annotations

import grpc

from lm_adapter.errors import (
    CallFailed,
    DeadlineExceeded,
    EncoderError,
    InvalidRows,
    ItemFailed,
    ProtocolMismatch,
    StreamViolation,
)

__all__ = ["as_item_failure", "deadline_passed", "moves_on"]

_INTERNAL = 13


def moves_on(failure: EncoderError) -> bool:
    """Whether another replica may succeed where this one failed: what is retryable, a replica of a version
    that this adapter does not speak, as there are in the middle of an upgrade, and an answer that no sound
    replica gives."""
    return failure.retryable or isinstance(failure, ProtocolMismatch | InvalidRows | StreamViolation)


def as_item_failure(failure: EncoderError, num_attempts: int, note: str = "") -> ItemFailed:
    """The failure as one item's; details say how many attempts there were, and why there was no further
    one."""
    details = {**failure.details, "num_attempts": num_attempts, **({"note": note} if note else {})}
    if isinstance(failure, ItemFailed):
        failure.details = {name: str(value) for name, value in details.items()}
        return failure
    name = failure.details.get("status", "")
    status = grpc.StatusCode[name].value[0] if name in grpc.StatusCode.__members__ else _INTERNAL
    said = f" ({note})" if note else ""
    item = ItemFailed(
        f"{failure.message}{said}",
        reason=failure.reason,
        status=status,
        retryable=failure.retryable,
        retry_after_ms=failure.retry_after_ms,
        details=details,
    )
    item.__cause__ = failure
    return item


def deadline_passed(timeout_s: float, last: EncoderError | None) -> CallFailed:
    """An item's time ran out between two attempts, or in one."""
    after = f"; before it: {last.message}" if last is not None else ""
    return DeadlineExceeded(
        f"no replica gave the item's rows within {timeout_s:g} s{after}",
        details={"status": "DEADLINE_EXCEEDED"},
    )
