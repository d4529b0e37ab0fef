"""Single-flight: one encode per key at a time, joined by every caller that asks meanwhile.

Owns the table of encodes under way, who waits for each, and when one ends because nobody does. Leaves what
an encode is made of to the pipeline. Runs on one event loop.

A flight is cancelled when its last caller has left, unless a prefetch holds it. Its failure is told to
everyone on board and is not remembered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from encoder_service.errors import DeadlineExceeded, Draining
from encoder_service.scheduler.planner import Ticket
from encoder_service.store.embedding_store import Held
from encoder_service.store.rows_prefix import RowsPrefix
from encoder_service.types import CacheTier, Grid, StageTimings


@dataclass(eq=False)
class Flight:
    """One encode in progress. announced: its grid, once known and admitted. held: a prefetch wants its rows,
    whoever else leaves. tier: where its rows come from. task: ends with the rows, held until everyone on
    board have a hold of their own. queued_s: when its pixels were handed to the engine. num_rows: of a clip,
    told with announced. wants_rows_ahead: a caller reads rows as they come; rows_ahead: those of a clip,
    where they come to the host; begin_rows_ahead: has them come there from now on, where they did not."""

    key: bytes
    content_digest: bytes
    namespace: str
    ticket: Ticket
    announced: asyncio.Future[Grid]
    timings: StageTimings = field(default_factory=StageTimings)
    task: asyncio.Task[Held] | None = None
    num_waiting: int = 0
    held: bool = False
    tier: CacheTier = CacheTier.MISS
    queued_s: float = 0.0
    num_rows: int | None = None
    wants_rows_ahead: bool = False
    rows_ahead: RowsPrefix | None = None
    begin_rows_ahead: Callable[[], None] | None = None
    _sleepers: list[asyncio.Future[None]] = field(default_factory=list)

    def wake(self) -> None:
        """Has those on board look whether the task has ended: they run in the loop's next turn, behind what
        was woken before. Else they would look a turn or two after its end."""
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    async def ended(self, timeout_s: float | None) -> bool:
        """Whether the task ends within that time; it goes on where it does not, or this is cancelled."""
        task, loop = self.task, asyncio.get_running_loop()
        assert task is not None
        is_late = False

        def end_late() -> None:
            nonlocal is_late
            is_late = True
            self.wake()

        timer = None if timeout_s is None or task.done() else loop.call_later(timeout_s, end_late)
        try:
            while not (task.done() or is_late):
                sleeper: asyncio.Future[None] = loop.create_future()
                self._sleepers.append(sleeper)
                await sleeper
        finally:
            if timer is not None:
                timer.cancel()
        return task.done()


@dataclass
class FlightCounters:
    started: int = 0
    joined: int = 0
    abandoned: int = 0


class Flights:
    """Flights by (namespace, key). clock: monotonic seconds, the one deadlines are in. observe: told the
    times of each flight that ended with rows, when those on board have theirs."""

    def __init__(
        self, clock: Callable[[], float], observe: Callable[[StageTimings], None] = lambda _: None
    ) -> None:
        self._clock = clock
        self._observe = observe
        self._flights: dict[tuple[str, bytes], Flight] = {}
        self.counters = FlightCounters()

    def __len__(self) -> int:
        return len(self._flights)

    def get(self, namespace: str, key: bytes) -> Flight | None:
        """The flight under way for a key, without joining it."""
        return self._flights.get((namespace, key))

    def join(self, namespace: str, key: bytes, is_prefetch: bool, deadline_s: float | None) -> Flight | None:
        """The flight under way, which from now on hurries for this caller and lasts until its deadline."""
        flight = self._flights.get((namespace, key))
        if flight is not None:
            self.counters.joined += 1
            flight.ticket.is_prefetch = flight.ticket.is_prefetch and is_prefetch
            flight.ticket.deadline_s = later(flight.ticket.deadline_s, deadline_s)
        return flight

    def start(
        self,
        namespace: str,
        key: bytes,
        content_digest: bytes,
        is_prefetch: bool,
        deadline_s: float | None,
        fly: Callable[[Flight], Coroutine[Any, Any, Held]],
    ) -> Flight:
        """A new flight that runs ``fly``. The caller has just seen that there is none (no await since)."""
        assert (namespace, key) not in self._flights
        loop = asyncio.get_running_loop()
        ticket = Ticket(0, deadline_s, is_prefetch)
        flight = Flight(key, content_digest, namespace, ticket, loop.create_future())

        flight.task = loop.create_task(fly(flight))
        flight.task.add_done_callback(lambda task: self._land(flight, task))
        self._flights[namespace, key] = flight
        self.counters.started += 1
        return flight

    async def wait(self, flight: Flight, deadline_s: float | None) -> Held:
        """The flight's rows, held for this caller. A caller that leaves (cancellation, deadline) leaves the
        flight to the others, and ends it when it was the last and nobody holds it. Call in the same step as
        ``join`` or ``start``.

        Raises the flight's failure; DeadlineExceeded; Draining when the service stops first.
        """
        assert flight.task is not None
        flight.num_waiting += 1
        try:
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - self._clock())
            if not await flight.ended(timeout_s):
                raise DeadlineExceeded("the deadline passed before the item was encoded")
            if flight.task.cancelled():
                raise Draining("the service stopped before the item was encoded")
            return flight.task.result().share()
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0 and flight.task.done():
                self._remove(flight)  # nobody boards a flight whose rows were given up
                _give_up(flight.task)
            elif flight.num_waiting == 0 and not flight.held:
                flight.ticket.cancelled = True
                flight.task.cancel()
                # A caller that arrives before the task has ended must not board a flight that is over.
                self._remove(flight)

    async def drain(self, grace_s: float) -> bool:
        """Waits for every flight; cuts off and returns False for those that outlive the grace."""
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        if not tasks:
            return True
        _, pending = await asyncio.wait(tasks, timeout=grace_s)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        return not pending

    def _land(self, flight: Flight, task: asyncio.Task[Held]) -> None:
        """A flight's last act: it leaves the table, and whoever waits for its grid learns why it failed."""
        self._remove(flight)
        flight.wake()
        error: BaseException | None
        if task.cancelled():
            self.counters.abandoned += 1
            error = Draining("the service stopped before the item was encoded")
        else:
            error = task.exception()  # read, so that a failure nobody waits for is not reported as lost
        if error is None:
            self._observe(flight.timings)
        if flight.num_waiting == 0:
            _give_up(task)
        if flight.announced.done():
            return
        if error is None:
            flight.announced.cancel()
        else:
            flight.announced.set_exception(error)
            flight.announced.exception()

    def _remove(self, flight: Flight) -> None:
        if self._flights.get((flight.namespace, flight.key)) is flight:
            del self._flights[flight.namespace, flight.key]


def _give_up(task: asyncio.Task[Held]) -> None:
    """The hold of a flight that has ended and carries nobody any more, if it has one."""
    if not task.cancelled() and task.exception() is None:
        task.result().drop()


def later(first_s: float | None, second_s: float | None) -> float | None:
    """The later of two deadlines, where None never comes."""
    return None if first_s is None or second_s is None else max(first_s, second_s)
