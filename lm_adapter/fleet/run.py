"""One call over a fleet, run: attempts as tasks, their events in one queue, the caller's outcomes out of it.

Owns the tasks of a call and that none outlives it. What is tried, and what an event means, is ``call``'s.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

from lm_adapter.errors import (
    CallCancelled,
    EncoderError,
    EncoderUnavailable,
    InvalidRequest,
    ItemFailed,
    MissingDependency,
)
from lm_adapter.fleet.call import Attempt, FleetCall
from lm_adapter.fleet.directory import Directory, Member
from lm_adapter.fleet.outcomes import as_item_failure, deadline_passed, moves_on
from lm_adapter.session import Deadline

__all__ = ["CallRun", "Open", "Rescue"]

END_S = 1.0
"""For streams whose items have all come, to say that they are over."""

ResultT = TypeVar("ResultT")
Finished: TypeAlias = tuple[int, "ResultT | ItemFailed"]
Open: TypeAlias = Callable[[Member, Sequence[int]], AsyncGenerator[tuple[int, "ResultT | ItemFailed"], None]]
"""Asks a replica for some of the items; indices that come back are of these."""
Rescue: TypeAlias = Callable[[int, ItemFailed], Awaitable["ResultT | ItemFailed"]]
"""What is made of an item that no replica could serve."""


class _Event(NamedTuple, Generic[ResultT]):
    """An outcome of an attempt, or its end (position None), or, without an attempt, the outcome of a rescue.
    position: the caller's index."""

    attempt: Attempt | None
    position: int | None
    outcome: ResultT | EncoderError | None


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
        self._rescues: set[asyncio.Task[None]] = set()
        self._stopped: set[Attempt] = set()
        self._ready: deque[Finished[ResultT]] = deque()

    async def outcomes(self) -> AsyncGenerator[Finished[ResultT], None]:
        """Each item's index and outcome, each once."""
        try:
            while self._num_left:
                if self._directory.is_closed:
                    raise CallCancelled("the call was cancelled: the fleet's client is closed")
                if self._deadline.left_s <= 0:
                    for index, failure in self._call.give_up(
                        lambda last: deadline_passed(self._timeout_s, last)
                    ):
                        self._fail(index, failure)
                else:
                    self._begin_attempts()
                    await self._hear()
                while self._ready:
                    self._num_left -= 1
                    yield self._ready.popleft()
            await self._let_end()
        finally:
            await self._stop_all()

    def _begin_attempts(self) -> None:
        attempts, lost = self._call.take(self._clock())
        for attempt in attempts:
            task = asyncio.ensure_future(self._attempt(attempt))
            self._tasks[attempt] = task
            member = cast("Member", attempt.replica)
            member.attempts.add(task)
            task.add_done_callback(member.attempts.discard)
        for index, failure in lost:
            self._over(index, failure)

    async def _hear(self) -> None:
        """The next events, or the time to look again."""
        if self._ready:
            return
        due_s = self._call.next_due_s()
        wait_s = self._deadline.left_s
        if due_s is not None:
            wait_s = min(wait_s, max(0.0, due_s - self._clock()))
        try:
            self._take_in(await asyncio.wait_for(self._queue.get(), wait_s))
        except TimeoutError:
            return
        while not self._queue.empty():
            self._take_in(self._queue.get_nowait())
        for attempt in self._call.superseded():
            self._call.left_behind(attempt, self._clock())
            self._directory.was_late(cast("Member", attempt.replica))
            self._cancel(attempt)

    def _take_in(self, event: _Event[ResultT]) -> None:
        attempt, index, outcome = event
        now_s = self._clock()
        if attempt is None:
            assert index is not None
            self._ready.append((index, cast("ResultT | ItemFailed", outcome)))
        elif attempt in self._stopped:
            return
        elif index is None:
            self._end(attempt, cast("EncoderError | None", outcome), now_s)
        elif isinstance(outcome, ItemFailed):
            last = self._call.failed(attempt, index, outcome, now_s)
            if not attempt.replica.is_up:
                self._directory.has_failed(cast("Member", attempt.replica))
            if last is not None:
                self._over(index, last)
        else:
            if self._call.succeeded(attempt, index, now_s):
                self._ready.append((index, cast("ResultT", outcome)))

    def _end(self, attempt: Attempt, failure: EncoderError | None, now_s: float) -> None:
        del self._tasks[attempt]
        if isinstance(failure, InvalidRequest | MissingDependency):
            raise failure
        for index, last in self._call.ended(attempt, failure, now_s):
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
            outcome = await rescue(index, item_failure)
            self._queue.put_nowait(_Event(None, index, outcome))

        task = asyncio.ensure_future(run())
        self._rescues.add(task)
        task.add_done_callback(self._rescues.discard)

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
                    self._queue.put_nowait(_Event(attempt, attempt.indices[position], outcome))
        except CallCancelled as error:
            failure = _gone(member, f"its client was closed: {error.message}")
        except EncoderError as error:
            failure = error
        except asyncio.CancelledError:
            if attempt in self._stopped:
                raise
            failure = _gone(member, member.why)
        except Exception as error:
            # What no client raises for a failure: the caller's arguments, or a defect.
            failure = InvalidRequest(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
        self._queue.put_nowait(_Event(attempt, None, failure))

    def _cancel(self, attempt: Attempt) -> None:
        self._stopped.add(attempt)
        self._tasks[attempt].cancel()

    async def _let_end(self) -> None:
        """Streams that gave all they were asked for end by themselves, and are not cut."""
        tasks = [task for attempt, task in self._tasks.items() if attempt not in self._stopped]
        if tasks:
            await asyncio.wait(tasks, timeout=min(END_S, max(0.01, self._deadline.left_s)))

    async def _stop_all(self) -> None:
        """No copy into a caller's buffer goes on after the caller has it back."""
        for attempt in list(self._call.running):
            self._call.ended(attempt, None, self._clock())
            self._cancel(attempt)
        tasks = [*self._tasks.values(), *self._rescues]
        for task in self._rescues:
            task.cancel()
        while pending := [task for task in tasks if not task.done()]:
            await asyncio.wait(pending)


def _gone(member: Member, why: str) -> EncoderUnavailable:
    return EncoderUnavailable(
        f"{member.target} no longer answers: {why}",
        details={"status": "UNAVAILABLE", "target": member.target},
    )
