"""The planner: which waiting items form the next batch.

Owns the queue in front of the device, the patch budget of a batch, and the dropping of items that are not
worth running. Tensors, threads and the clock belong to the engine: the planner sees patch counts and the
times that it is given. It never waits for more items.

Policy, in this order:
1. Encode goes before Prefetch, and first come first served within a class. After MAX_ENCODE_BATCHES batches
   in a row that an Encode led while a Prefetch waited, a Prefetch leads one. The first item in this order
   always runs. Later items that fit the remaining budget fill the batch. An item above the whole budget runs
   alone.
2. An item that later items overtook MAX_PASSES times lets no further item pass, so that no item starves.
3. With a ladder, the batch may end earlier if that lowers the predicted time of everything in it. Later items
   that are small enough then fill the bucket's remaining room.
4. Items whose callers left or whose deadline passed are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from encoder_service.errors import Cancelled, DeadlineExceeded, VisionEncoderError
from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.scheduler.cost import Launch

# Items in one forward pass.
MAX_ITEMS_PER_BATCH = 64
# How often later items may overtake one that does not fit.
MAX_PASSES = 4
# How many batches in a row Encodes may lead while a Prefetch waits.
MAX_ENCODE_BATCHES = 16
# How many waiting items are considered to fill a batch, beyond its maximum number of items.
LOOK_AHEAD = 64
# A batch is cut to no less than LEAST_CUT of its patches, and only if that saves LEAST_GAIN of the time.
LEAST_CUT = 0.5
LEAST_GAIN = 0.01


@dataclass(eq=False, slots=True)
class Ticket:
    """One item in the queue.

    num_patches: the item's size. deadline_s: the time from which it is dropped, in the engine's clock; None
    for never. is_prefetch: no caller waits for it; an Encode that joins clears the flag. cancelled: every
    caller left. Other threads may change these three while the ticket waits, the deadline only to a later
    one; the next batch uses the new values. is_dropped: the planner dropped it for its deadline, so a later
    caller must not wait for it. num_sequences: attention sequences of equal length that the patches form.
    num_frames: frames averaged into one row. passes: how often later items overtook it, counted by the
    planner.
    """

    num_patches: int
    deadline_s: float | None = None
    is_prefetch: bool = False
    cancelled: bool = False
    is_dropped: bool = False
    num_sequences: int = 1
    num_frames: int = 1
    passes: int = 0

    @property
    def seqlen(self) -> int:
        """Patches per attention sequence."""
        return -(-self.num_patches // self.num_sequences)


@dataclass(frozen=True)
class Plan:
    """The next batch, and the tickets that were dropped, each with the reason."""

    batch: list[Ticket]
    dropped: dict[Ticket, VisionEncoderError]


class Planner:
    """The queue in front of the device. Not thread-safe: its owner holds a lock.

    max_patches, max_items: limits of a batch. ladder: the buckets that batches are padded to, with their cost
    model. Without a ladder, batches are filled in order and nothing is predicted.
    """

    def __init__(self, max_patches: int, max_items: int, ladder: BucketLadder | None = None) -> None:
        self.max_patches = max_patches
        self.max_items = max_items
        self.ladder = ladder
        self.num_patches = 0
        # Ordered sets: tickets in order of arrival.
        self._encodes: dict[Ticket, None] = {}
        self._prefetches: dict[Ticket, None] = {}
        self._num_encode_batches = 0

    def __len__(self) -> int:
        return len(self._encodes) + len(self._prefetches)

    @property
    def has_full_batch(self) -> bool:
        """Whether the waiting items already reach a limit of the batch."""
        return self.num_patches >= self.max_patches or len(self) >= self.max_items

    def add(self, ticket: Ticket) -> None:
        """Queues a ticket behind those of its class. Its size must not change while it waits."""
        assert ticket not in self._encodes
        assert ticket not in self._prefetches
        (self._prefetches if ticket.is_prefetch else self._encodes)[ticket] = None
        self.num_patches += ticket.num_patches

    def remove(self, ticket: Ticket) -> None:
        """Removes a waiting ticket. Raises ValueError if it does not wait."""
        lane = self._encodes if ticket in self._encodes else self._prefetches
        if ticket not in lane:
            raise ValueError(f"{ticket} does not wait")
        del lane[ticket]
        self.num_patches -= ticket.num_patches

    def drain(self) -> list[Ticket]:
        """Removes and returns all waiting tickets, for a fault or a stop."""
        waiting = [*self._encodes, *self._prefetches]
        self._encodes.clear()
        self._prefetches.clear()
        self.num_patches = 0
        return waiting

    def predicted_us(self, tickets: Iterable[Ticket]) -> float:
        """Predicted device time of the tickets as one batch; 0.0 without a ladder."""
        return 0.0 if self.ladder is None else self.ladder.predicted_us(launch_of(tickets))

    def next_batch(self, now_s: float) -> Plan:
        """Takes the next batch out of the queue, together with tickets that are not worth running. The batch
        is empty if nothing waits."""
        dropped = self._drop_and_promote(now_s)
        return Plan(self._take_batch() if len(self) else [], dropped)

    # -- dropping --------------------------------------------------------------------------------------

    def _drop_and_promote(self, now_s: float) -> dict[Ticket, VisionEncoderError]:
        """Drops cancelled and late tickets. Moves a Prefetch that an Encode joined behind the Encodes."""
        dropped: dict[Ticket, VisionEncoderError] = {}
        for lane in (self._encodes, self._prefetches):
            for ticket in list(lane):
                if ticket.cancelled:
                    self.remove(ticket)
                    dropped[ticket] = cancelled_error()
                elif self._is_late(ticket, now_s):
                    self.remove(ticket)
                    dropped[ticket] = late_error()
                elif lane is self._prefetches and not ticket.is_prefetch:
                    self._encodes[ticket] = lane.pop(ticket)
        return dropped

    def _is_late(self, ticket: Ticket, now_s: float) -> bool:
        """Also marks the ticket as dropped."""
        deadline_s = ticket.deadline_s  # read once, since a caller that joins may change it concurrently
        if deadline_s is None or deadline_s > now_s:
            return False
        ticket.is_dropped = True  # a joining caller writes the deadline first and then reads this flag
        if ticket.deadline_s != deadline_s:
            ticket.is_dropped = False
            return False
        return True

    # -- the batch -------------------------------------------------------------------------------------

    def _window(self) -> list[Ticket]:
        """The tickets that the next batch is chosen from. The first one always runs."""
        first, second = self._encodes, self._prefetches
        if not (first and second):
            self._num_encode_batches = 0
        elif self._num_encode_batches < MAX_ENCODE_BATCHES:
            self._num_encode_batches += 1
        else:
            self._num_encode_batches = 0
            first, second = second, first
        return list(islice(chain(first, second), self.max_items + LOOK_AHEAD))

    def _take_batch(self) -> list[Ticket]:
        """Takes the next batch out of the queue, which is not empty."""
        window = self._window()
        taken = self._first_come(window)
        if self.ladder is not None and len(taken) > 1:
            taken = self._fit_bucket(self.ladder, window, taken)
        chosen = set(taken)
        for index in range(taken[-1]):
            if index not in chosen:
                window[index].passes += 1
        batch = [window[index] for index in taken]
        for ticket in batch:
            self.remove(ticket)
        return batch

    def _first_come(self, window: Sequence[Ticket]) -> list[int]:
        """Indices of the first ticket and of those that fit beside it, in order."""
        taken: list[int] = []
        room = self.max_patches
        for index, ticket in enumerate(window):
            if ticket.num_patches <= room or not taken:
                taken.append(index)
                room -= ticket.num_patches
                if room <= 0 or len(taken) == self.max_items:
                    break
            elif ticket.passes >= MAX_PASSES:
                break
        return taken

    def _fit_bucket(self, ladder: BucketLadder, window: Sequence[Ticket], taken: list[int]) -> list[int]:
        """Chooses between ``taken`` and a prefix of it that is filled up with later items that fit into its
        bucket. Returns the one with the lower predicted time for everything in ``taken``. The items that are
        cut off join a batch that runs in any case if more items wait; otherwise they form their own batch."""
        tickets = [window[index] for index in taken]
        whole, more_waits = launch_of(tickets), len(self) > len(taken)
        best_us, num_best = ladder.predicted_us(whole) * (1.0 - LEAST_GAIN), len(taken)
        cost = ladder.cost
        if best_us <= cost.exact_us(whole):  # there is no padding to avoid
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
                best_us, num_best = us, num_kept
        kept = launches[num_best - 1]
        bucket = ladder.choose(kept)
        if num_best == len(taken) or bucket is None:
            return taken[:num_best]
        return taken[:num_best] + self._riders(bucket, window, taken[num_best], kept, num_best)

    def _riders(
        self, bucket: Bucket, window: Sequence[Ticket], first_cut: int, kept: Launch, num_kept: int
    ) -> list[int]:
        """Indices, from ``first_cut`` on, of items that fit into the bucket beside ``kept``, a launch of
        ``num_kept`` items."""
        riders: list[int] = []
        room = min(self.max_patches, bucket.num_patches) - kept.num_patches
        slots = bucket.num_sequences - kept.num_sequences
        for index, ticket in enumerate(window[first_cut:], first_cut):
            if room <= 0 or slots <= 0 or num_kept + len(riders) == self.max_items:
                break
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


def cancelled_error() -> Cancelled:
    """The error of an item that no caller waits for."""
    return Cancelled("every caller left before the item ran")


def late_error() -> DeadlineExceeded:
    """The error of an item whose deadline passed while it waited."""
    return DeadlineExceeded("the deadline passed before the item ran")


def launches_of(tickets: Iterable[Ticket]) -> list[Launch]:
    """The launches of every prefix of the tickets: the first, the first two, and so on."""
    launches = []
    num_patches = num_sequences = max_seqlen = sum_squares = 0
    num_frames = 1
    for ticket in tickets:
        seqlen = ticket.seqlen
        num_patches += ticket.num_patches
        num_sequences += ticket.num_sequences
        sum_squares += ticket.num_patches * seqlen
        max_seqlen = max(max_seqlen, seqlen)
        num_frames = max(num_frames, ticket.num_frames)
        launches.append(Launch(num_patches, num_sequences, max_seqlen, sum_squares, num_frames))
    return launches


def launch_of(tickets: Iterable[Ticket]) -> Launch:
    """The launch of the tickets as one batch."""
    launches = launches_of(tickets)
    return launches[-1] if launches else Launch(0, 0, 0, 0)
