"""The engine's records: an item on its way, a batch in flight, a result, the counters."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from encoder_service.engine.launch import Launched
from encoder_service.engine.rows import Destination
from encoder_service.scheduler.planner import Ticket
from encoder_service.types import TowerItem


@dataclass(frozen=True)
class TowerResult:
    """One item's rows, in the destination it came with or on the host and owning their storage, and what its
    batch cost: tower_ms, its time on the
    device by the device's own events (a CPU's by the clock), and started_s, when the device turned to it, in
    the engine's clock: the end of the wait for it less that time."""

    rows: torch.Tensor
    started_s: float
    tower_ms: float


@dataclass(eq=False)
class Job:
    """One item on its way through the device; ``future`` is completed on the engine's threads."""

    item: TowerItem
    ticket: Ticket
    destination: Destination = None
    future: Future[TowerResult] = field(default_factory=Future)


@dataclass(frozen=True)
class Batch:
    """Jobs that the device was handed together."""

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
