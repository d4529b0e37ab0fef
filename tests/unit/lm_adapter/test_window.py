"""Permits of items: their number, their order, and what refusals do to them. No clock runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from lm_adapter.errors import CallFailed, DeadlineExceeded, EncoderOverloaded, InvalidRequest, ItemFailed
from lm_adapter.window import JITTER, PAUSE_S, Ticket, Window, is_overload, pause_s

pytestmark = pytest.mark.anyio

FULL = ItemFailed(
    "queue holds 8 of 8", reason="QUEUE_FULL", status=8, retryable=True, retry_after_ms=100, details={"n": 8}
)


class Never:
    left_s = 1e6


class Timers:
    """In place of the loop's: a pause ends when the test says so."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []
        self._pending: list[tuple[asyncio.TimerHandle, Callable[[], object]]] = []

    def call_later(self, delay_s: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        self.pauses_s.append(delay_s)
        handle = asyncio.get_running_loop().call_later(3600, call)
        self._pending.append((handle, call))
        return handle

    def end_pause(self) -> None:
        pending, self._pending = self._pending, []
        for handle, call in pending:
            if not handle.cancelled():
                handle.cancel()
                call()


class Rig:
    """Calls of items that a service takes, ends or refuses as the test says."""

    def __init__(self, max_items: int, *, waits: bool = True) -> None:
        self.timers = Timers()
        self.window = Window(max_items, waits=waits, call_later=self.timers.call_later)
        self.sent: list[int] = []
        """The items that were sent, in order, each as often as it was."""
        self._answers: dict[int, asyncio.Future[bool]] = {}

    def call(self, item: int) -> asyncio.Task[None]:
        return asyncio.ensure_future(self._call(item, self.window.ticket()))

    async def _call(self, item: int, ticket: Ticket) -> None:
        while True:
            async with self.window.permits(ticket, 1, Never()) as permits:
                self.sent.append(item)
                self._answers[item] = asyncio.get_running_loop().create_future()
                if await self._answers[item]:
                    permits.end()
                    return
                permits.refuse(FULL)

    async def answer(self, *items: int, is_taken: bool) -> None:
        for item in items:
            self._answers.pop(item).set_result(is_taken)
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_items_are_sent_in_the_order_of_their_calls_as_others_end() -> None:
    rig = Rig(2)
    calls = [rig.call(item) for item in range(5)]
    await settle()
    assert rig.sent == [0, 1]
    await rig.answer(1, is_taken=True)
    await rig.answer(2, is_taken=True)
    assert rig.sent == [0, 1, 2, 3]
    calls[3].cancel()
    await settle()
    assert rig.sent == [0, 1, 2, 3, 4]
    assert rig.window.num_in_flight == 2
    await rig.answer(0, 4, is_taken=True)
    assert rig.window.num_in_flight == 0


async def test_after_refusals_as_many_are_in_flight_as_the_service_took() -> None:
    """And a refused item goes before those that were never sent."""
    rig = Rig(8)
    calls = [rig.call(item) for item in range(12)]
    await settle()
    await rig.answer(4, 5, 6, 7, is_taken=False)
    assert rig.sent == [0, 1, 2, 3, 4, 5, 6, 7]
    await rig.answer(0, is_taken=True)
    assert len(rig.sent) == 8  # the pause
    await rig.answer(1, is_taken=True)
    assert rig.sent[8:] == [4, 5]  # half of the four that were taken have ended
    rig.timers.end_pause()
    await settle()
    assert rig.window.num_in_flight == 4
    for item in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11):
        await rig.answer(item, is_taken=True)
    await asyncio.gather(*calls)
    assert rig.sent[8:] == [4, 5, 6, 7, 8, 9, 10, 11]


async def test_the_limit_grows_again_while_nothing_is_refused() -> None:
    rig = Rig(4)
    for item in range(100):
        rig.call(item)
    await settle()
    await rig.answer(1, 2, 3, is_taken=False)
    assert rig.window.num_in_flight == 1
    in_flight = []
    for item in range(60):
        await rig.answer(item, is_taken=True)
        in_flight.append(rig.window.num_in_flight)
    assert in_flight == sorted(in_flight)
    assert (in_flight[0], in_flight[-1]) == (2, 4)


