"""The engine's records: an item on its way, a batch in flight, a result, the counters, and why an item was
dropped."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from encoder_service.engine.launch import Launched
from encoder_service.errors import Cancelled, DeadlineExceeded
from encoder_service.scheduler.planner import Late, Plan, Ticket
from encoder_service.types import TowerItem


@dataclass(frozen=True)
class TowerResult:
    """One item's rows: its destination, or a host tensor of their own. started_s: when the device turned to
    the item's batch, in the engine's clock. tower_ms: the batch's time on the device by the device's events,
    on a CPU by the clock."""

    rows: torch.Tensor
    started_s: float
    tower_ms: float


@dataclass(eq=False)
class Job:
    """One item on its way through the device; the engine's threads complete ``future``."""

    item: TowerItem
    ticket: Ticket
    destination: torch.Tensor | None = None
    future: Future[TowerResult] = field(default_factory=Future)


@dataclass(frozen=True)
class Batch:
    """Jobs that were launched together."""

    jobs: list[Job]
    launched: Launched


@dataclass
class EngineCounters:
    """busy_s: the device's time in forward passes, which never overlap."""

    batches: int = 0
    items: int = 0
    patches: int = 0
    retried_batches: int = 0
    failed_items: int = 0
    dropped_items: int = 0
    busy_s: float = 0.0


def dropped_errors(plan: Plan) -> list[tuple[Ticket, Exception]]:
    """The tickets that a plan dropped, each with the error that its future ends with."""
    found: list[tuple[Ticket, Exception]] = [(ticket, cancelled_error()) for ticket in plan.cancelled]
    found += [
        (ticket, DeadlineExceeded("the deadline passed before the item ran")) for ticket in plan.expired
    ]
    return found + [(late.ticket, late_error(late)) for late in plan.late]


def cancelled_error() -> Cancelled:
    """For an item that no caller waits for."""
    return Cancelled("every caller left before the item ran")


def late_error(late: Late) -> DeadlineExceeded:
    """For an item that is dropped before its deadline."""
    needed_ms, left_ms = round(late.needed_s * 1e3, 1), round(late.left_s * 1e3, 1)
    return DeadlineExceeded(
        f"the deadline is in {left_ms} ms, the item's rows are at least {needed_ms} ms away",
        needed_ms=needed_ms,
        left_ms=left_ms,
    )
