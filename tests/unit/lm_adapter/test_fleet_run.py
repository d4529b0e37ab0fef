"""One call over a fleet as it runs: what the caller gets when it is late, leaves, or the client closes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from lm_adapter.errors import CallCancelled, EncoderUnavailable, InvalidRequest, ItemFailed
from lm_adapter.fleet import run as run_module
from lm_adapter.fleet.directory import Member
from lm_adapter.types import EncodedRows, Grid
from tests.unit.lm_adapter.fleet_kit import StubFleet, answered, closed_under, collected, forever, until

pytestmark = pytest.mark.anyio
GONE = EncoderUnavailable("nobody is there")
FULL = ItemFailed("full", reason="QUEUE_FULL", status=8, retryable=True, retry_after_ms=60_000)


async def failing(_member: Member, _indices: Sequence[int]) -> AsyncIterator[tuple[int, Any]]:
    raise GONE
    yield 0, None


async def full(_member: Member, indices: Sequence[int]) -> AsyncIterator[tuple[int, Any]]:
    for position in range(len(indices)):
        yield position, FULL


async def test_a_rescue_that_takes_too_long_ends_with_the_calls_time() -> None:
    """And the loop has time for everybody else meanwhile."""
    ended = asyncio.Event()

    async def rescue(_index: int, _failure: ItemFailed) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "rows"

    async with StubFleet("a:1", "b:1") as fleet:
        outcomes = await collected(fleet.run(failing, num_items=3, timeout_s=0.3, rescue=rescue))
    assert answered(outcomes) == {0: 1, 1: 1, 2: 1}
    for _, outcome in outcomes:
        assert outcome.reason == "DEADLINE_EXCEEDED"
        assert "nobody is there" in outcome.message
    assert ended.is_set()


async def test_a_rescue_that_cancels_itself_leaves_the_items_own_failure() -> None:
    async def rescue(_index: int, _failure: ItemFailed) -> str:
        raise asyncio.CancelledError

    async with StubFleet("a:1") as fleet:
        ((_, outcome),) = await collected(fleet.run(failing, timeout_s=30, rescue=rescue))
    assert outcome.reason == "UNAVAILABLE"


async def test_what_an_attempt_says_of_the_arguments_is_the_callers_and_ends_the_others() -> None:
    cancelled: list[str] = []

    async def attempt(member: Member, indices: Sequence[int]) -> AsyncIterator[tuple[int, Any]]:
        if member.target == bad:
            raise InvalidRequest("no such argument")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(member.target)
            raise
        yield 0, None

    async with StubFleet("a:1", "b:1", max_hedges=1, hedge_min_s=0.0) as fleet:
        bad = fleet.directory.order(b"key")[1].target
        with pytest.raises(InvalidRequest, match="no such argument"):
            await collected(fleet.run(attempt, hedge_after_s=0.01))
        assert [one.num_items for one in fleet.directory.members] == [0, 0]
    assert len(cancelled) == 1


async def test_a_caller_that_is_slow_to_ask_makes_no_replica_late() -> None:
    """What came while it was busy is neither asked for again nor counted as if it had just come."""
    first_seen, came = asyncio.Event(), asyncio.Event()

    async def attempt(_member: Member, indices: Sequence[int]) -> AsyncIterator[tuple[int, Any]]:
        yield 0, "rows"
        await first_seen.wait()
        for position in range(1, len(indices)):
            yield position, "rows"
        came.set()

    async with StubFleet("a:1", "b:1", max_hedges=1) as fleet:
        run = fleet.run(attempt, num_items=20, timeout_s=1.2, hedge_after_s=0.6)
        async with contextlib.aclosing(run.outcomes()) as stream:
            outcomes = [await anext(stream)]
            first_seen.set()
            await came.wait()
            await asyncio.sleep(1.3)  # the caller's own work: past its deadline, and any hedge
            outcomes += [finished async for finished in stream]
    assert [outcome for _, outcome in outcomes] == ["rows"] * 20
    assert fleet.counts.hedges == 0
    slowest_s = fleet.latencies.percentile(1.0)
    assert slowest_s is not None
    assert slowest_s < 1.1


async def test_rows_that_nobody_asks_for_are_not_read_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the waiting is no replica's fault."""
    monkeypatch.setattr(run_module, "KEPT_BYTES", 4 << 20)
    read: list[int] = []

    async def attempt(_member: Member, indices: Sequence[int]) -> AsyncIterator[tuple[int, Any]]:
        for position in range(len(indices)):
            read.append(position)
            yield position, rows_of(1 << 20)

    async with StubFleet("a:1", "b:1", max_hedges=1, hedge_min_s=0.01) as fleet:
        run = fleet.run(attempt, num_items=40, hedge_after_s=0.5)
        async with contextlib.aclosing(run.outcomes()) as stream:
            outcomes = [await anext(stream)]
            await asyncio.sleep(1.0)  # the caller's own work
            assert len(read) <= 6
            outcomes += [finished async for finished in stream]
    assert answered(outcomes) == dict.fromkeys(range(40), 1)
    assert len(read) == 40
    assert fleet.counts.hedges == 0
    slowest_s = fleet.latencies.percentile(1.0)
    assert slowest_s is None or slowest_s < 0.9


