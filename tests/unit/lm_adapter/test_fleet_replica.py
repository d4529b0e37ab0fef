"""How a replica leaves the ring and comes back."""

from __future__ import annotations

import pytest

from lm_adapter.errors import (
    DeadlineExceeded,
    EncoderError,
    EncoderFault,
    EncoderOverloaded,
    EncoderUnavailable,
    InvalidRows,
    ItemFailed,
    ProtocolMismatch,
    RequestRefused,
    TruncatedStream,
)
from lm_adapter.fleet import FleetSettings
from lm_adapter.fleet.latency import MIN_SAMPLES
from lm_adapter.fleet.replica import Check, Replica, ReplicaState, eject_if_failing, eject_slow

SETTINGS = FleetSettings(eject_failures=3, eject_s=1.0, max_eject_s=4.0, slow_factor=4.0, slow_floor_s=0.05)
FAULT = EncoderFault("the device failed")


def up(number: int = 0) -> Replica:
    one = Replica(f"10.0.0.{number}:1", SETTINGS)
    one.checked(Check.SERVING, 0.0)
    return one


def test_a_new_replica_joins_with_its_first_answer() -> None:
    one = Replica("10.0.0.1:1", SETTINGS)
    assert one.state is ReplicaState.JOINING
    one.checked(Check.SILENT, 0.0)
    assert one.state is ReplicaState.JOINING
    one.checked(Check.SERVING, 1.0)
    assert one.is_up


@pytest.mark.parametrize(
    ("failure", "state"),
    [
        (ItemFailed("stopping", reason="DRAINING", status=14, retryable=True), ReplicaState.LEAVING),
        (EncoderUnavailable("starting", reason="NOT_READY"), ReplicaState.LEAVING),
        (EncoderUnavailable("connection refused"), ReplicaState.DOWN),
        (ProtocolMismatch("speaks version 9"), ReplicaState.DOWN),
        (EncoderOverloaded("64 of 64"), ReplicaState.UP),
        (ItemFailed("full", reason="QUEUE_FULL", status=8, retryable=True), ReplicaState.UP),
        (ItemFailed("no image", reason="UNDECODABLE_IMAGE", status=3), ReplicaState.UP),
        (ItemFailed("no answer from the URL", reason="URL_UNREACHABLE", status=14), ReplicaState.UP),
        (RequestRefused("no token"), ReplicaState.UP),
    ],
)
def test_p37_one_failure_says_whether_to_go_elsewhere(failure: EncoderError, state: ReplicaState) -> None:
    one = up()
    for _ in range(1 if state is not ReplicaState.UP else 10):
        one.failed(failure)
    assert one.state is state
    assert one.num_failures == 0
    one.checked(Check.SERVING, 1.0)
    assert one.is_up


@pytest.mark.parametrize(
    "failure",
    [
        FAULT,
        DeadlineExceeded("late"),
        TruncatedStream("2 of 3"),
        InvalidRows("width", "wrong", found=1, expected=2),
        ItemFailed("the device is gone", reason="DEVICE_FAULT", status=13, retryable=True),
    ],
)
def test_failures_in_a_row_take_it_out_and_one_success_forgives(failure: EncoderError) -> None:
    replicas = [up(0), up(1)]
    one = replicas[0]
    for _ in range(2):
        one.failed(failure)
    one.succeeded(0.01)
    for _ in range(2):
        one.failed(failure)
    assert not eject_if_failing(one, replicas, SETTINGS, 5.0)
    one.failed(failure)
    assert eject_if_failing(one, replicas, SETTINGS, 5.0)
    assert one.state is ReplicaState.EJECTED
    assert "failed 3 times in a row" in one.why


def test_the_time_out_doubles_to_its_limit_and_ends_with_a_check() -> None:
    one = up()
    now_s, pauses = 0.0, []
    for _ in range(5):
        one.eject("test", now_s)
        began_s = now_s
        while not one.is_up:
            now_s += 0.25
            one.checked(Check.SERVING, now_s)
        pauses.append(now_s - began_s)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]
    # Long after, it starts anew.
    one.checked(Check.SERVING, now_s + 100)
    one.eject("test", now_s + 100)
    one.checked(Check.SERVING, now_s + 101)
    assert one.is_up


def test_an_ejected_replica_that_stops_is_down_and_not_only_out() -> None:
    one = up()
    one.eject("test", 0.0)
    one.checked(Check.UNREACHABLE, 0.5)
    assert one.state is ReplicaState.DOWN


def test_silence_counts_twice_refusal_once() -> None:
    one = up()
    one.checked(Check.SILENT, 1.0)
    assert one.is_up
    one.checked(Check.SERVING, 2.0)
    one.checked(Check.SILENT, 3.0)
    assert one.is_up
    one.checked(Check.SILENT, 4.0)
    assert one.state is ReplicaState.DOWN
    assert "2 health checks" in one.why
    busy = up(4)
    for _ in range(5):
        busy.checked(Check.UNHEARD, 1.0)
    assert busy.is_up, "this process was late, not the replica"
    other = up(1)
    other.checked(Check.UNREACHABLE, 1.0)
    assert other.state is ReplicaState.DOWN
    third = up(2)
    third.checked(Check.NOT_SERVING, 1.0)
    assert third.state is ReplicaState.LEAVING
    fourth = up(3)
    fourth.checked(Check.MISFIT, 1.0)
    assert fourth.state is ReplicaState.DOWN


def with_median(one: Replica, seconds: float) -> Replica:
    for _ in range(MIN_SAMPLES):
        one.latencies.add(seconds)
    return one


def test_the_slow_one_is_taken_out_and_starts_with_no_history() -> None:
    replicas = [with_median(up(number), 0.05) for number in range(3)] + [with_median(up(9), 0.3)]
    assert eject_slow(replicas, SETTINGS, 10.0) == [replicas[3]]
    assert "0.300 s" in replicas[3].why
    assert "0.050 s" in replicas[3].why
    replicas[3].checked(Check.SERVING, 11.0)
    assert replicas[3].is_up
    assert eject_slow(replicas, SETTINGS, 11.0) == []


@pytest.mark.parametrize(
    ("usual_s", "slow_s", "factor"),
    [(0.05, 0.15, 4.0), (0.001, 0.04, 4.0), (0.05, 5.0, 0.0)],
    ids=["under the factor", "under the floor", "switched off"],
)
def test_who_is_not_slow_enough_stays(usual_s: float, slow_s: float, factor: float) -> None:
    settings = FleetSettings(slow_factor=factor, slow_floor_s=0.05)
    replicas = [with_median(up(number), usual_s) for number in range(3)] + [with_median(up(9), slow_s)]
    assert eject_slow(replicas, settings, 0.0) == []


def test_ejection_stops_at_its_share_and_leaves_the_last_one() -> None:
    replicas = [up(number) for number in range(4)]
    for one in replicas:
        for _ in range(3):
            one.failed(FAULT)
    assert [eject_if_failing(one, replicas, SETTINGS, 0.0) for one in replicas] == [True, True, False, False]
    alone = [up()]
    for _ in range(9):
        alone[0].failed(FAULT)
    assert not eject_if_failing(alone[0], alone, FleetSettings(max_ejected_share=1.0), 0.0)
