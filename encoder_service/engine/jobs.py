"""The engine's records: a queued item, a batch in flight, a result, the counters."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from encoder_service.engine.launch import Launched
from encoder_service.scheduler.planner import Ticket
from encoder_service.types import TowerItem


@dataclass(frozen=True)
class TowerResult:
    """One item's rows: its destination, or their own host tensor. started_s: when the device began the item's
    batch, in the engine's clock. tower_ms: the batch's time on the device, by device events on a GPU and by
    the clock on a CPU."""

    rows: torch.Tensor
    started_s: float
    tower_ms: float


@dataclass(eq=False)
class Job:
    """One item from ``submit`` to its rows. The engine's threads complete ``future``."""

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
    """busy_s: the device's time in forward passes, which never overlap. The other attributes are counts."""

    batches: int = 0
    items: int = 0
    patches: int = 0
    retried_batches: int = 0
    dropped_items: int = 0
    busy_s: float = 0.0
