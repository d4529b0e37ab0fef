"""The engine's records: an item on its way, where its rows go, a batch in flight, a result, why one was
dropped, the counters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from encoder_service.engine.launch import Launched
from encoder_service.engine.rows import Destination
from encoder_service.errors import Cancelled, DeadlineExceeded
from encoder_service.scheduler.planner import Late, Plan, Ticket
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
    """One item on its way through the device; ``future`` is completed on the engine's threads. late: finds
    the destination, on the event loop, once the item's batch is planned; None: it has what it will have."""

    item: TowerItem
    ticket: Ticket
    destination: Destination = None
    late: Callable[[], Destination] | None = None
    future: Future[TowerResult] = field(default_factory=Future)

    def give_up(self) -> None:
        """Nobody waits for it."""
        self.future.set_exception(given_up())


@dataclass(frozen=True)
class Batch:
    """Jobs that the device was handed together."""

    jobs: list[Job]
    launched: Launched


class LatePlaces:
    """The destinations of one batch, asked for by a thread of the engine's and found on the event loop, all
    at once. A loop that does not answer in time is not waited for, and finds nothing any more."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()  # held while places are found, so that each is the batch's or nobody's
        self._found = threading.Event()
        self._is_given_up = False

    def find(self) -> None:
        """On the event loop."""
        with self._lock:
            if self._is_given_up:
                return
            for job in self._jobs:
                if job.late is not None:
                    job.destination, job.late = job.late(), None
            self._found.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether they were found; where not, the rows take another way."""
        if not self._found.wait(timeout_s):
            with self._lock:
                self._is_given_up = not self._found.is_set()
        return not self._is_given_up


@dataclass
class EngineCounters:
    """unanswered_places: batches for which the event loop did not find places in time. busy_s: the device's
    time in forward passes, which never overlap."""

    batches: int = 0
    items: int = 0
    patches: int = 0
    retried_batches: int = 0
    failed_items: int = 0
    dropped_items: int = 0
    unanswered_places: int = 0
    busy_s: float = 0.0


def reasons_of(plan: Plan) -> list[tuple[Ticket, Exception]]:
    """What becomes of the tickets that a plan dropped."""
    found: list[tuple[Ticket, Exception]] = [(ticket, given_up()) for ticket in plan.cancelled]
    found += [
        (ticket, DeadlineExceeded("the deadline passed before the item ran")) for ticket in plan.expired
    ]
    return found + [(late.ticket, too_late(late)) for late in plan.late]


def given_up() -> Cancelled:
    """Of an item that nobody waits for."""
    return Cancelled("every caller left before the item ran")


def too_late(late: Late) -> DeadlineExceeded:
    """Of an item that was dropped before its deadline."""
    needed_ms, left_ms = round(late.needed_s * 1e3, 1), round(late.left_s * 1e3, 1)
    return DeadlineExceeded(
        f"the deadline is in {left_ms} ms, the item's rows are at least {needed_ms} ms away",
        needed_ms=needed_ms,
        left_ms=left_ms,
    )
