"""How a fleet client behaves: every figure of it with its unit, default and bounds.

Owns the figures alone; what they do is said where they are used and, for users, in docs/fleet.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

from lm_adapter.errors import InvalidRequest

__all__ = ["FleetSettings"]

LOCALITIES = ("prefer", "ignore")
# Name to lowest and highest value; what is not here is checked by name.
_BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "refresh_s": (0.01, 3600),
    "check_interval_s": (0.01, 3600),
    "check_timeout_s": (0.01, 60),
    "max_attempts": (1, 32),
    "backoff_s": (0, 60),
    "patience_s": (0, 3600),
    "max_hedges": (0, 4),
    "hedge_percentile": (0.5, 1),
    "hedge_min_s": (0, 3600),
    "hedge_max_s": (0, 3600),
    "retry_share": (0, 10),
    "retry_reserve_per_s": (0, 1e6),
    "eject_failures": (1, 1000),
    "eject_s": (0.01, 3600),
    "max_eject_s": (0.01, 3600),
    "max_ejected_share": (0, 1),
    "slow_factor": (0, 1000),
    "slow_floor_s": (0, 3600),
    "load_factor": (1, 100),
    "load_floor": (1, 1e6),
}
_COUNTS: Final = frozenset({"max_attempts", "max_hedges", "eject_failures", "load_floor"})


@dataclass(frozen=True)
class FleetSettings:
    """Figures of a fleet client.

    refresh_s: between looks at where the endpoints are.
    check_interval_s, check_timeout_s: of the health check of each replica.
    max_attempts: of one item, hedges not among them but for those that failed and were replaced. backoff_s:
    before an item goes to a replica that it has been to, doubled each time. patience_s: how long an item
    waits for a replica where there is none at all.
    max_hedges: second copies of one item, one at a time; 0 for none. hedge_percentile: of the fleet's
    latencies, the time after which an item counts as late, at least hedge_min_s and at most hedge_max_s.
    retry_share: retries and hedges as a share of items, over ten seconds. retry_reserve_per_s: allowed beside
    it, so that a client with few calls may retry at all.
    eject_failures: failures in a row that take a replica out, for eject_s, doubled each time up to
    max_eject_s. slow_factor: a replica whose median latency is this many times that of the others, and above
    slow_floor_s, is taken out too; 0 for never. max_ejected_share: of the replicas, taken out for either.
    load_factor, load_floor: a replica with more items of this client under way than this many times the mean,
    and more than the floor, passes new ones on to the next.
    locality: ``prefer`` replicas whose memory this process can map, or ``ignore`` where they are.
    """

    refresh_s: float = 5.0
    check_interval_s: float = 1.0
    check_timeout_s: float = 1.0
    max_attempts: int = 4
    backoff_s: float = 0.1
    patience_s: float = 2.0
    max_hedges: int = 1
    hedge_percentile: float = 0.95
    hedge_min_s: float = 0.02
    hedge_max_s: float = 5.0
    retry_share: float = 0.2
    retry_reserve_per_s: float = 10.0
    eject_failures: int = 3
    eject_s: float = 1.0
    max_eject_s: float = 30.0
    max_ejected_share: float = 0.5
    slow_factor: float = 4.0
    slow_floor_s: float = 0.05
    load_factor: float = 1.5
    load_floor: int = 32
    locality: str = "prefer"

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        for name, (lowest, highest) in _BOUNDS.items():
            value = getattr(self, name)
            kind = int if name in _COUNTS else int | float
            if not isinstance(value, kind) or isinstance(value, bool):
                needed = "a whole number" if name in _COUNTS else "a number"
                raise InvalidRequest(f"{name} is {value!r}, {needed} is needed")
            if not (math.isfinite(value) and lowest <= value <= highest):
                raise InvalidRequest(f"{name} is {value}, {lowest:g} to {highest:g} are possible")
        for smaller, larger in (("hedge_min_s", "hedge_max_s"), ("eject_s", "max_eject_s")):
            if getattr(self, smaller) > getattr(self, larger):
                raise InvalidRequest(
                    f"{smaller} is {getattr(self, smaller)}, above {larger}, which is {getattr(self, larger)}"
                )
        if self.locality not in LOCALITIES:
            raise InvalidRequest(f"locality is {self.locality!r}, possible are {', '.join(LOCALITIES)}")


assert set(_BOUNDS) == {field.name for field in fields(FleetSettings)} - {"locality"}