def rows_of(num_bytes: int) -> EncodedRows:
    payload = np.zeros(num_bytes, np.uint8)
    return EncodedRows(b"k" * 32, b"d" * 32, Grid(1, 2, 2), 1, num_bytes // 4, "float32", 0, payload)


async def test_a_caller_that_leaves_spends_none_of_the_retries() -> None:
    async with StubFleet("a:1", retry_share=0.0, retry_reserve_per_s=1.0) as fleet:
        for _ in range(3):
            run = fleet.run(forever, num_items=10)
            task = asyncio.ensure_future(collected(run))
            await until(lambda: bool(fleet.member("a:1").num_items))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert fleet.budget.left(fleet.directory._clock()) == 10
        assert fleet.counts.retries == 0
        assert fleet.member("a:1").num_items == 0


@pytest.mark.parametrize("attempt", ["closed under it", "waiting for a retry", "in its rescue"])
async def test_a_call_that_the_client_closes_under_ends_at_once_and_says_so(attempt: str) -> None:
    async def rescue(_index: int, _failure: ItemFailed) -> str:
        return str(await asyncio.Event().wait())

    async with StubFleet("a:1", max_attempts=2 if attempt == "waiting for a retry" else 1) as fleet:
        opened = {"closed under it": closed_under(fleet), "waiting for a retry": full, "in its rescue": full}
        run = fleet.run(opened[attempt], timeout_s=60, rescue=rescue if attempt == "in its rescue" else None)
        task = asyncio.ensure_future(collected(run))
        await until(lambda: fleet.counts.attempts == 1)
        for _ in range(20):  # until it waits
            await asyncio.sleep(0)
        await fleet.directory.close()
        with pytest.raises(CallCancelled, match="the fleet's client is closed"):
            await asyncio.wait_for(task, 2)
        assert not fleet.directory.at_end


async def test_no_copy_goes_on_however_often_the_caller_is_cancelled() -> None:
    copied, copying = asyncio.Event(), asyncio.Event()

    async def attempt(_member: Member, _indices: Sequence[int]) -> AsyncIterator[tuple[int, Any]]:
        try:
            await asyncio.Event().wait()
        finally:
            copying.set()
            await asyncio.shield(asyncio.ensure_future(copied.wait()))  # as a thread's copy, to its end
        yield 0, None

    async with StubFleet("a:1") as fleet:
        task = asyncio.ensure_future(collected(fleet.run(attempt)))
        await until(lambda: bool(fleet.member("a:1").attempts))
        task.cancel()
        await copying.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not task.done(), "the copy still runs"
        copied.set()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_cancellation_is_not_forgotten_when_rows_come_in_the_same_moment(num_turns: int) -> None:
    """As ``asyncio.wait_for`` forgets it before Python 3.12."""
    arrived = asyncio.Event()

    async def attempt(_member: Member, _indices: Sequence[int]) -> AsyncIterator[tuple[int, Any]]:
        await arrived.wait()
        yield 0, "rows"
        await asyncio.Event().wait()

    async with StubFleet("a:1") as fleet:
        task = asyncio.ensure_future(collected(fleet.run(attempt, num_items=2)))
        await until(lambda: bool(fleet.member("a:1").attempts))
        await asyncio.sleep(0.01)
        arrived.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(task), 1)
        task.cancel()


async def test_nobody_to_ask_says_why() -> None:
    async with StubFleet() as fleet:
        fleet.listed = KeyError("no such service")
        await until(lambda: fleet.directory.last_error is not None)
        ((_, outcome),) = await collected(fleet.run(failing))
    assert outcome.reason == "NO_ENDPOINTS"
    assert "no such service" in outcome.message
