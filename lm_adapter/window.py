"""How many items a client has at the service at a time, and when it sends refused items again.

Owns the permits of items, their order, and what the refusals of an overloaded service do to their number.
``calls`` and ``client`` send the items."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol, TypeGuard

from lm_adapter.errors import DeadlineExceeded, EncoderOverloaded, InvalidRequest, ItemFailed

DEFAULT_MAX_IN_FLIGHT = 256
PAUSE_S = 0.2
"""The pause after a refusal that states none."""
JITTER = 0.25
"""Largest share by which a pause is longer than the server's: it spreads the clients of one server."""
GROWTH = 1 / 8
"""How much one item that was not refused adds to a lowered limit, at least: the share of items that try
whether the service has more room."""
_RESOURCE_EXHAUSTED = 8


class TimeLimit(Protocol):
    @property
    def left_s(self) -> float: ...


def is_overload(outcome: object) -> TypeGuard[ItemFailed]:
    """Whether the service had no room for an item. The same item may be taken later."""
    return isinstance(outcome, ItemFailed) and outcome.status == _RESOURCE_EXHAUSTED and outcome.retryable


def pause_s(refusal: ItemFailed | EncoderOverloaded) -> float:
    """Seconds until what was refused is sent again."""
    factor = random.uniform(1, 1 + JITTER)  # noqa: S311 - only spreads repeats
    return factor * (refusal.retry_after_ms / 1e3 or PAUSE_S)


class Ticket(NamedTuple):
    """The order of a group of items, for all its permits. num_refusals: the window's, when the group came."""

    number: int
    num_refusals: int


class Window:
    """Permits for at most ``max_items`` items, in the order of their tickets. For one event loop.

    A refusal lowers the limit to the number of items that the service has taken, so that each one that ends
    makes room for one that waits. Items that are not refused raise it again. After a refusal nothing is sent
    for the time that the service states, or until half of the items that it has taken have ended."""

    def __init__(
        self, max_items: int, *, waits: bool, call_later: Callable[..., asyncio.TimerHandle] | None = None
    ) -> None:
        """waits: whether refused items wait; otherwise their calls end with EncoderOverloaded. call_later: of
        the running loop by default. Raises InvalidRequest."""
        if max_items < 1:
            raise InvalidRequest(f"max_in_flight is {max_items}, needs to be at least 1")
        self.waits = waits
        self.num_in_flight = 0
        self._max_items = max_items
        self._limit = float(max_items)
        self._call_later = call_later or asyncio.get_running_loop().call_later
        self._tickets = itertools.count()
        self._waiting: list[tuple[Ticket, int, asyncio.Future[int]]] = []
        """A heap of tickets, numbers of items, and futures of the number that is granted."""
        self._is_closed = False
        self._num_refusals = 0
        self._refusal: ItemFailed | EncoderOverloaded | None = None
        """The latest one."""
        self._pause: asyncio.TimerHandle | None = None
        self._num_resume = 0
        """The pause ends at this number of items in flight."""

    def ticket(self) -> Ticket:
        return Ticket(next(self._tickets), self._num_refusals)

    @asynccontextmanager
    async def permits(self, ticket: Ticket, num_items: int, deadline: TimeLimit) -> AsyncIterator[Permits]:
        """Waits for permits: for num_items, or for as many as there are. The block sends that many items. A
        block that ends with EncoderOverloaded was refused as a whole.

        Raises EncoderOverloaded if the service refused items and none may wait. When the deadline passes,
        raises EncoderOverloaded if the service refuses items or has done so since the ticket, else
        DeadlineExceeded."""
        permits = Permits(self, await self._grant(ticket, num_items, deadline))
        try:
            yield permits
        except DeadlineExceeded as error:
            overload = self._overload_since(ticket)
            if overload is None:
                raise
            raise overload from error
        except EncoderOverloaded as error:
            if not (self.waits and error.retryable and deadline.left_s):
                raise
            permits.refuse(error, permits.num_left)
        finally:
            self._release(permits.num_left)
        if permits.refusal is not None and not self.waits:
            raise _overloaded(permits.refusal, "the encoder is overloaded")

    def close(self) -> None:
        """Grants all permits. The caller refuses to use them."""
        self._is_closed = True
        self._resume()

    async def _grant(self, ticket: Ticket, num_items: int, deadline: TimeLimit) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (ticket, num_items, future))
        self._advance()
        if future.done():
            return future.result()
        try:
            async with asyncio.timeout(deadline.left_s):
                return await future
        except BaseException as error:
            future.cancel()
            if not future.cancelled():  # granted while its caller was being cancelled
                self._release(future.result())
            if isinstance(error, TimeoutError):
                raise self._overload_since(ticket) or DeadlineExceeded(
                    f"the deadline passed before the item was sent: {self.num_in_flight} items of this "
                    f"client are in flight, max_in_flight is {self._max_items}"
                ) from None
            raise

    def _overload_since(self, ticket: Ticket) -> EncoderOverloaded | None:
        is_new = self._pause is not None or self._num_refusals > ticket.num_refusals
        if self._refusal is None or not is_new:
            return None
        return _overloaded(self._refusal, "the encoder was overloaded until the deadline")

    def _advance(self) -> None:
        """Grants permits while there are any."""
        while self._waiting and self._pause is None:
            _, num_items, future = self._waiting[0]
            room = num_items if self._is_closed else int(self._limit) - self.num_in_flight
            if room <= 0 and not future.done():
                return
            heapq.heappop(self._waiting)
            if not future.done():
                granted = min(num_items, room)
                self.num_in_flight += granted
                future.set_result(granted)

    def _release(self, num_items: int) -> None:
        self.num_in_flight -= num_items
        if self._pause is not None and self.num_in_flight <= self._num_resume:
            self._resume()
        self._advance()

    def _resume(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._advance()

    def note_taken(self) -> None:
        """An item was not refused, and has ended."""
        self._limit = min(self._max_items, self._limit + max(GROWTH, 1 / self._limit))
        self._release(1)

    def note_refused(self, refusal: ItemFailed | EncoderOverloaded, num_items: int) -> None:
        """The service had no room for items."""
        self.num_in_flight -= num_items
        if self.waits and not self._is_closed:
            self._refusal = refusal
            self._num_refusals += num_items
            self._limit = max(1.0, min(self._limit, self.num_in_flight))
            self._num_resume = self.num_in_flight // 2 if self.num_in_flight else -1
            if self._pause is not None:
                self._pause.cancel()
            self._pause = self._call_later(pause_s(refusal), self._resume)
        self._advance()


class Permits:
    """The permits of one message's items. num_left: of items without an outcome."""

    def __init__(self, window: Window, num_items: int) -> None:
        self.num_left = num_items
        self.refusal: ItemFailed | EncoderOverloaded | None = None
        self._window = window

    def end(self) -> None:
        """One item has its outcome."""
        self.num_left -= 1
        self._window.note_taken()

    def refuse(self, refusal: ItemFailed | EncoderOverloaded, num_items: int = 1) -> None:
        """Items were refused. They need new permits."""
        self.num_left -= num_items
        self.refusal = refusal
        self._window.note_refused(refusal, num_items)


def _overloaded(refusal: ItemFailed | EncoderOverloaded, text: str) -> EncoderOverloaded:
    return EncoderOverloaded(
        f"{text}: {refusal.message}",
        reason=refusal.reason,
        retry_after_ms=refusal.retry_after_ms,
        details=refusal.details,
    )
