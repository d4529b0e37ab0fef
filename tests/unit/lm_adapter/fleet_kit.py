"""A fleet without sockets: replicas that a test answers for, and a directory of them.

Owns no expectations. Used by the tests of ``lm_adapter.fleet`` beside it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from lm_adapter.errors import CallCancelled
from lm_adapter.fleet import FleetCounts, FleetSettings
from lm_adapter.fleet.budget import RetryBudget
from lm_adapter.fleet.call import FleetCall
from lm_adapter.fleet.directory import Directory, Member
from lm_adapter.fleet.latency import Latencies
from lm_adapter.fleet.replica import Check
from lm_adapter.fleet.replica_client import ReplicaClient
from lm_adapter.fleet.run import CallRun, Rescue
from lm_adapter.session import Deadline
from lm_adapter.transport.settings import TransportChoice

SETTINGS = FleetSettings(
    refresh_s=0.02, check_interval_s=0.02, check_timeout_s=0.5, backoff_s=0.01, max_hedges=0, patience_s=0.2
)


class StubClient:
    """In a ``ReplicaClient``'s place. health: what checks end in, an exception is raised."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.transport = TransportChoice("inline", "a stub")
        self.health: Check | Exception = Check.SERVING
        self.answers = asyncio.Event()
        self.answers.set()
        self.num_checks = 0
        self.closed = asyncio.Event()

    async def check(self, timeout_s: float) -> Check:
        self.num_checks += 1
        await self.answers.wait()
        if isinstance(self.health, Exception):
            raise self.health
        return self.health

    async def wait_transport(self, timeout_s: float) -> TransportChoice:
        return self.transport

    async def close(self) -> None:
        self.closed.set()


class StubFleet:
    """``listed``: the targets, or what looking them up raises. prepare: each client when it is opened."""

    def __init__(
        self, *targets: str, prepare: Callable[[StubClient], None] = lambda _: None, **changes: Any
    ) -> None:
        self.listed: Sequence[str] | Exception = targets
        self.settings = replace(SETTINGS, **changes)
        self.counts = FleetCounts()
        self.budget = RetryBudget(self.settings.retry_share, self.settings.retry_reserve_per_s)
        self.latencies = Latencies()
        self.clients: list[StubClient] = []
        self.num_lookups = 0
        self.lookups_go_on = asyncio.Event()
        self.lookups_go_on.set()
        self._prepare = prepare
        self.directory = Directory(self.resolve, self.open_client, self.settings, self.counts)

    async def resolve(self) -> Sequence[str]:
        self.num_lookups += 1
        await self.lookups_go_on.wait()
        if isinstance(self.listed, Exception):
            raise self.listed
        return self.listed

    def open_client(self, target: str) -> ReplicaClient:
        client = StubClient(target)
        self._prepare(client)
        self.clients.append(client)
        return cast("ReplicaClient", client)

    async def __aenter__(self) -> StubFleet:
        await self.directory.start(5)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.wait_for(self.directory.close(), 5)

    def member(self, target: str) -> Member:
        return next(one for one in self.directory.members if one.target == target)

    def client(self, target: str) -> StubClient:
        return cast("StubClient", self.member(target).client)

    def run(
        self,
        open_attempt: Callable[[Member, Sequence[int]], Any],
        *,
        num_items: int = 1,
        timeout_s: float = 5.0,
        hedge_after_s: float | None = None,
        rescue: Rescue[Any] | None = None,
    ) -> CallRun[Any]:
        """Of items that all have the same home."""
        call = FleetCall(
            num_items, lambda _: self.directory.order(b"key"), self.settings, self.budget, self.counts,
            self.latencies, self.directory._clock(), hedge_after_s=hedge_after_s,
            replicas=lambda: self.directory.members,
        )  # fmt: skip
        return CallRun(
            call, num_items, self.directory, open_attempt, Deadline(timeout_s), timeout_s,
            self.directory._clock, rescue,
        )  # fmt: skip


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    ends_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends_s, "it never came to it"
        await asyncio.sleep(0.002)


async def forever(_member: Member, _indices: Sequence[int]) -> AsyncIterator[tuple[int, Any]]:
    """An attempt that a closing client ends, as a channel's calls end."""
    try:
        await asyncio.Event().wait()
    finally:
        pass
    yield 0, None


def closed_under(fleet: StubFleet) -> Callable[[Member, Sequence[int]], AsyncIterator[tuple[int, Any]]]:
    """An attempt that ends when its replica's client is closed, as gRPC's calls do."""

    async def attempt(member: Member, _indices: Sequence[int]) -> AsyncIterator[tuple[int, Any]]:
        await cast("StubClient", member.client).closed.wait()
        raise CallCancelled("the client is closed")
        yield 0, None

    return attempt


def answered(outcomes: Sequence[tuple[int, Any]]) -> Counter[int]:
    return Counter(index for index, _ in outcomes)


async def collected(run: CallRun[Any]) -> list[tuple[int, Any]]:
    async with contextlib.aclosing(run.outcomes()) as stream:
        return [finished async for finished in stream]
