"""What the planner is compared with in the scheduling simulation: three policies with its methods.

All of them drop, as they make a batch, what has expired by then, and none of them knows namespaces,
priorities or costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from encoder_service.scheduler.buckets import BucketLadder
from encoder_service.scheduler.planner import Plan, Planner, Ticket

MAX_PATCHES, MAX_ITEMS = 16_384, 64
COUNTED_ITEMS = 16


class Policy(Protocol):
    """What the simulation asks of a planner."""

    def __len__(self) -> int: ...

    def add(self, ticket: Ticket) -> None: ...

    def next_batch(self, now_s: float, busy_s: float = 0.0) -> Plan: ...


class FirstCome:
    """Items in order of arrival, up to so many patches and items; what does not fit ends the batch."""

    def __init__(self, max_patches: float, max_items: int) -> None:
        self.max_patches = max_patches
        self.max_items = max_items
        self._waiting: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)

    def next_batch(self, now_s: float, busy_s: float = 0.0) -> Plan:  # noqa: ARG002 - as the planner
        plan = Plan()
        room = self.max_patches
        while self._waiting and len(plan.batch) < self.max_items:
            ticket = self._waiting[0]
            if ticket.deadline_s is not None and ticket.deadline_s <= now_s:
                plan.expired.append(self._waiting.popleft())
                continue
            if plan.batch and ticket.num_patches > room:
                break
            plan.batch.append(self._waiting.popleft())
            room -= ticket.num_patches
        return plan


PLANNER, BUDGET, COUNT, SINGLE = "planner", "first come, patch budget", "16 items", "one at a time"


def policies(ladder: BucketLadder, weights: dict[str, float]) -> dict[str, Callable[[], Policy]]:
    """By name, how a fresh one is made."""
    return {
        PLANNER: lambda: Planner(MAX_PATCHES, MAX_ITEMS, ladder, weights),
        BUDGET: lambda: FirstCome(MAX_PATCHES, MAX_ITEMS),
        COUNT: lambda: FirstCome(float("inf"), COUNTED_ITEMS),
        SINGLE: lambda: FirstCome(float("inf"), 1),
    }
