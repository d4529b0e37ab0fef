"""Single-flight: at most one encode per key at a time, which every caller for the key joins.

Owns the table of encodes in progress, the number of callers that wait for each, and the end of an encode when
its last caller leaves. ``pipeline`` owns the work of an encode. Used from one event loop.

An encode that a prefetch started or joined goes on without callers. A failure is raised in every caller and
not remembered.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from typing import Any

from encoder_service.errors import DeadlineExceeded, Draining, forget_traceback
from encoder_service.scheduler.planner import Ticket
from encoder_service.store.embedding_store import PinnedRows
from encoder_service.types import EncodedItem, Grid, StageTimings


class InFlightEncode:
    """One encode in progress.

    is_prefetch: all callers are prefetches. expected: the item once it is admitted, with a meta tensor as its
    rows. timings: filled in as the stages end. task: ends with the rows, and holds them until every caller
    has a hold of its own.
    """

    def __init__(
        self,
        namespace: str,
        key: bytes,
        content_digest: bytes,
        deadline_s: float | None,
        run: Callable[[InFlightEncode], Coroutine[Any, Any, PinnedRows]],
        *,
        is_prefetch: bool,
    ) -> None:
        """Starts ``run``. deadline_s: the first caller's, None for no deadline."""
        self.namespace = namespace
        self.key = key
        self.content_digest = content_digest
        self.num_callers = 0
        self.timings = StageTimings()
        self._deadline_s = deadline_s
        self.is_prefetch = self._is_kept = is_prefetch
        self._tickets: list[Ticket] = []
        loop = asyncio.get_running_loop()
        self.expected: asyncio.Future[EncodedItem] = loop.create_future()
        self.task: asyncio.Task[PinnedRows] = loop.create_task(_without_traceback(run(self)))

    def ticket(self, grid: Grid, *, merges_time: bool) -> Ticket:
        """A ticket for the engine's queue. It follows callers that join or leave later. merges_time: the
        tower attends over all frames together and averages over them."""
        ticket = Ticket(
            grid.num_patches,
            self._deadline_s,
            self.is_prefetch,
            num_sequences=1 if merges_time else grid.t,
            num_frames=grid.t if merges_time else 1,
        )
        self._tickets.append(ticket)
        return ticket

    def join(self, deadline_s: float | None, *, is_prefetch: bool = False) -> None:
        """Adds a caller. The encode then has the later deadline, and is queued as an Encode unless all
        callers are prefetches."""
        self._deadline_s = later(self._deadline_s, deadline_s)
        self.is_prefetch &= is_prefetch
        self._is_kept |= is_prefetch
        for ticket in self._tickets:
            ticket.deadline_s = self._deadline_s
            ticket.is_prefetch = self.is_prefetch

    @property
    def is_late(self) -> bool:
        """Whether the engine dropped the encode, or a piece of it, because its deadline had passed."""
        return any(ticket.is_dropped for ticket in self._tickets)

    @property
    def is_unwanted(self) -> bool:
        """Whether no caller waits and no prefetch keeps the encode."""
        return not self.num_callers and not self._is_kept

    def cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancelled = True
        self.task.cancel()


async def _without_traceback(run: Coroutine[Any, Any, PinnedRows]) -> PinnedRows:
    """The coroutine's result. Its failure does not keep the item's content."""
    try:
        return await run
    except BaseException as error:
        del run
        forget_traceback(error)
        raise


class InFlightEncodes:
    """Encodes in progress by namespace and key. clock: monotonic seconds, the clock of the deadlines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._encodes: dict[tuple[str, bytes], InFlightEncode] = {}
        self.num_joined = 0

    def __len__(self) -> int:
        return len(self._encodes)

    def get(self, namespace: str, key: bytes) -> InFlightEncode | None:
        """The encode in progress for a key, without joining it."""
        return self._encodes.get((namespace, key))

    def join(
        self, namespace: str, key: bytes, deadline_s: float | None, *, is_prefetch: bool = False
    ) -> InFlightEncode | None:
        """Joins the encode in progress for a key and returns it. None if there is none, or if the engine has
        dropped it for its deadline: then a new one may start, although the old one has not ended yet."""
        encode = self._encodes.get((namespace, key))
        if encode is None:
            return None
        encode.join(deadline_s, is_prefetch=is_prefetch)
        if encode.is_late:
            self._remove(encode)
            return None
        self.num_joined += 1
        return encode

    def start(
        self,
        namespace: str,
        key: bytes,
        content_digest: bytes,
        deadline_s: float | None,
        run: Callable[[InFlightEncode], Coroutine[Any, Any, PinnedRows]],
        *,
        is_prefetch: bool = False,
    ) -> InFlightEncode:
        """A new encode. Must be called in the same step of the loop as a ``join`` that has returned None."""
        assert (namespace, key) not in self._encodes
        encode = InFlightEncode(namespace, key, content_digest, deadline_s, run, is_prefetch=is_prefetch)
        encode.task.add_done_callback(lambda _: self._end(encode))
        self._encodes[namespace, key] = encode
        return encode

    async def wait(self, encode: InFlightEncode, deadline_s: float | None) -> PinnedRows:
        """The encode's rows, held for this caller. Must be called in the same step of the loop as ``join`` or
        ``start``. A caller leaves when it is cancelled or its deadline passes. The last one cancels the
        encode, unless a prefetch keeps it.

        Raises the encode's failure; DeadlineExceeded; Draining if the service stops first.
        """
        encode.num_callers += 1
        try:
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - self._clock())
            await asyncio.wait((encode.task,), timeout=timeout_s)
            if not encode.task.done():
                raise DeadlineExceeded("the deadline passed before the item was encoded")
            if encode.task.cancelled():
                raise Draining("the service stopped before the item was encoded")
            if encode.task.exception() is not None:
                # A copy: the task keeps the error, which would keep the frames of every caller.
                raise copy.copy(encode.task.exception())  # type: ignore[misc]
            return encode.task.result().share()
        finally:
            encode.num_callers -= 1
            if encode.task.done():
                _drop_unclaimed(encode)
            elif encode.is_unwanted:
                self._remove(encode)  # a caller that arrives before the task has ended must not join it
                encode.cancel()

    async def drain(self, grace_s: float) -> bool:
        """Waits up to ``grace_s`` for all encodes. If some are still running, cancels them and returns
        False."""
        tasks = [encode.task for encode in self._encodes.values()]
        if not tasks:
            return True
        _, pending = await asyncio.wait(tasks, timeout=grace_s)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        return not pending

    def _end(self, encode: InFlightEncode) -> None:
        self._remove(encode)
        error: BaseException | None = None
        if encode.task.cancelled():
            error = Draining("the service stopped before the item was encoded")
        else:
            error = encode.task.exception()  # also marks it as retrieved, if there is no caller
        _drop_unclaimed(encode)
        if not encode.expected.done():
            encode.expected.set_exception(error or Draining("the item was not announced"))
            encode.expected.exception()

    def _remove(self, encode: InFlightEncode) -> None:
        name = encode.namespace, encode.key
        if self._encodes.get(name) is encode:
            del self._encodes[name]


def _drop_unclaimed(encode: InFlightEncode) -> None:
    """Drops the hold of an encode that has ended, if no caller waits for it."""
    task = encode.task
    if not encode.num_callers and not task.cancelled() and task.exception() is None:
        task.result().drop()


def later(first_s: float | None, second_s: float | None) -> float | None:
    """The later of two deadlines; None is no deadline."""
    return None if first_s is None or second_s is None else max(first_s, second_s)