async def test_a_service_without_room_is_asked_by_one_item_after_each_pause() -> None:
    rig = Rig(4)
    for item in range(4):
        rig.call(item)
    await settle()
    await rig.answer(0, 1, 2, 3, is_taken=False)
    for _ in range(12):
        rig.timers.end_pause()
        await settle()
        await rig.answer(0, is_taken=False)
    assert rig.sent == [0, 1, 2, 3] + [0] * 12
    pauses_s = rig.timers.pauses_s
    stated_s = FULL.retry_after_ms / 1e3
    assert all(stated_s <= each_s <= stated_s * (1 + JITTER) for each_s in pauses_s)
    assert len(set(pauses_s)) == len(pauses_s)  # the jitter
    rig.timers.end_pause()
    await settle()
    await rig.answer(0, is_taken=True)
    assert rig.sent[-2:] == [1, 2]


async def test_a_call_gets_the_permits_that_there_are() -> None:
    window = Window(4, waits=True)
    first, second = window.ticket(), window.ticket()
    async with window.permits(first, 3, Never()), window.permits(second, 9, Never()) as permits:
        assert permits.num_left == 1
        assert window.num_in_flight == 4
    assert window.num_in_flight == 0


@pytest.mark.parametrize(
    ("refuses", "kind", "text"),
    [
        (True, EncoderOverloaded, "overloaded until the deadline: queue holds 8 of 8"),
        (False, DeadlineExceeded, "1 items of this client are in flight, max_in_flight is 1"),
    ],
)
async def test_the_deadline_ends_the_wait_and_states_its_cause(
    refuses: bool, kind: type[CallFailed], text: str
) -> None:
    class Soon:
        left_s = 0.01

    window = Window(1, waits=True, call_later=Timers().call_later)
    async with window.permits(window.ticket(), 1, Never()) as permits:
        if refuses:
            permits.refuse(FULL)
        with pytest.raises(kind, match=text) as caught:
            async with window.permits(window.ticket(), 1, Soon()):
                raise AssertionError
    if refuses:
        assert caught.value.reason == "QUEUE_FULL"
        assert (caught.value.retry_after_ms, caught.value.details) == (100, {"n": "8"})


async def test_a_refusal_of_an_earlier_call_is_no_cause_of_a_later_deadline() -> None:
    window = Window(4, waits=True, call_later=Timers().call_later)
    first = window.ticket()
    async with window.permits(first, 2, Never()) as permits:
        permits.refuse(FULL)
    for ticket, kind in ((window.ticket(), DeadlineExceeded), (first, EncoderOverloaded)):
        with pytest.raises(kind):
            async with window.permits(ticket, 1, Never()):
                raise DeadlineExceeded("the encoder stands still")


async def test_without_waiting_a_refusal_ends_its_call_alone() -> None:
    rig = Rig(2, waits=False)
    calls = [rig.call(item) for item in range(4)]
    await settle()
    await rig.answer(0, is_taken=False)
    with pytest.raises(EncoderOverloaded, match="queue holds 8 of 8"):
        await calls[0]
    assert rig.sent == [0, 1, 2]
    assert not rig.timers.pauses_s


async def test_closing_lets_every_call_go_on() -> None:
    rig = Rig(1)
    for item in range(3):
        rig.call(item)
    await settle()
    await rig.answer(0, is_taken=False)
    rig.window.close()
    await settle()
    assert sorted(rig.sent) == [0, 0, 1, 2]


def test_an_overload_is_retryable_and_no_other_failure_is_one() -> None:
    assert is_overload(FULL)
    assert not is_overload(ItemFailed("too large", reason="MESSAGE_TOO_LARGE", status=8))
    assert not is_overload(ItemFailed("stops", reason="DRAINING", status=14, retryable=True))
    assert not is_overload(None)
    assert PAUSE_S <= pause_s(EncoderOverloaded("states no pause")) <= PAUSE_S * (1 + JITTER)


async def test_a_window_has_at_least_one_item() -> None:
    with pytest.raises(InvalidRequest, match="max_in_flight is 0, needs to be at least 1"):
        Window(0, waits=True)
