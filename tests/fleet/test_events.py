"""Encoders behind the real Envoy lose no item, whatever happens to them.

Every row is compared. A call that fails after the adapter's one repeat fails the test. bench/fleet.py records
the same events with many calls on a quiet machine, and draws them.
"""

from __future__ import annotations

import pytest

from bench.harness.fleet import events
from bench.harness.fleet.events import EVENTS, Event
from bench.harness.fleet.fleet import Fleet
from bench.harness.fleet.images import MIB

pytestmark = pytest.mark.fleet

CALLS = 1200
RECOVERED_S = 3.0
LONGEST_S = 2.5
"""Of a call, where no replica stands still. A busy machine may take a second for it."""
MARGIN_S = 0.5
"""A busy machine delays calls by less; a replica that does not answer delays them by a second or more."""
HELD_LONGER_S = 0.75
"""What a call takes on another replica of a busy machine, beyond the time that the first one held it."""


def passed(event: Event) -> Event:
    measured = event.measured
    assert measured.num_failed == 0, (measured.num_failed, measured.failures[:5])
    recovered_s = {mark.name: measured.recovery_s(mark, MARGIN_S) for mark in measured.marks}
    assert all(seconds <= RECOVERED_S for seconds in recovered_s.values()), recovered_s
    return event


def test_equal_digests_always_hit(fleet: Fleet) -> None:
    assert passed(EVENTS["steady"](fleet, CALLS)).measured.hit_share == 1.0


def test_scaling_moves_the_keys_that_it_has_to(fleet: Fleet) -> None:
    """4 to 8 to 3 replicas."""
    facts = passed(EVENTS["scale"](fleet, CALLS)).facts
    moved = facts["moved_over_ideal"]
    assert all(ratio <= 1.1 for ratio in moved.values()), moved
    assert facts["longest_s"] <= LONGEST_S


@pytest.mark.parametrize("name", ["kill", "drain", "rolling_restart", "gateway_restart"])
def test_no_item_fails_and_none_waits(fleet: Fleet, name: str) -> None:
    assert passed(EVENTS[name](fleet, CALLS)).facts["longest_s"] <= LONGEST_S


def test_no_item_fails_at_a_slow_replica(fleet: Fleet) -> None:
    passed(EVENTS["slow_replica"](fleet, CALLS))


@pytest.mark.parametrize("name", ["stand_still", "partition"])
def test_p43_a_replica_that_does_not_answer_holds_no_call(fleet: Fleet, name: str) -> None:
    assert passed(EVENTS[name](fleet, CALLS)).facts["longest_s"] <= events.MAX_HELD_S + HELD_LONGER_S


def test_an_item_that_crashes_its_encoder_is_asked_four_times_at_most(fleet: Fleet) -> None:
    facts = passed(EVENTS["crash"](fleet, CALLS)).facts
    assert 1 <= facts["asked"] <= events.CRASH_ASKS
    assert facts["failure"] == "EncoderUnavailable"


@pytest.mark.parametrize(("mib", "calls"), [(0.5, 300), (16, 30), (64, 8)])
def test_large_bodies(fleet: Fleet, mib: float, calls: int) -> None:
    assert events.bodies(fleet, calls, int(mib * MIB)).measured.num_failed == 0


@pytest.mark.parametrize(("mib", "is_kept"), [(0.5, True), (16, True), (64, False)])
def test_bodies_up_to_16_mib_are_sent_again_by_the_gateway(fleet: Fleet, mib: float, is_kept: bool) -> None:
    """Larger ones by the adapter."""
    counted = events.killed_with_body(fleet, int(mib * MIB))
    assert (counted["retry_or_shadow_abandoned"] == 0) == is_kept, counted


@pytest.mark.parametrize(
    ("held_s", "quiet_s"),
    [(5, 5.0), pytest.param(events.HELD_S, events.QUIET_S, marks=pytest.mark.extended)],
)
def test_p47_keepalive_pings_end_no_quiet_connection(fleet: Fleet, held_s: int, quiet_s: float) -> None:
    """An item that takes long, then a time without calls. A gRPC server closes a connection after the third
    ping that comes too early for it."""
    facts = events.long_item(fleet, held_s, quiet_s)
    assert facts["took_s"] >= held_s
    assert (facts["closed"], facts["ping_timeouts"]) == (0, 0)
