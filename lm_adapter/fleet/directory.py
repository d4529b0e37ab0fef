"""The replicas of a fleet, kept up to date on the loop: looked up, checked, taken out and back.

Owns the two background tasks (where the replicas are, how each does) and one client per replica. The rules
are ``replica``'s. A replica that is gone from the list gets no new items; its client closes when its last
attempt has ended."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lm_adapter.errors import CallFailed, DeadlineExceeded, EncoderError
from lm_adapter.fleet.call import FleetCounts
from lm_adapter.fleet.endpoints import Resolve
from lm_adapter.fleet.replica import Check, Replica, ReplicaState, eject_slow
from lm_adapter.fleet.replica_client import ReplicaClient
from lm_adapter.fleet.ring import home_order
from lm_adapter.fleet.settings import FleetSettings

__all__ = ["Directory", "Member", "ReplicaView"]

OWN_DELAY = 1.5
"""A check that ends after this many times its timeout says more of this process than of the replica."""


@dataclass(frozen=True)
class ReplicaView:
    """One replica as a client sees it now. state: ``joining``, ``up``, ``leaving``, ``down`` or ``ejected``;
    why: it is not up; num_items: under way there."""

    target: str
    state: str
    why: str
    is_local: bool
    num_items: int


class Member(Replica):
    """A replica with its client and the attempts that run there."""

    def __init__(self, target: str, settings: FleetSettings, client: ReplicaClient) -> None:
        super().__init__(target, settings)
        self.client = client
        self.attempts: set[asyncio.Task[None]] = set()
        self.checking: asyncio.Task[None] | None = None
        self.was_checked = asyncio.Event()
        self.wanted = asyncio.Event()
        """A check now, not at the next turn."""


class Directory:
    """Of one client, on one loop. ``start`` before anything else."""

    def __init__(
        self,
        resolve: Resolve,
        open_client: Callable[[str], ReplicaClient],
        settings: FleetSettings,
        counts: FleetCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolve, self._open_client = resolve, open_client
        self._settings, self._counts, self._clock = settings, counts, clock
        self._members: dict[str, Member] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._first: asyncio.Future[None] | None = None
        self._refresh_wanted = asyncio.Event()
        self._ending = asyncio.Event()
        self.last_error: EncoderError | None = None
        """Of looking up the endpoints."""

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    def views(self) -> list[ReplicaView]:
        """Of each, by target."""
        return [
            ReplicaView(one.target, one.state.value, one.why, one.is_local, one.num_items)
            for one in sorted(self.members, key=lambda one: one.target)
        ]

    def order(self, key: bytes | None) -> list[Member]:
        """Where an item of this routing key may go, its home first: among the local replicas that are up,
        then among the others. While none is up, to those that may be soonest."""
        up = [one for one in self._members.values() if one.is_up]
        if not up:
            return home_order(key, self._last_resort())
        near = [one for one in up if one.is_local] if self._settings.locality == "prefer" else []
        if not near or len(near) == len(up):
            return home_order(key, up)
        return home_order(key, near) + home_order(key, [one for one in up if not one.is_local])

    def _last_resort(self) -> list[Member]:
        staying = [one for one in self._members.values() if one.state is not ReplicaState.LEAVING]
        return staying or self.members

    async def start(self) -> None:
        """Looks up the endpoints and asks each how it is, once; concurrent callers wait for the same."""
        if self._first is None:
            self._first = asyncio.get_running_loop().create_future()
            try:
                await self._refresh()
                await self._first_checks()
            finally:
                self._refreshing = asyncio.ensure_future(self._keep_refreshed())
                self._first.set_result(None)
        await asyncio.shield(self._first)

    async def _first_checks(self) -> None:
        """Until every replica has been asked once, or has had its time."""
        first = [asyncio.ensure_future(one.was_checked.wait()) for one in self.members]
        if first:
            await asyncio.wait(first, timeout=2 * self._settings.check_timeout_s)
        for one in first:
            one.cancel()

    @property
    def is_closed(self) -> bool:
        return self._ending.is_set()

    async def close(self) -> None:
        """Ends every attempt."""
        self._ending.set()
        tasks = [one.checking for one in self.members] + [self._refreshing]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        members, self._members = self.members, {}
        for member in members:
            self._let_go(member)
        await asyncio.gather(*self._closing)

    def has_failed(self, member: Member) -> None:
        """A call failed there: it is checked now, and so is the list."""
        member.wanted.set()
        self._refresh_wanted.set()

    def was_late(self, member: Member) -> None:
        """Another replica was faster by far: it is checked now."""
        member.wanted.set()

    # Where the replicas are --------------------------------------------------------------------------------

    async def _keep_refreshed(self) -> None:
        while True:
            pause_s = self._settings.refresh_s * random.uniform(0.9, 1.1)  # noqa: S311
            with suppress(TimeoutError):
                await asyncio.wait_for(self._refresh_wanted.wait(), pause_s)
                # Asked for by a failure: not sooner than a tenth of the turn after the last.
                await asyncio.sleep(pause_s / 10)
            self._refresh_wanted.clear()
            await self._refresh()

    async def _refresh(self) -> None:
        """A list that cannot be had, or is empty, leaves the last one: a name server that fails is no reason
        to stop asking replicas that serve."""
        try:
            targets = await self._resolve()
        except EncoderError as error:
            self.last_error = error
            return
        self.last_error = None
        if not targets:
            return
        for target in targets:
            if target not in self._members:
                member = Member(target, self._settings, self._open_client(target))
                member.checking = asyncio.ensure_future(self._keep_checked(member))
                self._members[target] = member
        for target in set(self._members) - set(targets):
            self._let_go(self._members.pop(target))

    def _let_go(self, member: Member) -> None:
        """Checked until its last attempt has ended: it may fall silent as well."""

        async def close() -> None:
            ending = asyncio.ensure_future(self._ending.wait())
            while member.attempts and not ending.done():
                await asyncio.wait({*member.attempts, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if member.checking is not None:
                member.checking.cancel()
            await member.client.close()

        task = asyncio.ensure_future(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # How they are ------------------------------------------------------------------------------------------

    async def _keep_checked(self, member: Member) -> None:
        while True:
            # A failure while this check runs asks for another one after it.
            member.wanted.clear()
            before = member.state
            check = await self._check(member)
            now_s = self._clock()
            member.checked(check, now_s)
            member.was_checked.set()
            if member.state is ReplicaState.DOWN and check is Check.SILENT:
                # What waits for it would wait for its whole deadline.
                for task in set(member.attempts):
                    task.cancel()
            if member.is_up:
                member.is_local = member.client.transport.is_shared
                self._counts.ejections += len(eject_slow(self.members, self._settings, now_s))
            elif before is not member.state:
                self._refresh_wanted.set()
            pause_s = self._settings.check_interval_s * random.uniform(0.8, 1.2)  # noqa: S311
            if check is not Check.SERVING or not member.is_up:
                pause_s = min(pause_s, max(0.05, self._settings.check_interval_s / 4))
            with suppress(TimeoutError):
                await asyncio.wait_for(member.wanted.wait(), pause_s)

    async def _check(self, member: Member) -> Check:
        timeout_s, begun_s = self._settings.check_timeout_s, self._clock()
        try:
            check = await member.client.check(timeout_s)
            if check is Check.SERVING and not member.is_up and self._settings.locality == "prefer":
                # Known before the first item goes there: to find it out later would move homes.
                await member.client.wait_transport(timeout_s)
            return check
        except DeadlineExceeded:
            # Noticed far too late, the silence may be this process's own, which had no time to listen.
            is_own = self._clock() - begun_s > OWN_DELAY * timeout_s
            return Check.UNHEARD if is_own else Check.SILENT
        except CallFailed:
            return Check.UNREACHABLE
