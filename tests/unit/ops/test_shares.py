"""Shares of a limit: what one holder can take, and that another one always finds room."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_service.ops.shares import Holder, Shares, WaitingShares

FLOOD, PROBE = ("namespace flood",), ("namespace probe",)


def take_all(shares: Shares, holder: Holder, amount: int = 1) -> int:
    taken = 0
    while shares.take(holder, amount):
        taken += amount
    return taken


def test_one_holder_takes_three_quarters_and_another_finds_room() -> None:
    shares = Shares(400)
    assert take_all(shares, FLOOD) == 300
    assert take_all(shares, PROBE) == 50  # an eighth
    assert take_all(shares, ("namespace third",)) == 50
    assert shares.num_used == 400
    assert not shares.take(("namespace fourth",))


def test_an_amount_of_the_whole_limit_fits_while_nothing_is_held() -> None:
    shares = Shares(400)
    assert shares.take(FLOOD, 400)
    assert not shares.take(PROBE)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 8])
def test_a_small_limit_can_be_used_whole(limit: int) -> None:
    shares = Shares(limit)
    taken = [take_all(shares, (f"namespace {index}",)) for index in range(limit)]
    assert sum(taken) == limit


def test_invented_namespaces_share_what_their_address_may_take() -> None:
    shares = Shares(1600)
    for index in range(400):
        take_all(shares, ("peer 10.0.0.1", f"namespace {index}"), 10)
    assert shares.held_by(("peer 10.0.0.1",)) == 1200
    assert take_all(shares, ("peer 10.0.0.2", "namespace 0"), 10) == 200


def test_two_namespaces_of_one_address_have_shares_of_its_share() -> None:
    shares = Shares(1600)
    assert take_all(shares, ("peer 10.0.0.1", "flood")) == 900
    assert take_all(shares, ("peer 10.0.0.1", "probe")) == 150


@given(
    limit=st.integers(1, 300),
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 40), st.booleans()), max_size=60
    ),
)
def test_no_order_exceeds_the_limit_or_loses_any(limit: int, steps: list[tuple[int, int, int, bool]]) -> None:
    shares, taken = Shares(limit), list[tuple[Holder, int]]()
    for peer, name, amount, gives_back in steps:
        if gives_back and taken:
            shares.give_back(*taken.pop(amount % len(taken)))
        elif shares.take(holder := (f"peer {peer}", f"namespace {name}"), amount):
            taken.append((holder, amount))
        assert shares.num_used == sum(amount for _, amount in taken) <= limit
        large = [shares.held_by((f"peer {index}",)) for index in range(4)]
        assert sum(held > max(limit * 3 // 4, 40) for held in large) <= 1
    for left in taken:
        shares.give_back(*left)
    assert shares.num_used == 0
    assert shares.room(("anyone",)) == limit


@pytest.mark.anyio
async def test_those_that_wait_are_served_in_turns_by_holder() -> None:
    shares, order = WaitingShares(1), list[str]()

    async def use(holder: Holder, name: str) -> None:
        async with shares.hold(holder):
            order.append(name)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for index in range(20):
            group.create_task(use(FLOOD, f"flood {index}"))
        await asyncio.sleep(0)
        group.create_task(use(PROBE, "probe"))
    assert order.index("probe") <= 3
    assert [name for name in order if name != "probe"] == [f"flood {index}" for index in range(20)]
    assert (shares.num_used, shares.num_waiting) == (0, 0)


@pytest.mark.anyio
async def test_a_large_one_delays_its_own_holder_only() -> None:
    shares = WaitingShares(100)
    first = await shares.acquire(FLOOD, 60)
    large = asyncio.ensure_future(shares.acquire(FLOOD, 90))
    behind = asyncio.ensure_future(shares.acquire(FLOOD, 1))
    await asyncio.sleep(0)
    assert await asyncio.wait_for(shares.acquire(PROBE, 10), 1) == 10
    assert not large.done()
    assert not behind.done()
    shares.release(PROBE, 10)
    large.cancel()
    await asyncio.sleep(0)
    assert await asyncio.wait_for(behind, 1) == 1
    shares.release(FLOOD, 1)
    shares.release(FLOOD, first)
    assert (shares.num_used, shares.num_waiting) == (0, 0)


@pytest.mark.anyio
async def test_more_than_the_limit_waits_for_all_of_it() -> None:
    shares = WaitingShares(100)
    taken = await shares.acquire(FLOOD, 1_000)
    assert taken == 100
    waiting = asyncio.ensure_future(shares.acquire(PROBE, 1))
    await asyncio.sleep(0)
    shares.release(FLOOD, taken)
    assert await waiting == 1


@pytest.mark.anyio
async def test_a_grant_that_its_caller_does_not_take_is_given_back() -> None:
    shares = WaitingShares(1)
    taken = await shares.acquire(FLOOD)
    waiting = asyncio.ensure_future(shares.acquire(PROBE))
    await asyncio.sleep(0)
    shares.release(FLOOD, taken)  # granted, and cancelled before it runs again
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (shares.num_used, shares.num_waiting) == (0, 0)
