"""One caller's call over a fleet, item by item: where each goes first, again, and a second time beside.

Owns every decision about attempts, and the rule that an item is answered once: by its first success, or by
the last of its failures. No I/O and no clock of its own: the caller starts the attempts that ``take`` gives
it, tells what came of them, and comes back at ``next_due_s``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lm_adapter.errors import DeadlineExceeded, EncoderError, EncoderUnavailable
from lm_adapter.fleet.attempt import Attempt
from lm_adapter.fleet.budget import RetryBudget
from lm_adapter.fleet.latency import Latencies
from lm_adapter.fleet.outcomes import moves_on
from lm_adapter.fleet.replica import Replica, eject_if_failing
from lm_adapter.fleet.ring import load_bound, within_load
from lm_adapter.fleet.settings import FleetSettings

__all__ = ["FleetCall", "FleetCounts"]

UNKNOWN_KEY = "UNKNOWN_KEY"
NO_ENDPOINTS = "NO_ENDPOINTS"
MAX_MOVES = 3
"""Further replicas that are asked for rows that the home does not know."""
Order = Callable[[int], Sequence[Replica]]
"""The replicas that may serve an item, its home first; empty when there is none."""


@dataclass
class FleetCounts:
    """Since the client began. items: asked for; attempts: of items, the first ones included; moves: items
    that a replica did not hold and the next was asked for; refused: extra attempts that the budget did not
    allow."""

    items: int = 0
    attempts: int = 0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0
    moves: int = 0
    refused: int = 0
    ejections: int = 0
    fallbacks: int = 0
    failures: int = 0


@dataclass(eq=False)
class _ItemState:
    index: int
    is_absent_allowed: bool
    tried: list[Replica] = field(default_factory=list)
    running: list[Attempt] = field(default_factory=list)
    num_attempts: int = 0
    num_hedges: int = 0
    num_moves: int = 0
    not_before_s: float = 0.0
    since_s: float = 0.0
    """It waits for a replica, where it does."""
    failure: EncoderError | None = None
    done: bool = False


class FleetCall:
    """The decisions of one call."""

    def __init__(
        self,
        num_items: int,
        order: Order,
        settings: FleetSettings,
        budget: RetryBudget,
        counts: FleetCounts,
        latencies: Latencies | None,
        now_s: float,
        *,
        hedge_after_s: float | None = None,
        late_after_s: float = 0.0,
        absent_moves: Sequence[bool] = (),
        replicas: Callable[[], Sequence[Replica]] = tuple,
        again: bool = False,
    ) -> None:
        """order: see ``Order``. latencies: of the whole fleet, kept up; None for calls whose time says
        nothing of how long rows take. hedge_after_s: None for no hedges. late_after_s: a deadline that
        passes sooner in an attempt is the caller's own doing. absent_moves: of each item, whether a replica
        that does not know it is no reason to fail yet. replicas: all there are. again: the caller has asked
        for the items before, and has taken this out of the budget."""
        self._order, self._settings, self._budget, self._counts = order, settings, budget, counts
        self._latencies = latencies
        self._late_after_s = late_after_s
        self._hedge_after_s = hedge_after_s if settings.max_hedges else None
        self._replicas = replicas
        allowed = absent_moves or [False] * num_items
        self._items = [_ItemState(index, absent, since_s=now_s) for index, absent in enumerate(allowed)]
        self._waiting = set(range(num_items))
        """For a replica."""
        self._attempts: list[Attempt] = []
        self.notes: dict[int, str] = {}
        """Why an item that could have gone on did not."""
        self._numbers = itertools.count()
        counts.items += num_items
        budget.asked(0 if again else num_items, now_s)

    @property
    def running(self) -> Sequence[Attempt]:
        return self._attempts

    def num_attempts(self, index: int) -> int:
        return self._items[index].num_attempts + self._items[index].num_hedges

    def give_up(
        self, failure: Callable[[EncoderError | None], EncoderError], now_s: float
    ) -> list[tuple[int, EncoderError]]:
        """The time is up: ends every item that is not done, with what ``failure`` makes of its last one."""
        for attempt in self._attempts:
            if any(not self._items[index].done for index in attempt.left):
                self._blame(attempt, failure(None), now_s)
        return [
            (item.index, self._finish(item, failure(item.failure))) for item in self._items if not item.done
        ]

    # What is to be started ---------------------------------------------------------------------------------

    def take(self, now_s: float) -> tuple[list[Attempt], list[tuple[int, EncoderError]]]:
        """Attempts to start now, and items for which no replica was found in time. Each item goes to its own
        place; those with the same go in one call."""
        placed: dict[tuple[Replica, bool], list[int]] = {}
        lost: list[tuple[int, EncoderError]] = []
        for index in sorted(self._waiting):
            item = self._items[index]
            if now_s < item.not_before_s:
                continue
            replica = self._place(item)
            if replica is not None:
                self._waiting.discard(index)
                item.num_attempts += 1
                self._put(placed, (replica, False), index, item)
            elif now_s - item.since_s >= self._settings.patience_s:
                lost.append((index, self._finish(item, item.failure or _nobody())))
            else:
                item.not_before_s = now_s + max(0.01, min(self._settings.backoff_s, 0.1))
        late: set[Attempt] = set()
        is_spent = False
        for index in self._late(now_s):
            item = self._items[index]
            attempt = item.running[0]
            # Looked at before: what is left is rather for failures, which are final where there is none.
            if is_spent or (attempt.num_refused and not self._budget.has_spare(now_s)):
                self._counts.refused += not attempt.num_refused
                late.add(attempt)
                continue
            beside = self._place(item, again=False)
            if beside is None:
                late.add(attempt)
                continue
            if not self._budget.take(now_s):
                is_spent = True
                self._counts.refused += not attempt.num_refused
                late.add(attempt)
                continue
            item.num_hedges += 1
            if item.num_hedges >= self._settings.max_hedges:
                item.running[0].may_hedge.discard(index)
            self._counts.hedges += 1
            self._put(placed, (beside, True), index, item)
        for attempt in late:
            attempt.hedge_later(now_s, self._settings.backoff_s)
        return [self._start(*where, indices, now_s) for where, indices in placed.items()], lost

    def next_due_s(self) -> float | None:
        """When ``take`` has something to do at the latest; None while only outcomes are waited for."""
        due = [self._items[index].not_before_s for index in self._waiting]
        if self._hedge_after_s is not None:
            due += [
                max(attempt.started_s + self._hedge_after_s, attempt.hedge_not_before_s)
                for attempt in self._attempts
                if any(self._is_alone(index) for index in attempt.may_hedge)
            ]
        return min(due, default=None)

    def superseded(self) -> list[Attempt]:
        """Attempts that nobody waits for any more."""
        return [
            one for one in self._attempts if one.left and all(self._items[index].done for index in one.left)
        ]

    # What came of it ---------------------------------------------------------------------------------------

    def succeeded(self, attempt: Attempt, index: int, now_s: float) -> bool:
        """An item came; whether it is the first answer, which is the caller's."""
        item = self._leave(attempt, index)
        if self._latencies is None:
            attempt.replica.succeeded()
        else:
            latency_s = now_s - attempt.started_s
            attempt.replica.succeeded(latency_s)
            self._latencies.add(latency_s)
        if item.done:
            return False
        item.done = True
        self._counts.hedges_won += attempt.is_hedge
        return True

    def failed(
        self, attempt: Attempt, index: int, failure: EncoderError, now_s: float
    ) -> EncoderError | None:
        """An item failed; the failure when it is the item's last, None when it goes on."""
        item = self._leave(attempt, index)
        self._blame(attempt, failure, now_s)
        return None if item.done else self._judge(item, failure, now_s)

    def left_behind(self, attempt: Attempt, now_s: float) -> None:
        """The attempt is given up because its items came from elsewhere. It would have taken this long at
        least, and a replica that is always left behind would else never be seen to be slow. A hedge began
        later than what was faster."""
        if not attempt.is_hedge:
            attempt.replica.latencies.add(now_s - attempt.started_s, at_least=True)
        self.ended(attempt, None, now_s)

    def caller_is_slow(self) -> None:
        """Nothing more was read for a while, because the caller had not taken what there was: how long an
        item takes from here on is none of a replica's doing."""
        self._latencies = self._hedge_after_s = None
        self._late_after_s = math.inf

    def abandon(self) -> None:
        """The caller has gone: nothing is tried again, and nobody is to blame."""
        for attempt in self._attempts:
            for index in sorted(attempt.left):
                self._leave(attempt, index)
        self._attempts.clear()

    def ended(
        self, attempt: Attempt, failure: EncoderError | None, now_s: float
    ) -> list[tuple[int, EncoderError]]:
        """The attempt is over, with a failure of the whole call or without; the items that it ended."""
        self._attempts.remove(attempt)
        left = sorted(attempt.left)
        over: list[tuple[int, EncoderError]] = []
        if failure is not None and left:
            self._blame(attempt, failure, now_s)
        for index in left:
            item = self._leave(attempt, index)
            if item.done:
                continue
            last = self._judge(item, failure or _unanswered(attempt), now_s)
            if last is not None:
                over.append((index, last))
        return over

    # --------------------------------------------------------------------------------------------------------

    def _place(self, item: _ItemState, *, again: bool = True) -> Replica | None:
        """The first of the item's places that it has not been to, by load; when it has been to all, its
        home."""
        order = self._order(item.index)
        bound = load_bound(order, self._settings.load_factor, self._settings.load_floor)
        fresh = [one for one in order if one not in item.tried]
        if not fresh and again and order:
            item.tried.clear()
            fresh = list(order)
        return within_load(fresh, bound)

    def _put(
        self,
        placed: dict[tuple[Replica, bool], list[int]],
        where: tuple[Replica, bool],
        index: int,
        item: _ItemState,
    ) -> None:
        placed.setdefault(where, []).append(index)
        item.tried.append(where[0])
        where[0].num_items += 1
        self._counts.attempts += 1

    def _start(self, replica: Replica, is_hedge: bool, indices: list[int], now_s: float) -> Attempt:
        attempt = Attempt(next(self._numbers), replica, indices, now_s, is_hedge)
        self._attempts.append(attempt)
        for index in indices:
            self._items[index].running.append(attempt)
        if self._hedge_after_s is not None:
            most = self._settings.max_hedges
            attempt.may_hedge.update(index for index in indices if self._items[index].num_hedges < most)
        return attempt

    def _leave(self, attempt: Attempt, index: int) -> _ItemState:
        item = self._items[index]
        attempt.left.discard(index)
        attempt.may_hedge.discard(index)
        attempt.replica.num_items -= 1
        item.running.remove(attempt)
        return item

    def _late(self, now_s: float) -> list[int]:
        """Items that are to be hedged now."""
        if self._hedge_after_s is None:
            return []
        return [
            index
            for attempt in self._attempts
            if now_s >= max(attempt.started_s + self._hedge_after_s, attempt.hedge_not_before_s)
            for index in sorted(attempt.may_hedge)
            if self._is_alone(index)
        ]

    def _is_alone(self, index: int) -> bool:
        """One attempt runs for the item, and not a second one beside."""
        return len(self._items[index].running) == 1 and not self._items[index].done

    def _blame(self, attempt: Attempt, failure: EncoderError, now_s: float) -> None:
        if isinstance(failure, DeadlineExceeded) and now_s < attempt.started_s + self._late_after_s:
            return
        attempt.replica.failed(failure)
        if eject_if_failing(attempt.replica, self._replicas(), self._settings, now_s):
            self._counts.ejections += 1

    def _judge(self, item: _ItemState, failure: EncoderError, now_s: float) -> EncoderError | None:
        """The failure when it is the last; None when the item goes on, elsewhere or in its other attempt."""
        item.failure = failure
        is_absent = failure.reason == UNKNOWN_KEY and item.is_absent_allowed
        if not is_absent and not moves_on(failure):
            return self._finish(item, failure)
        if item.running:
            if not is_absent:
                self._may_hedge_again(item)
            return None
        if is_absent and not self._may_move(item):
            return self._finish(item, failure)
        if is_absent:
            item.num_moves += 1
            self._counts.moves += 1
        elif item.num_attempts - item.num_moves >= self._settings.max_attempts:
            return self._finish(item, failure)
        elif not self._budget.take(now_s):
            self._counts.refused += 1
            self.notes[item.index] = "the retry budget is spent"
            return self._finish(item, failure)
        else:
            self._counts.retries += 1
        item.since_s = item.not_before_s = now_s
        self._waiting.add(item.index)
        if self._is_everywhere_tried(item):
            pause_s = self._settings.backoff_s * 2.0 ** (item.num_attempts - 1)
            item.not_before_s += max(failure.retry_after_ms / 1e3, pause_s)
        return None

    def _may_hedge_again(self, item: _ItemState) -> None:
        """One of two attempts has failed. What is left may never answer: as long as attempts are left, a
        place beside it is free again."""
        if item.num_hedges and item.num_attempts - item.num_moves < self._settings.max_attempts:
            item.num_hedges -= 1
            item.num_attempts += 1
            item.running[0].hedge_anew(item.index)

    def _may_move(self, item: _ItemState) -> bool:
        """Rows of a key whose home has changed lie where it lived before: with the first of the next places
        that has not come since."""
        return item.num_moves < MAX_MOVES and not self._is_everywhere_tried(item)

    def _is_everywhere_tried(self, item: _ItemState) -> bool:
        return all(one in item.tried for one in self._order(item.index))

    def _finish(self, item: _ItemState, failure: EncoderError) -> EncoderError:
        item.done = True
        self._waiting.discard(item.index)
        return failure


def _nobody() -> EncoderError:
    return EncoderUnavailable(
        "the fleet has no replica that can be asked", reason=NO_ENDPOINTS, details={"status": "UNAVAILABLE"}
    )


def _unanswered(attempt: Attempt) -> EncoderError:
    return EncoderUnavailable(
        f"{attempt.replica.target} left the item unanswered", details={"status": "UNAVAILABLE"}
    )
