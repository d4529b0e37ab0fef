"""One item's place in the queue, and tickets as launches.

Owns what the planner knows of an item, and the word of a change to it while it waits. Callers come and go on
another thread than the planner's: what they may change is a property whose new value is noted for the queue,
so that the queue need not look at every ticket for every batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from encoder_service.scheduler.cost import Launch

if TYPE_CHECKING:
    from encoder_service.scheduler.fair_queue import Flow


class Ticket:
    """One item's place in the queue.

    num_patches: its size. priority: higher goes first. deadline_s: drop it from then on, in the planner's
    caller's clock; None: never; while the ticket waits it may only move back. cancelled: every caller left;
    may be set at any time before the batch starts. num_sequences: attention sequences of equal length that
    its patches form. num_frames: frames that are averaged into one row. namespace: whose share of the device
    it takes. passes: how often later items went before it; the planner counts.

    flow, charge, alone_us belong to the queue: where it waits (None: it does not), what it takes of its
    namespace's share, and the least time that it takes on the device, alone.
    """

    __slots__ = (
        "_cancelled",
        "_notes",
        "_priority",
        "alone_us",
        "charge",
        "deadline_s",
        "flow",
        "namespace",
        "num_frames",
        "num_patches",
        "num_sequences",
        "passes",
    )

    def __init__(
        self,
        num_patches: int,
        priority: int = 0,
        deadline_s: float | None = None,
        cancelled: bool = False,
        num_sequences: int = 1,
        num_frames: int = 1,
        namespace: str = "",
    ) -> None:
        self.num_patches = num_patches
        self._priority = priority
        self.deadline_s = deadline_s
        self._cancelled = cancelled
        self.num_sequences = num_sequences
        self.num_frames = num_frames
        self.namespace = namespace
        self.passes = 0
        self._notes: deque[Ticket] | None = None
        self.flow: Flow | None = None
        self.charge = 0.0
        self.alone_us = 0.0

    def __repr__(self) -> str:
        shape = f"{self.num_patches} patches, priority {self._priority}, namespace {self.namespace!r}"
        return f"<Ticket {shape}, deadline {self.deadline_s}, passed {self.passes} times>"

    @property
    def seqlen(self) -> int:
        """Patches of each of its sequences."""
        return -(-self.num_patches // self.num_sequences)

    @property
    def priority(self) -> int:
        return self._priority

    @priority.setter
    def priority(self, value: int) -> None:
        if value != self._priority:
            self._priority = value
            self._note()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        self._cancelled = value
        self._note()

    def tell(self, notes: deque[Ticket] | None) -> None:
        """From now on changes are noted there: appending to a deque is safe beside its owner's reading."""
        self._notes = notes

    def _note(self) -> None:
        notes = self._notes  # read once: its owner may be letting go of the ticket
        if notes is not None:
            notes.append(self)


def launches_of(tickets: Iterable[Ticket]) -> list[Launch]:
    """The first ticket as a batch, the first two, and so on to all of them."""
    launches = []
    num_patches = num_sequences = max_seqlen = sum_squares = 0
    num_frames = 1
    for ticket in tickets:  # plain numbers: this is much of a plan's time
        patches, sequences = ticket.num_patches, ticket.num_sequences
        seqlen = patches if sequences == 1 else -(-patches // sequences)
        num_patches += patches
        num_sequences += sequences
        sum_squares += patches * seqlen
        if seqlen > max_seqlen:
            max_seqlen = seqlen
        if ticket.num_frames > num_frames:
            num_frames = ticket.num_frames
        launches.append(Launch(num_patches, num_sequences, max_seqlen, sum_squares, num_frames))
    return launches


def launch_of(tickets: Iterable[Ticket]) -> Launch:
    """The tickets as one batch."""
    num_patches = num_sequences = max_seqlen = sum_squares = 0
    num_frames = 1
    for ticket in tickets:
        patches, sequences = ticket.num_patches, ticket.num_sequences
        seqlen = patches if sequences == 1 else -(-patches // sequences)
        num_patches += patches
        num_sequences += sequences
        sum_squares += patches * seqlen
        if seqlen > max_seqlen:
            max_seqlen = seqlen
        if ticket.num_frames > num_frames:
            num_frames = ticket.num_frames
    return Launch(num_patches, num_sequences, max_seqlen, sum_squares, num_frames)
