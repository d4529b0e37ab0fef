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
from operator import attrgetter

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
    def seqlen(self) -> int:
        """Patches of each of its sequences."""
        return -(-self.num_patches // self.num_sequences)


@dataclass(frozen=True)
class Plan:
    """The next batch, and what was dropped on the way to it."""

    batch: list[Ticket] = field(default_factory=list)
    cancelled: list[Ticket] = field(default_factory=list)
    expired: list[Ticket] = field(default_factory=list)

    @property
    def num_patches(self) -> int:
        return sum(ticket.num_patches for ticket in self.batch)


def launches_of(tickets: Iterable[Ticket]) -> list[Launch]:
    """The first ticket as a batch, the first two, and so on to all of them."""
    launches = []
    num_patches = num_sequences = max_seqlen = sum_squares = 0
    num_frames = 1
    for ticket in tickets:  # plain numbers: this is most of a plan's time
        seqlen = ticket.seqlen
        num_patches += ticket.num_patches
        num_sequences += ticket.num_sequences
        sum_squares += ticket.num_patches * seqlen
        if seqlen > max_seqlen:
            max_seqlen = seqlen
        if ticket.num_frames > num_frames:
            num_frames = ticket.num_frames
        launches.append(Launch(num_patches, num_sequences, max_seqlen, sum_squares, num_frames))
    return launches


def launch_of(tickets: Iterable[Ticket]) -> Launch:
    """The tickets as one batch."""
    launches = launches_of(tickets)
    return launches[-1] if launches else Launch.of(())


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
            deadline_s = ticket.deadline_s  # read once: a caller who joins may change it meanwhile
            if ticket.cancelled:
                plan.cancelled.append(ticket)
            elif deadline_s is not None and deadline_s <= now_s:
                plan.expired.append(ticket)
            else:
                alive.append(ticket)
        alive.sort(key=attrgetter("priority"), reverse=True)  # stable: first come within a priority

        taken = self._first_come(alive)
        if self.ladder is not None and len(taken) > 1:
            taken = self._fit_bucket(self.ladder, alive, taken)
        plan.batch.extend(alive[index] for index in taken)
        end, chosen = taken[-1] + 1 if taken else 0, set(taken)
        passed = [alive[index] for index in range(end) if index not in chosen]
        for ticket in passed:
            ticket.passes += 1
        self._waiting = passed + alive[end:]
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
        launches = launches_of([alive[index] for index in taken])
        whole, more_waits = launches[-1], len(alive) > len(taken)
        best_us, kept = ladder.predicted_us(whole) * (1.0 - LEAST_GAIN), len(taken)
        rests = [] if more_waits else launches_of([alive[index] for index in reversed(taken)])
        cost = ladder.cost
        patch_us = cost.us_per_patch + cost.fixed_us / whole.num_patches
        for count in range(len(taken) - 1, 0, -1):
            launch = launches[count - 1]
            if launch.num_patches < LEAST_CUT * whole.num_patches:
                break
            if more_waits:
                rest_us = patch_us * (whole.num_patches - launch.num_patches)
                rest_us += cost.us_per_square * (whole.sum_squares - launch.sum_squares)
            else:
                rest_us = ladder.predicted_us(rests[len(taken) - count - 1])
            us = ladder.predicted_us(launch) + rest_us
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
        room = min(self.max_patches, bucket.num_patches) - launch.num_patches
        slots = bucket.num_sequences - launch.num_sequences
        for index in range(dropped[0], min(len(alive), dropped[0] + LOOK_AHEAD)):
            if room <= 0 or slots <= 0 or count + len(riders) == self.max_items:
                break
            ticket = alive[index]
            if (
                ticket.num_patches <= room
                and ticket.num_sequences <= slots
                and ticket.seqlen <= bucket.max_seqlen
                and ticket.num_frames <= bucket.num_frames
            ):
                riders.append(index)
                room -= ticket.num_patches
                slots -= ticket.num_sequences
            elif ticket.passes >= MAX_PASSES:
                break
        return riders
