"""One call over a fleet, run: attempts as tasks, their events in one queue, the caller's outcomes out of it.

Owns the tasks of a call and that none outlives it. What is tried, and what an event means, is ``call``'s.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

from lm_adapter.errors import (
    CallCancelled,
    EncoderError,
    EncoderUnavailable,
    InvalidRequest,
    ItemFailed,
    MissingDependency,
)
from lm_adapter.fleet.attempt import Attempt
from lm_adapter.fleet.call import NO_ENDPOINTS, FleetCall
from lm_adapter.fleet.directory import Directory, Member, gone, until_done
from lm_adapter.fleet.outcomes import as_item_failure, deadline_passed, moves_on
from lm_adapter.session import Deadline
from lm_adapter.transport.buffers import RowsHandling
from lm_adapter.types import EncodedRows

__all__ = ["CallRun", "Open", "Rescue", "may_hedge"]

KEPT_BYTES = 64 << 20
"""Of rows that have come and that the caller has not asked for yet; nothing more is read beyond."""
END_S = 1.0
"""For streams whose items have all come, to say that they are over."""

ResultT = TypeVar("ResultT")
Finished: TypeAlias = tuple[int, "ResultT | ItemFailed"]
Open: TypeAlias = Callable[[Member, Sequence[int]], AsyncGenerator[tuple[int, "ResultT | ItemFailed"], None]]
"""Asks a replica for some of the items; indices that come back are of these."""
Rescue: TypeAlias = Callable[[int, ItemFailed], Awaitable["ResultT | ItemFailed"]]
"""What is made of an item that no replica could serve."""


class _Event(NamedTuple, Generic[ResultT]):
    """An outcome of an attempt, or its end (position None), or, without an attempt, the outcome of a rescue,
    or that the client closes (position None). position: the caller's index; at_s: when it came, which may be
    long before the caller asks for it."""

    attempt: Attempt | None
    position: int | None
    outcome: ResultT | EncoderError | None
    at_s: float


class _Rescue(NamedTuple):
    task: asyncio.Task[None]
    failure: EncoderError


class CallRun(Generic[ResultT]):
    """``outcomes`` is run once."""

    def __init__(
        self,
        call: FleetCall,
        num_items: int,
        directory: Directory,
        open_attempt: Open[ResultT],
        deadline: Deadline,
        timeout_s: float,
        clock: Callable[[], float],
        rescue: Rescue[ResultT] | None = None,
    ) -> None:
        self._call, self._directory, self._open = call, directory, open_attempt
        self._deadline, self._timeout_s, self._clock, self._rescue = deadline, timeout_s, clock, rescue
        self._num_left = num_items
        self._queue: asyncio.Queue[_Event[ResultT]] = asyncio.Queue()
        self._tasks: dict[Attempt, asyncio.Task[None]] = {}
        self._rescues: dict[int, _Rescue] = {}
        self._given_up: list[asyncio.Task[None]] = []
        """Rescues that nobody waits for any more."""
        self._stopped: set[Attempt] = set()
        self._kept_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._full_since_s = 0.0
        self._ready: deque[Finished[ResultT]] = deque()

    async def outcomes(self) -> AsyncGenerator[Finished[ResultT], None]:
        """Each item's index and outcome, each once."""
        self._directory.at_end.add(self._wake)
        try:
            while self._num_left:
                # What came while the caller was at work elsewhere is neither late nor lost.
                self._hear_at_hand()
                if self._directory.is_closed:
                    raise CallCancelled("the call was cancelled: the fleet's client is closed")
                if self._deadline.left_s <= 0:
                    self._give_up()
                else:
                    self._begin_attempts()
                    await self._hear()
                while self._ready:
                    self._num_left -= 1
                    yield self._taken()
            await self._let_end()
        finally:
            await self._stop_all()

    def _begin_attempts(self) -> None:
        self._mind_pace()
        attempts, lost = self._call.take(self._clock())
        for attempt in attempts:
            task = asyncio.ensure_future(self._attempt(attempt))
            self._tasks[attempt] = task
            member = cast("Member", attempt.replica)
            member.attempts.add(task)
            task.add_done_callback(member.attempts.discard)
        for index, failure in lost:
            self._over(index, self._explained(failure))

    def _explained(self, failure: EncoderError) -> EncoderError:
        why = self._directory.why_nobody()
        if failure.reason != NO_ENDPOINTS or not why:
            return failure
        return EncoderUnavailable(
            f"{failure.message}: {why}", reason=NO_ENDPOINTS, details={"status": "UNAVAILABLE"}
        )

    # Rows that have come ------------------------------------------------------------------------------------

    async def _keep(self, attempt: Attempt, index: int, outcome: ResultT | ItemFailed) -> None:
        """Until the caller asks for it; goes on when there is room for more."""
        self._queue.put_nowait(_Event(attempt, index, outcome, self._clock()))
        self._kept_bytes += _num_bytes(outcome)
        if self._kept_bytes > KEPT_BYTES and self._has_room.is_set():
            self._has_room.clear()
            self._full_since_s = self._clock()
        await self._has_room.wait()

    def _taken(self) -> Finished[ResultT]:
        index, outcome = self._ready.popleft()
        self._forget(outcome)
        return index, outcome

    def _forget(self, outcome: object) -> None:
        self._kept_bytes -= _num_bytes(outcome)
        self._mind_pace()
        if self._kept_bytes <= KEPT_BYTES:
            self._has_room.set()

    def _mind_pace(self) -> None:
        """Who does not read can call nobody late."""
        full_s = 0.0 if self._has_room.is_set() else self._clock() - self._full_since_s
        if full_s > self._directory.settings.hedge_min_s:
            self._call.caller_is_slow()

    async def _hear(self) -> None:
        """Until there is something to hear, or to look at again."""
        if self._ready:
            return
        due_s = self._call.next_due_s()
        wait_s = self._deadline.left_s
        if due_s is not None:
            wait_s = min(wait_s, max(0.0, due_s - self._clock()))
        with suppress(TimeoutError):
            # And not wait_for, which before Python 3.12 may forget that its task was cancelled.
            async with asyncio.timeout(wait_s):
                event = await self._queue.get()
            self._heard(event)

    def _hear_at_hand(self) -> None:
        """Events that came."""
        while not self._queue.empty():
            self._heard(self._queue.get_nowait())

    def _heard(self, event: _Event[ResultT]) -> None:
        if self._directory.is_closed:
            return
        self._take_in(*event)
        for attempt in self._call.superseded():
            self._call.left_behind(attempt, event.at_s)
            self._directory.was_late(cast("Member", attempt.replica))
            self._cancel(attempt)

    def _wake(self) -> None:
        self._queue.put_nowait(_Event(None, None, None, self._clock()))

    def _take_in(
        self, attempt: Attempt | None, index: int | None, outcome: ResultT | EncoderError | None, now_s: float
    ) -> None:
        if attempt is None:
            if index is not None and self._rescues.pop(index, None) is not None:
                self._kept_bytes += _num_bytes(outcome)
                self._ready.append((index, cast("ResultT | ItemFailed", outcome)))
        elif attempt in self._stopped:
            self._forget(outcome)
        elif index is None:
            self._end(attempt, cast("EncoderError | None", outcome), now_s)
        elif isinstance(outcome, ItemFailed):
            last = self._call.failed(attempt, index, outcome, now_s)
            if not attempt.replica.is_up:
                self._directory.has_failed(cast("Member", attempt.replica))
            if last is not None:
                self._over(index, last)
        elif self._call.succeeded(attempt, index, now_s):
            self._ready.append((index, cast("ResultT", outcome)))
        else:
            self._forget(outcome)

    def _end(self, attempt: Attempt, failure: EncoderError | None, now_s: float) -> None:
        del self._tasks[attempt]
        over = self._call.ended(attempt, failure, now_s)
        if isinstance(failure, InvalidRequest | MissingDependency):
            raise failure
        for index, last in over:
            self._over(index, last)
        if failure is not None and not attempt.replica.is_up:
            self._directory.has_failed(cast("Member", attempt.replica))

    def _over(self, index: int, failure: EncoderError) -> None:
        """An item's last failure: the caller's, or the rescue's where another replica would have been
        next."""
        if self._rescue is None or not moves_on(failure) or self._deadline.left_s <= 0:
            self._fail(index, failure)
            return
        item_failure = self._as_item(index, failure)
        rescue = self._rescue

        async def run() -> None:
            outcome: ResultT | ItemFailed = item_failure  # of a rescue that cancels itself
            try:
                outcome = await rescue(index, item_failure)
            finally:
                self._queue.put_nowait(_Event(None, index, outcome, self._clock()))

        self._rescues[index] = _Rescue(asyncio.ensure_future(run()), failure)

    def _give_up(self) -> None:
        """The time is up, for items that wait for a replica and for those that wait for their rescue."""
        over = self._call.give_up(lambda last: deadline_passed(self._timeout_s, last), self._clock())
        for index, (task, failure) in self._rescues.items():
            task.cancel()
            self._given_up.append(task)
            over.append((index, deadline_passed(self._timeout_s, failure)))
        self._rescues.clear()
        for index, last in over:
            self._fail(index, last)

    def _as_item(self, index: int, failure: EncoderError) -> ItemFailed:
        return as_item_failure(failure, self._call.num_attempts(index), self._call.notes.get(index, ""))

    def _fail(self, index: int, failure: EncoderError) -> None:
        self._ready.append((index, self._as_item(index, failure)))

    # Attempts -----------------------------------------------------------------------------------------------

    async def _attempt(self, attempt: Attempt) -> None:
        member = cast("Member", attempt.replica)
        failure: EncoderError | None = None
        try:
            async with aclosing(self._open(member, attempt.indices)) as stream:
                async for position, outcome in stream:
                    await self._keep(attempt, attempt.indices[position], outcome)
        except CallCancelled as error:
            failure = gone(member, f"its client was closed: {error.message}")
        except EncoderError as error:
            failure = error
        except asyncio.CancelledError:
            if attempt in self._stopped:
                raise
            failure = gone(member, member.why)
        except Exception as error:
            # What no client raises for a failure: the caller's arguments, or a defect.
            failure = InvalidRequest(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
        self._queue.put_nowait(_Event(attempt, None, failure, self._clock()))

    def _cancel(self, attempt: Attempt) -> None:
        self._stopped.add(attempt)
        self._tasks[attempt].cancel()

    async def _let_end(self) -> None:
        """Streams that gave all they were asked for end by themselves, and are not cut."""
        self._has_room.set()
        tasks = [task for attempt, task in self._tasks.items() if attempt not in self._stopped]
        if tasks:
            await asyncio.wait(tasks, timeout=min(END_S, max(0.01, self._deadline.left_s)))

    async def _stop_all(self) -> None:
        """No copy into a caller's buffer goes on after the caller has it back, however often it is
        cancelled."""
        self._directory.at_end.discard(self._wake)
        self._call.abandon()
        for attempt in self._tasks.keys() - self._stopped:
            self._cancel(attempt)
        tasks = [*self._tasks.values(), *self._given_up, *(one.task for one in self._rescues.values())]
        for one in self._rescues.values():
            one.task.cancel()
        await until_done(tasks)


def _num_bytes(outcome: object) -> int:
    return outcome.num_bytes if isinstance(outcome, EncodedRows) else 0


def may_hedge(handling: RowsHandling) -> bool:
    """Not with a buffer of the caller's, which two answers would write to, nor with rows that stay leased,
    nor where the caller is told of rows as they come."""
    return handling.is_plain_copy and not len(handling.out) and handling.on_rows is None
