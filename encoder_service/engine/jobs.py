"""The engine's records: an item on its way, a batch in flight, a result, the counters."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from encoder_service.engine.launch import Launched
from encoder_service.scheduler.planner import Ticket
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
    dropped_items: int = 0
    busy_s: float = 0.0
