"""The planner: which waiting items form the next batch.

Owns the order of the queue and the patch budget of a batch. Images and clips of all requests mix. Pure: it
sees patch counts, priorities and times handed to it, never tensors, threads or a clock.

Policy: by priority, then first come. The head of that order always goes; later items that still fit the
budget fill it up. An item above the whole budget runs alone. Since the head always goes, nothing starves
within one priority.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Ticket:
    """One item's place in the queue.

    num_patches: its size. deadline_s: drop it from then on, in the planner's caller's clock; None: never.
    cancelled: every caller left; may be set at any time before the batch starts.
    """

    num_patches: int
    priority: int = 0
    deadline_s: float | None = None
    cancelled: bool = False


@dataclass(frozen=True)
class Plan:
    """The next batch, and what was dropped on the way to it."""

    batch: list[Ticket] = field(default_factory=list)
    cancelled: list[Ticket] = field(default_factory=list)
    expired: list[Ticket] = field(default_factory=list)

    @property
    def num_patches(self) -> int:
        return sum(ticket.num_patches for ticket in self.batch)


class Planner:
    """The queue in front of the device. Not thread-safe: its owner holds the lock."""

    def __init__(self, max_patches: int, max_items: int) -> None:
        self.max_patches = max_patches
        self.max_items = max_items
        self._waiting: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_patches(self) -> int:
        return sum(ticket.num_patches for ticket in self._waiting)

    def add(self, ticket: Ticket) -> None:
        """Queues a ticket behind those of its priority."""
        self._waiting.append(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Takes one waiting ticket out of the queue. Raises ValueError when it does not wait."""
        self._waiting.remove(ticket)

    def next_batch(self, now_s: float) -> Plan:
        """Takes the next batch out of the queue, together with every ticket that is not worth running."""
        plan = Plan()
        alive: list[Ticket] = []
        for ticket in self._waiting:
            if ticket.cancelled:
                plan.cancelled.append(ticket)
            elif ticket.deadline_s is not None and ticket.deadline_s <= now_s:
                plan.expired.append(ticket)
            else:
                alive.append(ticket)
        alive.sort(key=lambda ticket: -ticket.priority)  # stable: first come within a priority

        budget = self.max_patches
        left: list[Ticket] = []
        for ticket in alive:
            fits = ticket.num_patches <= budget and len(plan.batch) < self.max_items
            if fits or not plan.batch:
                plan.batch.append(ticket)
                budget -= ticket.num_patches
            else:
                left.append(ticket)
        self._waiting = left
        return plan

    def drain(self) -> list[Ticket]:
        """Takes everything out, in no useful order; for a fault or a stop."""
        waiting, self._waiting = self._waiting, []
        return waiting
