"""The planner: which waiting items form the next batch.

Owns the order of the queue, the patch budget of a batch, and how well a batch fills its bucket. Images and
clips of all requests mix. Pure: it sees patch counts, priorities and times handed to it, never tensors,
threads or a clock; it never waits for more to come.

Policy, in this order:
1. By priority, then first come. The head of that order always goes; later items that still fit the budget
   fill it up. An item above the whole budget runs alone.
2. An item that later ones went before MAX_PASSES times lets nothing past it any more: since the head always
   goes, nothing starves within one priority.
3. With a ladder, the batch may end earlier when that is predicted to take less time in all: what it drops
   heads the next batch. The bucket's remaining room then takes later items that are small enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate

from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.scheduler.cost import Launch

# How often later items may go before one that does not fit.
MAX_PASSES = 4
# How many waiting items are looked at to fill a batch.
LOOK_AHEAD = 256
# A batch is not cut to less than this share of its patches, and only for this share of the time.
LEAST_CUT = 0.5
LEAST_GAIN = 0.01


@dataclass(eq=False)
class Ticket:
    """One item's place in the queue.

    num_patches: its size. deadline_s: drop it from then on, in the planner's caller's clock; None: never.
    cancelled: every caller left; may be set at any time before the batch starts. num_sequences: attention
    sequences of equal length that its patches form. num_frames: frames that are averaged into one row.
    passes: how often later items of its priority went before it; the planner counts.
    """

    num_patches: int
    priority: int = 0
    deadline_s: float | None = None
    cancelled: bool = False
    num_sequences: int = 1
    num_frames: int = 1
    passes: int = 0

    @property
    def launch(self) -> Launch:
        """The item as a batch of its own."""
        seqlen = -(-self.num_patches // self.num_sequences)
        return Launch(
            self.num_patches, self.num_sequences, seqlen, self.num_patches * seqlen, self.num_frames
        )


@dataclass(frozen=True)
class Plan:
    """The next batch, and what was dropped on the way to it."""

    batch: list[Ticket] = field(default_factory=list)
    cancelled: list[Ticket] = field(default_factory=list)
    expired: list[Ticket] = field(default_factory=list)

    @property
    def num_patches(self) -> int:
        return sum(ticket.num_patches for ticket in self.batch)


def launch_of(tickets: Iterable[Ticket]) -> Launch:
    """The tickets as one batch."""
    return reduce(Launch.joined, (ticket.launch for ticket in tickets), Launch.of(()))


class Planner:
    """The queue in front of the device. Not thread-safe: its owner holds the lock.

    ladder: the buckets that batches are padded to, with what they cost; None: first-come fill alone.
    """

    def __init__(self, max_patches: int, max_items: int, ladder: BucketLadder | None = None) -> None:
        self.max_patches = max_patches
        self.max_items = max_items
        self.ladder = ladder
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

        taken = self._first_come(alive)
        if self.ladder is not None and len(taken) > 1:
            taken = self._fit_bucket(self.ladder, alive, taken)
        plan.batch.extend(alive[index] for index in taken)
        chosen = set(taken)
        left = []
        for index, ticket in enumerate(alive):
            if index not in chosen:
                ticket.passes += index < taken[-1]
                left.append(ticket)
        self._waiting = left
        return plan

    def drain(self) -> list[Ticket]:
        """Takes everything out, in no useful order; for a fault or a stop."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def _first_come(self, alive: Sequence[Ticket]) -> list[int]:
        """Indices of the head and of whatever fits beside it, in order."""
        taken: list[int] = []
        room, skipped = self.max_patches, 0
        for index, ticket in enumerate(alive):
            if len(taken) == self.max_items or (taken and room <= 0) or skipped == LOOK_AHEAD:
                break
            if not taken or ticket.num_patches <= room:
                taken.append(index)
                room -= ticket.num_patches
            elif ticket.passes >= MAX_PASSES:
                break
            else:
                skipped += 1
        return taken

    def _fit_bucket(self, ladder: BucketLadder, alive: Sequence[Ticket], taken: list[int]) -> list[int]:
        """``taken``, or its beginning and later items in the room that its bucket has left, if the time of
        everything in ``taken`` together is less that way. What is dropped joins a batch that runs anyway
        when more waits, and is a batch of its own otherwise."""
        launches = list(accumulate((alive[index].launch for index in taken), Launch.joined))
        whole, more_waits = launches[-1], len(alive) > len(taken)
        best_us, kept = ladder.predicted_us(whole) * (1.0 - LEAST_GAIN), len(taken)
        rest = Launch.of(())
        for count in range(len(taken) - 1, 0, -1):
            rest = rest.joined(alive[taken[count]].launch)
            if launches[count - 1].num_patches < LEAST_CUT * whole.num_patches:
                break
            if more_waits:
                share = rest.num_patches / whole.num_patches
                rest_us = ladder.cost.added_us(rest) + ladder.cost.fixed_us * share
            else:
                rest_us = ladder.predicted_us(rest)
            us = ladder.predicted_us(launches[count - 1]) + rest_us
            if us < best_us:
                best_us, kept = us, count
        bucket = ladder.choose_for(launches[kept - 1])
        if kept == len(taken) or bucket is None:
            return taken[:kept]
        return taken[:kept] + self._riders(bucket, alive, taken[kept:], launches[kept - 1], kept)

    def _riders(
        self, bucket: Bucket, alive: Sequence[Ticket], dropped: Sequence[int], launch: Launch, count: int
    ) -> list[int]:
        """Indices, from the first dropped one on, of items that the bucket takes beside ``launch``, which
        has ``count`` items."""
        riders: list[int] = []
        for index in range(dropped[0], min(len(alive), dropped[0] + LOOK_AHEAD)):
            if count + len(riders) == self.max_items:
                break
            joined = launch.joined(alive[index].launch)
            if joined.num_patches <= self.max_patches and bucket.takes(joined):
                riders.append(index)
                launch = joined
            elif alive[index].passes >= MAX_PASSES:
                break
        return riders
