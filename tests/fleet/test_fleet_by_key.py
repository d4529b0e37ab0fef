"""Rows by key out of a fleet: the replica that the caller names, and who else is asked then."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from lm_adapter import AsyncFleetClient, FleetClient, FleetSettings, ImageItem, InvalidRequest, ItemFailed
from lm_adapter.testing import FakeEncoder, Fault, fake_rows
from lm_adapter.types import EncodedRows, Outcome, PrefetchStatus

pytestmark = pytest.mark.anyio

SETTINGS = FleetSettings(check_interval_s=0.2, max_hedges=0, backoff_s=0.02)


@pytest.fixture
def fakes() -> Iterator[list[FakeEncoder]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeEncoder(f"127.0.0.{number}:0")) for number in (2, 3, 4)]


@pytest.fixture
async def client(fakes: list[FakeEncoder]) -> AsyncIterator[AsyncFleetClient]:
    async with AsyncFleetClient([one.target for one in fakes], settings=SETTINGS, timeout_s=10) as found:
        await found.wait_ready(10, num_replicas=3)
        yield found


@pytest.fixture
def elsewhere() -> Iterator[socket.socket]:
    """Somebody who listens and is no replica."""
    with socket.create_server(("127.0.0.9", 0)) as listener:
        listener.setblocking(False)
        yield listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


def image() -> ImageItem:
    return ImageItem(b"content", digest=secrets.token_bytes(32))


def is_right(outcome: Outcome, item: ImageItem) -> bool:
    return isinstance(outcome, EncodedRows) and np.array_equal(
        outcome.numpy(), fake_rows(item.digest or b"", outcome.num_rows, outcome.width)
    )


async def taken(
    client: AsyncFleetClient, items: list[ImageItem], avoid: tuple[str, ...] = ()
) -> list[PrefetchStatus]:
    statuses = await client.prefetch(items, avoid=avoid)
    assert all(isinstance(status, PrefetchStatus) for status in statuses)
    return statuses  # type: ignore[return-value]


async def until(is_so: Callable[[], bool], limit_s: float = 10) -> None:
    ends_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < ends_s
        await asyncio.sleep(0.01)


def calls(fakes: list[FakeEncoder], method: str) -> dict[str, int]:
    return {one.target: one.num_calls[method] for one in fakes if one.num_calls[method]}


async def test_prefetch_says_where_rows_are_and_fetch_asks_nobody_else(
    client: AsyncFleetClient, fakes: list[FakeEncoder]
) -> None:
    items = [image() for _ in range(20)]
    statuses = await taken(client, items)
    places = [status.target for status in statuses]
    assert places == [client.home(item.digest or b"") for item in items]
    outcomes = await client.fetch([status.key for status in statuses], first=places)
    assert all(map(is_right, outcomes, items))
    assert calls(fakes, "Lookup") == {}
    assert calls(fakes, "Fetch") == dict.fromkeys(places, 1)


async def test_a_name_that_is_no_replica_is_never_connected_to_and_all_are_asked(
    client: AsyncFleetClient, fakes: list[FakeEncoder], elsewhere: socket.socket
) -> None:
    item = image()
    (status,) = await taken(client, [item])
    (outcome,) = await client.fetch([status.key], first=[address(elsewhere)])
    assert is_right(outcome, item)
    assert len(calls(fakes, "Lookup")) == 3
    with pytest.raises(BlockingIOError):
        elsewhere.accept()
    assert {one.target for one in client.replicas} == {one.target for one in fakes}


async def test_a_named_replica_that_stands_still_costs_other_keys_nothing(
    client: AsyncFleetClient, fakes: list[FakeEncoder]
) -> None:
    items = [image(), image()]
    (still,) = await taken(client, items[:1])
    (other,) = await taken(client, items[1:], avoid=(still.target,))
    holder = next(one for one in fakes if one.target == still.target)
    assert items[0].digest is not None
    holder.script.faults[items[0].digest] = Fault.HANG
    outcomes = await client.fetch([still.key, other.key], first=[still.target, ""], timeout_s=1)
    assert isinstance(outcomes[0], ItemFailed)
    assert outcomes[0].reason == "DEADLINE_EXCEEDED"
    assert is_right(outcomes[1], items[1])


async def test_a_replica_that_has_not_what_it_was_named_for_is_no_failure(
    client: AsyncFleetClient, fakes: list[FakeEncoder]
) -> None:
    """Half of the names are wrong, and the buffers get the rows that belong there."""
    items = [image() for _ in range(8)]
    statuses = await taken(client, items)
    others = {one.target: fakes[number - 1].target for number, one in enumerate(fakes)}
    names = [others[one.target] if number % 2 else one.target for number, one in enumerate(statuses)]
    before = replace(client.counts)
    buffers = [np.zeros(1 << 16, np.uint8) for _ in items]
    outcomes = await client.fetch([status.key for status in statuses], first=names, out=buffers)
    assert all(map(is_right, outcomes, items))
    assert all(
        isinstance(outcome, EncodedRows) and np.shares_memory(outcome.payload, buffer)
        for outcome, buffer in zip(outcomes, buffers, strict=True)
    )
    assert client.counts.items - before.items == 8
    assert client.counts.moves - before.moves == 4
    assert client.counts.failures == before.failures


async def test_a_key_that_nobody_has_fails_once(client: AsyncFleetClient, fakes: list[FakeEncoder]) -> None:
    (outcome,) = await client.fetch([secrets.token_bytes(32)], first=[fakes[0].target])
    assert isinstance(outcome, ItemFailed)
    assert outcome.reason == "UNKNOWN_KEY"
    assert (client.counts.items, client.counts.failures) == (1, 1)


async def test_p32_rows_of_a_replica_that_died_are_unknown_at_once(
    client: AsyncFleetClient, fakes: list[FakeEncoder]
) -> None:
    (status,) = await taken(client, [image()])
    next(one for one in fakes if one.target == status.target).stop()
    async with asyncio.timeout(5):
        (outcome,) = await client.fetch([status.key], first=[status.target])
    assert isinstance(outcome, ItemFailed)
    assert outcome.reason == "UNKNOWN_KEY"


async def test_p32_rows_of_a_replica_that_died_come_from_another_that_has_them(
    client: AsyncFleetClient, fakes: list[FakeEncoder]
) -> None:
    item = image()
    (first,) = await taken(client, [item])
    (second,) = await taken(client, [item], (first.target,))
    assert second.target != first.target
    next(one for one in fakes if one.target == first.target).stop()
    (outcome,) = await client.fetch([first.key], first=[first.target])
    assert is_right(outcome, item)


async def test_a_replica_that_drains_still_gives_what_it_has(
    client: AsyncFleetClient, fakes: list[FakeEncoder]
) -> None:
    item = image()
    (status,) = await taken(client, [item])
    (home,) = [one for one in fakes if one.target == status.target]
    home.script.serving = False
    await until(lambda: "leaving" in {one.state for one in client.replicas})
    (outcome,) = await client.fetch([status.key], first=[status.target])
    assert is_right(outcome, item)


async def test_replicas_to_avoid_are_asked_last(client: AsyncFleetClient, fakes: list[FakeEncoder]) -> None:
    item = image()
    (home,) = await taken(client, [item])
    (second,) = await taken(client, [item], (home.target,))
    (third,) = await taken(client, [item], (home.target, second.target))
    assert {home.target, second.target, third.target} == {one.target for one in fakes}
    (only,) = await taken(client, [item], tuple(one.target for one in fakes))
    assert only.target == home.target


async def test_names_are_one_for_each_key(client: AsyncFleetClient) -> None:
    with pytest.raises(InvalidRequest, match="first names 1 replicas for 2 keys"):
        await client.fetch([b"k" * 32, b"l" * 32], first=["a:1"])


async def test_a_name_that_is_not_listed_makes_the_list_be_looked_up_again(
    fakes: list[FakeEncoder],
) -> None:
    """Long before its turn, and then the replica is asked by the name that was unknown before."""
    item, asked = image(), asyncio.Event()
    listed = [fakes[0].target]

    def endpoints() -> list[str]:
        if len(listed) > 1:
            asked.set()
        return listed

    settings = replace(SETTINGS, refresh_s=2.0)
    async with AsyncFleetClient([fakes[1].target]) as other:
        (status,) = await taken(other, [item])
    async with AsyncFleetClient(endpoints, settings=settings, timeout_s=10) as client:
        await client.wait_ready(10)
        listed.append(fakes[1].target)
        (before,) = await client.fetch([status.key], first=[status.target])
        assert isinstance(before, ItemFailed)
        await asyncio.wait_for(asked.wait(), 1.5)
        await until(lambda: len(client.replicas) == 2)
        (after,) = await client.fetch([status.key], first=[status.target])
    assert is_right(after, item)


def test_the_blocking_face_does_the_same(fakes: list[FakeEncoder]) -> None:
    item = image()
    with FleetClient([one.target for one in fakes], settings=SETTINGS) as client:
        client.wait_ready(10, num_replicas=3)
        home = client.home(item.digest or b"")
        (status,) = client.prefetch([item], avoid=[home])
        assert isinstance(status, PrefetchStatus)
        assert status.target != home
        assert is_right(client.fetch([status.key], first=[status.target])[0], item)
    assert calls(fakes, "Lookup") == {}
