"""The replicas of a fleet, kept up to date on the loop: looked up, checked, taken out and back.

Owns the two background tasks (where the replicas are, how each does) and one client per replica. The rules
are ``replica``'s. A replica that is gone from the list gets no new items; its client closes when its last
attempt has ended."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lm_adapter.errors import (
    CallFailed,
    DeadlineExceeded,
    EncoderError,
    EncoderOverloaded,
    EncoderUnavailable,
)
from lm_adapter.fleet.call import FleetCounts
from lm_adapter.fleet.endpoints import Resolve
from lm_adapter.fleet.replica import Check, Replica, ReplicaState, eject_slow
from lm_adapter.fleet.replica_client import ReplicaClient
from lm_adapter.fleet.ring import home_order
from lm_adapter.fleet.settings import FleetSettings

__all__ = ["Directory", "Member", "ReplicaView", "gone", "until_done"]

ResultT = TypeVar("ResultT")
NAMED = 8
"""Replicas in the message of a failure."""

LOOKUP_S = 10.0
"""A lookup of the endpoints that takes longer has failed."""
LINGER_S = 5.0
"""From the last attempt at a replica that is gone from the list, until its leases and connections go too."""
LEAST_PAUSE_S = 0.1
"""Between two checks of a replica, however many calls fail there."""
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
        self.attempts: set[asyncio.Task[Any]] = set()
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
        self.settings, self._counts, self._clock = settings, counts, clock
        self._members: dict[str, Member] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._first: asyncio.Task[None] | None = None
        self._ended: asyncio.Task[None] | None = None
        self._refresh_wanted = asyncio.Event()
        self._ending = asyncio.Event()
        self.at_end: set[Callable[[], None]] = set()
        """What is told that the client closes."""
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
        up = [one for one in self.members if one.is_up]
        if not up:
            return home_order(key, self._last_resort())
        near = [one for one in up if one.is_local] if self.settings.locality == "prefer" else []
        if not near or len(near) == len(up):
            return home_order(key, up)
        return home_order(key, near) + home_order(key, [one for one in up if not one.is_local])

    def _last_resort(self) -> list[Member]:
        fit = [one for one in self.members if not one.is_misfit]
        return [one for one in fit if one.state is not ReplicaState.LEAVING] or fit

    def why_nobody(self) -> str:
        """No replica can be asked, where none can."""
        if not self._members:
            is_looking = self._first is not None and not self._first.done()
            none_yet = "the endpoints are still being looked up" if is_looking else "the endpoints are none"
            return none_yet if self.last_error is None else self.last_error.message
        return "; ".join(f"{one.target} is {one.state}: {one.why}" for one in self.views()[:NAMED])

    async def start(self, timeout_s: float) -> None:
        """Looks up the endpoints and asks each how it is, once; waits for that, for this long at most."""
        if self._first is None:
            self._first = asyncio.ensure_future(self._look_first())
            self._refreshing = asyncio.ensure_future(self._keep_refreshed(self._first))
        if not self._first.done():
            await asyncio.wait((self._first,), timeout=timeout_s)

    async def _look_first(self) -> None:
        """Until every replica has been asked once, or has had its time."""
        await self._refresh()
        first = [asyncio.ensure_future(one.was_checked.wait()) for one in self.members]
        try:
            if first:
                await asyncio.wait(first, timeout=2 * self.settings.check_timeout_s)
        finally:
            for one in first:
                one.cancel()

    @property
    def is_closed(self) -> bool:
        return self._ending.is_set()

    async def close(self) -> None:
        """Ends every attempt. A caller that is cancelled leaves the closing to itself."""
        if self._ended is None:
            self._ending.set()
            for tell in list(self.at_end):
                tell()
            self._ended = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ended)

    async def _end(self) -> None:
        tasks = [self._first, self._refreshing, *(one.checking for one in self.members)]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        members, self._members = self.members, {}
        for member in members:
            self._let_go(member)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def run_at(self, member: Member, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """As an attempt there: it ends when the replica falls silent. Raises EncoderUnavailable then."""
        task = asyncio.ensure_future(work)
        member.attempts.add(task)
        task.add_done_callback(member.attempts.discard)
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            task.cancel()
            await until_done([task])
            raise
        if task.cancelled():
            raise gone(member, member.why)
        return task.result()

    def has_failed(self, member: Member) -> None:
        """A call failed there: it is checked now, and so is the list."""
        member.wanted.set()
        self._refresh_wanted.set()

    def was_late(self, member: Member) -> None:
        """Another replica was faster by far: it is checked now."""
        member.wanted.set()

    def look_again(self) -> None:
        """Somebody knows of a replica that is not listed here: the list is looked up soon."""
        self._refresh_wanted.set()

    # Where the replicas are --------------------------------------------------------------------------------

    async def _keep_refreshed(self, first: asyncio.Task[None]) -> None:
        await asyncio.wait((first,))
        while not self._ending.is_set():
            pause_s = self.settings.refresh_s * random.uniform(0.9, 1.1)  # noqa: S311
            if not self._members:
                pause_s = min(pause_s, self.settings.check_interval_s)
            if await _is_set_within(self._refresh_wanted, pause_s):
                # Asked for by a failure: not sooner than a tenth of the turn after the last.
                await asyncio.sleep(pause_s / 10)
            self._refresh_wanted.clear()
            await self._refresh()

    async def _refresh(self) -> None:
        """A list that cannot be had, or is empty, leaves the last one: a name server that fails is no reason
        to stop asking replicas that serve."""
        try:
            async with asyncio.timeout(LOOKUP_S) as limit:
                targets = await self._resolve()
            for target in targets:
                if target not in self._members:
                    self._members[target] = self._join(target)
        except EncoderError as error:
            self.last_error = error
            return
        except Exception as error:  # the user's own function, or an argument of the clients
            said = f"no answer within {LOOKUP_S:g} s" if limit.expired() else repr(error)
            self.last_error = EncoderUnavailable(
                f"the endpoints could not be looked up: {said}", reason="NO_ENDPOINTS"
            )
            self.last_error.__cause__ = error
            return
        self.last_error = None
        for target in set(self._members) - set(targets) if targets else ():
            self._let_go(self._members.pop(target))

    def _join(self, target: str) -> Member:
        member = Member(target, self.settings, self._open_client(target))
        member.checking = asyncio.ensure_future(self._keep_checked(member))
        return member

    def _let_go(self, member: Member) -> None:
        """Checked until its last attempt has ended: it may fall silent as well. Rows that a caller is still
        reading under a lease have a while longer."""

        async def close() -> None:
            ending = asyncio.ensure_future(self._ending.wait())
            while member.attempts and not ending.done():
                await asyncio.wait({*member.attempts, ending}, return_when=asyncio.FIRST_COMPLETED)
            if member.checking is not None:
                member.checking.cancel()
            await asyncio.wait((ending,), timeout=LINGER_S)
            ending.cancel()
            await member.client.close()

        task = asyncio.ensure_future(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # How they are ------------------------------------------------------------------------------------------

    async def _keep_checked(self, member: Member) -> None:
        least_s = min(LEAST_PAUSE_S, self.settings.check_interval_s / 10)
        while not self._ending.is_set():
            # A failure while this check runs asks for another one after it.
            member.wanted.clear()
            before = member.state
            check, why = await self._check(member)
            now_s = self._clock()
            member.checked(check, now_s, why)
            member.was_checked.set()
            if member.state is ReplicaState.DOWN and check is Check.SILENT:
                # What waits for it would wait for its whole deadline.
                for task in set(member.attempts):
                    task.cancel()
            if member.is_up:
                member.is_local = member.client.transport.is_shared
                self._counts.ejections += len(eject_slow(self.members, self.settings, now_s))
            elif before is not member.state:
                self._refresh_wanted.set()
            pause_s = self.settings.check_interval_s * random.uniform(0.8, 1.2)  # noqa: S311
            if check is not Check.SERVING or not member.is_up:
                pause_s = min(pause_s, max(0.05, self.settings.check_interval_s / 4))
            await asyncio.sleep(min(least_s, pause_s))
            await _is_set_within(member.wanted, max(0.0, pause_s - least_s))

    async def _check(self, member: Member) -> tuple[Check, str]:
        """How it ended, and why."""
        timeout_s, begun_s = self.settings.check_timeout_s, self._clock()
        try:
            check = await member.client.check(timeout_s)
            if check is Check.SERVING and not member.is_up and self.settings.locality == "prefer":
                # Known before the first item goes there: to find it out later would move homes.
                await member.client.wait_transport(timeout_s)
            return check, ""
        except DeadlineExceeded:
            # Noticed far too late, the silence may be this process's own, which had no time to listen.
            is_own = self._clock() - begun_s > OWN_DELAY * timeout_s
            return Check.UNHEARD if is_own else Check.SILENT, ""
        except EncoderOverloaded as error:
            return Check.UNHEARD, error.message  # a full replica works
        except CallFailed as error:
            return Check.UNREACHABLE, error.message
        except Exception as error:
            # What no client raises: one replica's answer must not end the checks of it.
            return Check.UNREACHABLE, f"its check failed: {error!r}"


async def until_done(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Waits for all of them, however often the caller is cancelled meanwhile: what they write to is its own
    again only then. What they raise is theirs."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen
    if cancelled is not None:
        raise cancelled


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Unlike ``asyncio.wait_for``, which before Python 3.12 forgets that its task was cancelled when the
    event is set in the same moment."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def gone(member: Member, why: str) -> EncoderUnavailable:
    """What an attempt ends in that a replica will not answer."""
    return EncoderUnavailable(
        f"{member.target} no longer answers: {why}",
        details={"status": "UNAVAILABLE", "target": member.target},
    )
