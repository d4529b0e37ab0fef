"""What a client knows of one replica, and whether it is to be asked.

Owns the rules by which a replica leaves the ring and comes back: health checks, failures in a row, failures
that say to go elsewhere, latency. Pure, no clock of its own; ``directory`` does the checks.

    joining ──answers SERVING──> up ──┬─ says NOT_SERVING, DRAINING or NOT_READY ──> leaving
                                      ├─ cannot be reached (a failed call, or checks) ──> down
                                      └─ fails in a row, or is slow ──> ejected, for a time that doubles
    leaving, down and ejected come back with the next check that says SERVING (ejected: once its time is over)
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence

from lm_adapter.errors import (
    DeadlineExceeded,
    EncoderError,
    EncoderFault,
    EncoderOverloaded,
    EncoderUnavailable,
    InvalidRows,
    ItemFailed,
    ProtocolMismatch,
    StreamViolation,
    TruncatedStream,
)
from lm_adapter.fleet.latency import Latencies
from lm_adapter.fleet.ring import TargetHash
from lm_adapter.fleet.settings import FleetSettings

__all__ = ["Check", "Replica", "ReplicaState", "eject_if_failing", "eject_slow"]

GOING_AWAY = frozenset({"DRAINING", "NOT_READY"})
"""The service's own reasons to go elsewhere; nothing was begun."""
INTERNAL_STATUS = 13
MISSED_CHECKS = 2
"""In a row, until a replica that only does not answer is down."""
WINDOW = 64


class ReplicaState(enum.Enum):
    JOINING = "joining"
    UP = "up"
    LEAVING = "leaving"
    DOWN = "down"
    EJECTED = "ejected"


class Check(enum.Enum):
    """How a health check ended: by its answer, refused by the host, or without an answer; UNHEARD: this
    process, or the replica, was too busy to say; MISFIT: it serves another model than this client asks
    for."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    UNREACHABLE = "unreachable"
    SILENT = "silent"
    UNHEARD = "unheard"
    MISFIT = "misfit"


class Replica:
    """One replica. num_items: of this client, under way. is_local: its memory can be mapped here."""

    def __init__(self, target: str, settings: FleetSettings) -> None:
        self.target = target
        self.hash = TargetHash(target)
        self.state = ReplicaState.JOINING
        self.num_items = 0
        self.is_local = False
        self.latencies = Latencies(WINDOW)
        self.num_failures = 0
        """In a row."""
        self.num_ejections = 0
        """Of late: they lengthen the next one."""
        self.why = "not asked yet"
        self.is_misfit = False
        """It serves what this client does not ask for."""
        self._settings = settings
        self._num_missed = 0
        self._ejected_until_s = 0.0

    def __repr__(self) -> str:
        return f"<{self.target} {self.state.value}>"

    @property
    def is_up(self) -> bool:
        return self.state is ReplicaState.UP

    def checked(self, check: Check, now_s: float, why: str = "") -> None:
        """A health check ended so. why: it could not be reached."""
        if check is Check.UNHEARD:
            return
        self._num_missed = self._num_missed + 1 if check is Check.SILENT else 0
        if check in (Check.SERVING, Check.MISFIT):
            self.is_misfit = check is Check.MISFIT
        if check is Check.SERVING:
            if self.state is ReplicaState.EJECTED and now_s < self._ejected_until_s:
                return
            if not self.is_up:
                self._set(ReplicaState.UP, "")
                self.num_failures = 0
                self.latencies.clear()
            elif self.num_ejections and now_s >= self._ejected_until_s + self._settings.max_eject_s:
                self.num_ejections = 0
            return
        if check is Check.NOT_SERVING:
            self._set(ReplicaState.LEAVING, "its health check says NOT_SERVING")
        elif check is Check.UNREACHABLE:
            self._set(ReplicaState.DOWN, why or "it cannot be reached")
        elif check is Check.MISFIT:
            self._set(ReplicaState.DOWN, "it serves other weights, or none of this name")
        elif self._num_missed >= MISSED_CHECKS:
            self._set(ReplicaState.DOWN, f"{self._num_missed} health checks had no answer")

    def succeeded(self, latency_s: float | None = None) -> None:
        """An item came. latency_s: where it says how fast the replica is."""
        self.num_failures = 0
        if latency_s is not None:
            self.latencies.add(latency_s)

    def failed(self, failure: EncoderError) -> None:
        """An item or a call failed there; bad input says nothing about a replica."""
        if isinstance(failure, EncoderOverloaded) or failure.reason in ("QUEUE_FULL", "STORE_FULL"):
            return  # a full replica works
        if failure.reason in GOING_AWAY:
            self._set(ReplicaState.LEAVING, failure.message)
        elif isinstance(failure, EncoderUnavailable | ProtocolMismatch):
            self._set(ReplicaState.DOWN, failure.message)
        elif _blames_replica(failure):
            self.num_failures += 1

    def eject(self, why: str, now_s: float) -> None:
        """Takes the replica out for a while."""
        pause_s = min(self._settings.eject_s * 2.0**self.num_ejections, self._settings.max_eject_s)
        self.num_ejections = min(self.num_ejections + 1, 30)
        self._ejected_until_s = now_s + pause_s
        self._set(ReplicaState.EJECTED, f"{why}; out for {pause_s:g} s")

    def _set(self, state: ReplicaState, why: str) -> None:
        self.state, self.why = state, why


def _blames_replica(failure: EncoderError) -> bool:
    """A call that ended badly or too late, rows that broke their announcement, a device that failed."""
    if isinstance(failure, ItemFailed):
        return isinstance(failure, InvalidRows) or (failure.retryable and failure.status == INTERNAL_STATUS)
    return isinstance(failure, EncoderFault | DeadlineExceeded | TruncatedStream | StreamViolation)


def may_eject(replicas: Sequence[Replica], settings: FleetSettings) -> bool:
    """Whether one more may be taken out: not more than the share, and never the last one up."""
    num_ejected = sum(one.state is ReplicaState.EJECTED for one in replicas)
    num_up = sum(one.is_up for one in replicas)
    return num_up > 1 and num_ejected + 1 <= settings.max_ejected_share * len(replicas)


def eject_if_failing(
    replica: Replica, replicas: Sequence[Replica], settings: FleetSettings, now_s: float
) -> bool:
    """Takes a replica out after too many failures in a row, where that is allowed; whether it did."""
    if not (replica.is_up and replica.num_failures >= settings.eject_failures):
        return False
    if not may_eject(replicas, settings):
        return False
    replica.eject(f"it failed {replica.num_failures} times in a row", now_s)
    return True


def eject_slow(replicas: Sequence[Replica], settings: FleetSettings, now_s: float) -> list[Replica]:
    """Takes out those whose median latency is too many times that of the others; returns them."""
    if not settings.slow_factor:
        return []
    medians = {
        one: median for one in replicas if one.is_up and (median := one.latencies.percentile(0.5)) is not None
    }
    ejected = []
    for one, median_s in sorted(medians.items(), key=lambda pair: -pair[1]):
        others = [other_s for other, other_s in medians.items() if other is not one and other.is_up]
        if not others or not may_eject(replicas, settings):
            break
        usual_s = statistics.median(others)
        if median_s > max(settings.slow_floor_s, settings.slow_factor * usual_s):
            one.eject(f"its median latency is {median_s:.3f} s, that of the others {usual_s:.3f} s", now_s)
            ejected.append(one)
    return ejected
