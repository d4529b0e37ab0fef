"""The planner: which waiting items form the next batch.

Owns the patch budget of a batch, how well a batch fills its bucket, and what is not worth running. Whose turn
it is comes from fair_queue.py. Images and clips of all requests mix. Pure: it sees patch counts, priorities
and times handed to it, never tensors, threads or a clock; it never waits for more to come.

Policy, in this order (docs/scheduling.md has the bounds that follow and what they cost):
1. By priority, within it by namespaces' shares, then first come. The head of that order always goes; later
   items that still fit the budget fill it up. An item above the whole budget runs alone.
2. An item that later ones went before MAX_PASSES times lets nothing past it any more: since the head always
   goes, nothing starves within its namespace and priority.
3. With a ladder, the batch may end earlier when that is predicted to take less time in all: what it drops
   keeps its turn. The bucket's remaining room then takes later items that are small enough.
4. Items whose callers left or whose deadline passed are dropped, and with a ladder those that are surely
   late: by SURE of the predicted time of what is on the device, of the batch that goes now, and of their own.
   What else waits does not count, since it may be withdrawn or dropped itself.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.scheduler.cost import Launch
from encoder_service.scheduler.fair_queue import FairQueue
from encoder_service.scheduler.ticket import Ticket, launch_of, launches_of

__all__ = [
    "LOOK_AHEAD",
    "MAX_PASSES",
    "SURE",
    "Late",
    "Plan",
    "Planner",
    "Ticket",
    "launch_of",
    "launches_of",
]

# How often later items may go before one that does not fit.
MAX_PASSES = 4
# How many waiting items are looked at to fill a batch.
LOOK_AHEAD = 64
# A batch is not cut to less than this share of its patches, and only for this share of the time.
LEAST_CUT = 0.5
LEAST_GAIN = 0.01
# The part of a predicted time that is taken for certain.
SURE = 0.75


class Late(NamedTuple):
    """An item that cannot be in time: it surely ends needed_s from now, its deadline is in left_s."""

    ticket: Ticket
    needed_s: float
    left_s: float


@dataclass(frozen=True)
class Plan:
    """The next batch, and what was dropped on the way to it."""

    batch: list[Ticket] = field(default_factory=list)
    cancelled: list[Ticket] = field(default_factory=list)
    expired: list[Ticket] = field(default_factory=list)
    late: list[Late] = field(default_factory=list)

    @property
    def num_patches(self) -> int:
        return sum(ticket.num_patches for ticket in self.batch)


class Window:
    """The order of the queue as far as it was looked at. Indices are places in it."""

    def __init__(self, order: Iterator[Ticket]) -> None:
        self._order = order
        self.seen: list[Ticket] = []

    def from_place(self, index: int) -> Iterator[tuple[int, Ticket]]:
        """Places and tickets from one that was seen, or from the next."""
        yield from enumerate(self.seen[index:], index)
        for place, ticket in enumerate(self._order, len(self.seen)):
            self.seen.append(ticket)
            yield place, ticket


class Planner:
    """The queue in front of the device. Not thread-safe: its owner holds the lock.

    ladder: the buckets that batches are padded to, with what they cost; None: first-come fill alone, shares
    are of patches, and nothing is predicted. weights: of namespaces' shares of the device's time within a
    priority, above 0; 1 for those left out.
    """

    def __init__(
        self,
        max_patches: int,
        max_items: int,
        ladder: BucketLadder | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.max_patches = max_patches
        self.max_items = max_items
        self.ladder = ladder
        self._queue = FairQueue(weights)
        self._notes: deque[Ticket] = deque()  # tickets that were changed while they wait
        # By the last moment at which the device would have to be free for them.
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._stamps = count()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def num_patches(self) -> int:
        return self._queue.num_patches

    @property
    def has_full_batch(self) -> bool:
        """Whether what waits is more than a batch takes: a later one would not be larger."""
        return self._queue.num_patches >= self.max_patches or len(self._queue) >= self.max_items

    def add(self, ticket: Ticket) -> None:
        """Queues a ticket behind those of its priority and namespace. Its sizes stay as they are."""
        assert ticket.flow is None
        ticket.charge, ticket.alone_us = self._charge(ticket)
        ticket.tell(self._notes)  # before it is queued as what it is now: another thread may change it
        self._queue.add(ticket)
        if ticket.cancelled:
            self._notes.append(ticket)
        self._note_deadline(ticket, ticket.deadline_s)

    def remove(self, ticket: Ticket) -> None:
        """Takes one waiting ticket out of the queue. Raises ValueError when it does not wait."""
        if ticket.flow is None:
            raise ValueError(f"{ticket} does not wait")
        self._withdraw(ticket)

    def predicted_us(self, tickets: Iterable[Ticket]) -> float:
        """Device time of the tickets as one batch; 0.0 where nothing is predicted."""
        return 0.0 if self.ladder is None else self.ladder.predicted_us(launch_of(tickets))

    def next_batch(self, now_s: float, busy_s: float = 0.0) -> Plan:
        """Takes the next batch out of the queue, together with tickets that are not worth running. busy_s:
        how much longer the device surely works on what it was given before. An empty batch: nothing waits."""
        plan = Plan()
        self._take_changed(plan)
        self._take_hopeless(plan, now_s, busy_s)
        while len(self._queue) and not plan.batch:
            batch_us = self._take_batch(plan, now_s, busy_s)
            self._take_hopeless(plan, now_s, busy_s + SURE * batch_us / 1e6)
        return plan

    def drain(self) -> list[Ticket]:
        """Takes everything out, in no useful order; for a fault or a stop."""
        waiting = self._queue.drain()
        for ticket in waiting:
            ticket.tell(None)
        self._deadlines.clear()
        self._notes.clear()
        return waiting

    # -- what is not worth running ---------------------------------------------------------------------

    def _charge(self, ticket: Ticket) -> tuple[float, float]:
        """What a ticket takes of its namespace's share, and the least time that it takes alone."""
        if self.ladder is None:
            return float(ticket.num_patches), 0.0
        launch = launch_of((ticket,))
        cost = self.ladder.cost
        alone_us = cost.exact_us(launch)
        if self.ladder.price(*launch[:3], launch.num_frames) is None:  # nothing rides with it in a graph
            return self.ladder.predicted_us(launch), alone_us
        return cost.added_us(launch), alone_us

    def _withdraw(self, ticket: Ticket) -> None:
        self._queue.withdraw(ticket)
        ticket.tell(None)

    def _take_changed(self, plan: Plan) -> None:
        while self._notes:
            ticket = self._notes.popleft()
            if ticket.flow is None:
                continue
            if ticket.cancelled:
                self._withdraw(ticket)
                plan.cancelled.append(ticket)
            elif ticket.priority != ticket.flow.line.priority:
                self._queue.withdraw(ticket)
                self._queue.add(ticket)

    def _note_deadline(self, ticket: Ticket, deadline_s: float | None) -> None:
        if deadline_s is not None:
            if len(self._deadlines) > 2 * len(self._queue) + 16:
                self._deadlines = [entry for entry in self._deadlines if entry[2].flow is not None]
                heapq.heapify(self._deadlines)
            due_s = deadline_s - SURE * ticket.alone_us / 1e6
            heapq.heappush(self._deadlines, (due_s, next(self._stamps), ticket))

    def _take_hopeless(self, plan: Plan, now_s: float, busy_s: float) -> None:
        """Drops what would be late even if the device turned to it in ``busy_s``, alone."""
        later: list[tuple[Ticket, float]] = []
        while self._deadlines and self._deadlines[0][0] <= now_s + busy_s:
            ticket = heapq.heappop(self._deadlines)[2]
            deadline_s = ticket.deadline_s  # read once: a caller who joins may change it meanwhile
            if ticket.flow is None or deadline_s is None:
                continue
            if not self._drop_if_late(plan, ticket, deadline_s, now_s, busy_s + SURE * ticket.alone_us / 1e6):
                later.append((ticket, deadline_s))
        for ticket, deadline_s in later:
            self._note_deadline(ticket, deadline_s)

    def _drop_if_late(
        self, plan: Plan, ticket: Ticket, deadline_s: float, now_s: float, needed_s: float
    ) -> bool:
        left_s = deadline_s - now_s
        if left_s > 0 and needed_s <= left_s:
            return False
        self._withdraw(ticket)
        if left_s <= 0:
            plan.expired.append(ticket)
        else:
            plan.late.append(Late(ticket, needed_s, left_s))
        return True

    # -- the batch -------------------------------------------------------------------------------------

    def _take_batch(self, plan: Plan, now_s: float, busy_s: float) -> float:
        """The batch whose turn it is, but for those of it that would be late. Returns the microseconds that
        are predicted for it without its padding."""
        window = Window(self._queue.turn())
        taken = self._first_come(window)
        if self.ladder is not None and len(taken) > 1:
            taken = self._fit_bucket(self.ladder, window, taken)
        if len(taken) <= taken[-1]:
            chosen = set(taken)
            for index in range(taken[-1]):
                if index not in chosen:
                    window.seen[index].passes += 1
        fixed_us = 0.0 if self.ladder is None else self.ladder.cost.fixed_us
        ahead_us = fixed_us
        for index in taken:
            ticket = window.seen[index]
            deadline_s = ticket.deadline_s
            if deadline_s is not None and self.ladder is not None:
                needed_s = busy_s + SURE * (ahead_us + ticket.charge) / 1e6
                if self._drop_if_late(plan, ticket, deadline_s, now_s, needed_s):
                    continue
            ahead_us += ticket.charge
            plan.batch.append(ticket)
        self._queue.serve(plan.batch)
        for ticket in plan.batch:
            ticket.tell(None)
        return ahead_us if plan.batch and self.ladder is not None else 0.0

    def _first_come(self, window: Window) -> list[int]:
        """Indices of the head and of whatever fits beside it, in order."""
        taken: list[int] = []
        room, skipped, least = self.max_patches, 0, self._queue.least_patches
        for index, ticket in window.from_place(0):
            size = ticket.num_patches
            if size <= room or not taken:
                taken.append(index)
                room -= size
                if room < least or len(taken) == self.max_items:
                    break
            elif ticket.passes >= MAX_PASSES:
                break
            else:
                skipped += 1
                if skipped == LOOK_AHEAD:
                    break
        return taken

    def _fit_bucket(self, ladder: BucketLadder, window: Window, taken: list[int]) -> list[int]:
        """``taken``, or its beginning and later items in the room that its bucket has left, if the time of
        everything in ``taken`` together is less that way. What is dropped joins a batch that runs anyway
        when more waits, and is a batch of its own otherwise."""
        tickets = [window.seen[index] for index in taken]
        whole, more_waits = launch_of(tickets), len(self._queue) > len(taken)
        best_us, kept = ladder.predicted_us(whole) * (1.0 - LEAST_GAIN), len(taken)
        cost = ladder.cost
        if best_us <= cost.exact_us(whole):  # there is no padding to save
            return taken
        launches = launches_of(tickets)
        rests = [] if more_waits else launches_of(reversed(tickets))
        patch_us = cost.us_per_patch + cost.fixed_us / whole.num_patches
        for num_kept in range(len(taken) - 1, 0, -1):
            launch = launches[num_kept - 1]
            if launch.num_patches < LEAST_CUT * whole.num_patches:
                break
            if more_waits:
                rest_us = patch_us * (whole.num_patches - launch.num_patches)
                rest_us += cost.us_per_square * (whole.sum_squares - launch.sum_squares)
            else:
                rest_us = ladder.predicted_us(rests[len(taken) - num_kept - 1])
            us = ladder.predicted_us(launch) + rest_us
            if us < best_us:
                best_us, kept = us, num_kept
        bucket = ladder.choose_for(launches[kept - 1])
        if kept == len(taken) or bucket is None:
            return taken[:kept]
        return taken[:kept] + self._riders(bucket, window, taken[kept], launches[kept - 1], kept)

    def _riders(
        self, bucket: Bucket, window: Window, first_dropped: int, launch: Launch, num_kept: int
    ) -> list[int]:
        """Indices, from the first dropped one on, of items that the bucket takes beside ``launch``, which
        has ``num_kept`` items."""
        riders: list[int] = []
        room = min(self.max_patches, bucket.num_patches) - launch.num_patches
        slots = bucket.num_sequences - launch.num_sequences
        least = max(1, self._queue.least_patches)
        if room < least or slots <= 0:
            return riders
        for index, ticket in window.from_place(first_dropped):
            if (
                ticket.num_patches <= room
                and ticket.num_sequences <= slots
                and ticket.seqlen <= bucket.max_seqlen
                and ticket.num_frames <= bucket.num_frames
            ):
                riders.append(index)
                room -= ticket.num_patches
                slots -= ticket.num_sequences
                if room < least or slots <= 0 or num_kept + len(riders) == self.max_items:
                    break
            elif ticket.passes >= MAX_PASSES:
                break
            if index == first_dropped + LOOK_AHEAD:
                break
        return riders
