"""Which failures are repeated, and which become an item's: with an encoder, and through a gateway."""

from __future__ import annotations

import pytest

from lm_adapter.errors import (
    CallFailed,
    DeadlineExceeded,
    EncoderOverloaded,
    EncoderUnavailable,
    TruncatedStream,
)
from lm_adapter.fleet import GATEWAY_BUFFER_BYTES, LARGE_PAUSE_S, MAX_PAUSE_S, MIN_PAUSE_S, Fleet
from lm_adapter.routing import Direct

BROKEN = EncoderUnavailable("the connection broke")
DRAINING = EncoderUnavailable("the encoder stops", reason="DRAINING", retryable=True)
FULL = EncoderOverloaded("the queue is full", reason="QUEUE_FULL", retry_after_ms=200)
TRUNCATED = TruncatedStream("the stream ended with 1 of 2 items")
LATE = DeadlineExceeded("the deadline passed")


@pytest.mark.parametrize(
    ("error", "is_repeated_directly", "is_repeated_in_a_fleet"),
    [
        (BROKEN, True, True),
        (TRUNCATED, True, True),
        (DRAINING, False, True),
        (FULL, False, False),
        (LATE, False, False),
    ],
)
def test_what_another_answer_may_mend_is_repeated(
    error: CallFailed, is_repeated_directly: bool, is_repeated_in_a_fleet: bool
) -> None:
    assert Direct(repeats=True).pause_s(error, 60.0, 0) == (0.0 if is_repeated_directly else None)
    pause_s = Fleet(repeats=True).pause_s(error, 60.0, 0)
    assert (pause_s is not None) == is_repeated_in_a_fleet
    assert pause_s is None or MIN_PAUSE_S <= pause_s <= MAX_PAUSE_S
    for routing in (Direct(repeats=False), Fleet(repeats=False)):
        assert routing.pause_s(error, 60.0, 0) is None


def test_a_fleets_pause_fits_the_deadline_and_grows_with_what_a_gateway_cannot_retry() -> None:
    fleet = Fleet(repeats=True)
    assert fleet.pause_s(BROKEN, MAX_PAUSE_S - 0.01, 0) is None
    large_s = fleet.pause_s(BROKEN, MAX_PAUSE_S, GATEWAY_BUFFER_BYTES + 1)
    assert large_s is not None
    assert LARGE_PAUSE_S + MIN_PAUSE_S <= large_s <= LARGE_PAUSE_S + MAX_PAUSE_S


def test_only_a_replica_that_states_its_reason_fails_the_item_instead_of_the_call() -> None:
    fleet = Fleet(repeats=True)
    draining = fleet.item_failure(DRAINING)
    assert draining is not None
    assert (draining.reason, draining.status, draining.retryable) == ("DRAINING", 14, True)
    assert [fleet.item_failure(error) for error in (BROKEN, TRUNCATED, LATE, FULL)] == [None] * 4
    assert Direct(repeats=True).item_failure(DRAINING) is None
