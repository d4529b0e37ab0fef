"""The asyncio client of a fleet. Its blocking face is ``client``.

Owns the calls and how they are split; one ordinary client per replica does the talking. Retries, hedges and
their budget are ``call``'s and ``budget``'s, which replica is whose home ``ring``'s, who is asked
``directory``'s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from lm_adapter.assembly import DEFAULT_MAX_ROWS_BYTES
from lm_adapter.client import DEFAULT_TIMEOUT_S
from lm_adapter.collect import collect_on_loop, in_order
from lm_adapter.errors import (
    CallCancelled,
    CallFailed,
    DeadlineExceeded,
    EncoderUnavailable,
    ItemFailed,
)
from lm_adapter.fleet.budget import RetryBudget
from lm_adapter.fleet.by_key import OpenByKey, fetch_steps, read_where_held
from lm_adapter.fleet.call import FleetCall, FleetCounts
from lm_adapter.fleet.directory import Directory, Member, ReplicaView
from lm_adapter.fleet.endpoints import Endpoints, resolver_of
from lm_adapter.fleet.fallback import Fallback, fall_back
from lm_adapter.fleet.holders import find_holders
from lm_adapter.fleet.homes import routed_items, routing_keys
from lm_adapter.fleet.latency import Latencies
from lm_adapter.fleet.replica_client import replica_opener
from lm_adapter.fleet.run import CallRun, Open, Rescue, may_hedge
from lm_adapter.fleet.settings import FleetSettings
from lm_adapter.leases import LeaseRecord
from lm_adapter.session import Deadline, rows_or_raise
from lm_adapter.transport.buffers import RowsHandling, RowsOptions
from lm_adapter.transport.channel import ClientTls
from lm_adapter.transport.off_loop import CallerStreams
from lm_adapter.transport.settings import TransportOptions
from lm_adapter.types import (
    DigestItem,
    EncodedRows,
    Item,
    KeyStatus,
    Outcome,
    PrefetchStatus,
    ServerInfo,
)

__all__ = ["AsyncFleetClient"]

READY_POLL_S = 0.02

ResultT = TypeVar("ResultT")


class AsyncFleetClient:
    """A client of all replicas of one service, for asyncio. One per event loop; an async context manager.

    Every item has a home among the replicas that are up, by its content digest, and goes there, so that what
    a replica holds is asked for again where it is. Items of one call that have different homes go in several
    calls at once. What fails in a way that another replica may not is tried there, within the deadline, the
    attempts and the retry budget of ``settings``; what is late is asked for a second time. Each item is
    answered once.

    Unlike the client of one server, a call does not fail as a whole: an item that no replica served is an
    ItemFailed like any other, with the reason of its last attempt. Raises InvalidRequest, and CallCancelled
    when the client is closed under the call.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        settings: FleetSettings | None = None,
        fallback: Fallback | None = None,
        fingerprint: bytes = b"",
        credentials: grpc.ChannelCredentials | None = None,
        tls: ClientTls | None = None,
        namespace: str = "",
        model: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_rows_bytes: int = DEFAULT_MAX_ROWS_BYTES,
        options: Mapping[str, int | str] | None = None,
        **transport: Unpack[TransportOptions],
    ) -> None:
        """endpoints: ``dns:///host:port`` of a headless service, a list of targets, or a function that
        returns one, asked again every ``settings.refresh_s``. fallback: see ``Fallback``. fingerprint:
        replicas that serve other weights are not asked. The others: see ``VisionEncoderClient``; with TLS,
        replicas are known by address, so that ``tls.server_name`` says what their certificates are made out
        to."""
        self.settings = settings or FleetSettings()
        self.counts = FleetCounts()
        self._fallback, self._timeout_s, self._clock = fallback, timeout_s, time.monotonic
        self.retries = RetryBudget(self.settings.retry_share, self.settings.retry_reserve_per_s)
        """Also for callers who try again by themselves, see ``prefetch``; on ``time.monotonic``."""
        self._latencies = Latencies()

        open_client = replica_opener(
            fingerprint=fingerprint,
            credentials=credentials,
            tls=tls,
            namespace=namespace,
            model=model,
            timeout_s=timeout_s,
            max_rows_bytes=max_rows_bytes,
            options=options,
            transport=transport,
        )
        self._directory = Directory(
            resolver_of(endpoints), open_client, self.settings, self.counts, self._clock
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def replicas(self) -> list[ReplicaView]:
        """Those that are listed, by target."""
        return self._directory.views()

    def home(self, digest: bytes) -> str:
        """The target that items of this digest go to now; empty without replicas."""
        return next((one.target for one in self._directory.order(digest)), "")

    async def close(self) -> None:
        """Calls in progress end with CallCancelled. Harmless when done twice."""
        await self._directory.close()

    async def wait_ready(self, timeout_s: float, *, num_replicas: int = 1) -> ServerInfo:
        """Waits until this many replicas are up; what one of them says of itself. Raises DeadlineExceeded
        with how the replicas were last."""
        deadline = Deadline(timeout_s)
        await self._begin("wait_ready", deadline)
        while (num_up := sum(one.is_up for one in self._directory.members)) < num_replicas:
            if deadline.left_s <= 0:
                states = ", ".join(f"{one.target} {one.state}: {one.why}" for one in self.replicas)
                error = self._directory.last_error
                raise DeadlineExceeded(
                    f"{num_up} replicas were up within {timeout_s} s, {num_replicas} were to be "
                    f"({states or error or 'no endpoints'})"
                )
            await asyncio.sleep(READY_POLL_S)
        return await self.info(timeout_s=max(deadline.left_s, 0.1))

    async def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """What a replica that is up says of itself; all of a fleet serve the same. Raises CallFailed."""
        deadline = self._deadline(timeout_s)
        await self._begin("info", deadline)
        failure: CallFailed = EncoderUnavailable("no replica can be asked", reason="NO_ENDPOINTS")
        for member in self._directory.order(None):
            try:
                return await member.client._known_info(deadline)
            except CallFailed as error:
                failure = error
        raise failure

    async def encode(
        self, items: Sequence[Item], *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> list[Outcome]:
        """Rows or failure of each item, in input order."""
        return await collect_on_loop(self.encode_iter(items, timeout_s=timeout_s, **rows))

    async def encode_one(
        self, item: Item, *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> EncodedRows:
        """The rows of one item. Raises ItemFailed."""
        return rows_or_raise((await self.encode([item], timeout_s=timeout_s, **rows))[0])

    async def encode_iter(
        self, items: Sequence[Item], *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        """Each item's index and outcome as it finishes. Nothing is sent before the first step; closing the
        generator (``contextlib.aclosing``) cancels the call."""
        async with aclosing(self._encode_on(CallerStreams(), items, timeout_s, rows)) as stream:
            async for finished in stream:
                yield finished

    async def _encode_on(
        self, streams: CallerStreams, items: Sequence[Item], timeout_s: float | None, rows: RowsOptions
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        handling, deadline = RowsHandling(**rows), self._deadline(timeout_s)
        handling.check_items(len(items))
        if not items:
            return
        await self._begin("Encode", deadline)
        keys = await routing_keys(items)

        def open_attempt(member: Member, indices: Sequence[int]) -> AsyncGenerator[tuple[int, Outcome], None]:
            chosen = routed_items(items, keys, indices)
            return member.client.encode_for(streams, chosen, deadline, handling.only(indices))

        async def rescue(index: int, failure: ItemFailed) -> EncodedRows | ItemFailed:
            assert self._fallback is not None
            self.counts.fallbacks += 1
            return await fall_back(self._fallback, items[index], failure)

        call = self._call(
            len(items),
            lambda index: self._directory.order(keys[index]),
            hedged=may_hedge(handling),
            absent_moves=[isinstance(item, DigestItem) for item in items],
        )
        run = self._run(
            call, len(items), open_attempt, deadline, timeout_s, rescue if self._fallback else None
        )
        async with aclosing(run) as stream:
            async for finished in stream:
                yield finished

    async def prefetch(
        self,
        items: Sequence[Item],
        *,
        avoid: Collection[str] = (),
        again: bool = False,
        timeout_s: float | None = None,
    ) -> list[PrefetchStatus | ItemFailed]:
        """Starts encoding at each item's home and keeps the rows there; see ``VisionEncoderClient``. Each
        status says in ``target`` where that is. avoid: replicas that are asked last. again: the items were
        asked for before, and the caller has taken them out of ``retries``: they earn no further ones."""
        deadline = self._deadline(timeout_s)
        if not items:
            return []
        await self._begin("Prefetch", deadline)
        keys = await routing_keys(items)

        async def open_attempt(
            member: Member, indices: Sequence[int]
        ) -> AsyncGenerator[tuple[int, PrefetchStatus | ItemFailed], None]:
            chosen = [items[index] for index in indices]
            statuses = await member.client.prefetch(chosen, timeout_s=max(deadline.left_s, 1e-3))
            for position, status in enumerate(statuses):
                if isinstance(status, PrefetchStatus):
                    status = replace(status, target=member.target)
                yield position, status

        def order(index: int) -> list[Member]:
            return sorted(self._directory.order(keys[index]), key=lambda one: one.target in avoid)

        call = self._call(len(items), order, hedged=False, timed=False, again=again)
        async with aclosing(self._run(call, len(items), open_attempt, deadline, timeout_s)) as stream:
            return in_order({index: status async for index, status in stream})

    async def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[KeyStatus]:
        """The best that any replica says of each key, in the order of ``keys``. Raises CallFailed when none
        answered."""
        if not keys:
            return []
        deadline = self._deadline(timeout_s)
        await self._begin("Lookup", deadline)
        holders = await find_holders(self._directory, keys, deadline)
        return [found[0][1] for found in holders]

    async def read_shared(
        self,
        record: LeaseRecord,
        *,
        reader: int,
        out: object = None,
        borrow: bool = False,
        confirm_later: bool = False,
        timeout_s: float | None = None,
    ) -> EncodedRows:
        """Rows that another process asked for with ``num_readers``; see ``VisionEncoderClient``. The replica
        that leased them is found by asking, their home first. Raises ItemFailed, CallFailed."""
        deadline = self._deadline(timeout_s)
        await self._begin("read_shared", deadline)

        async def read(member: Member) -> EncodedRows:
            reading = member.client.read_shared(
                record,
                reader=reader,
                out=out,
                borrow=borrow,
                confirm_later=confirm_later,
                timeout_s=max(deadline.left_s, 1e-3),
            )
            return await self._directory.run_at(member, reading)

        return await read_where_held(self._directory.order(record.content_digest or None), read)

    async def fetch(
        self,
        keys: Sequence[bytes],
        *,
        first: Sequence[str] = (),
        timeout_s: float | None = None,
        **rows: Unpack[RowsOptions],
    ) -> list[Outcome]:
        """Rows by key, in the order of ``keys``. A key says nothing of its home, so that every replica is
        asked for it first: to encode a DigestItem is cheaper where the digest is known. first: the target of
        each key's holder where that is known (``PrefetchStatus.target``), else nothing; it is asked before
        the others, if it is one of the replicas. An absent key is an ItemFailed with reason UNKNOWN_KEY.
        Raises CallFailed when no replica answered."""
        return await self._fetch_on(CallerStreams(), keys, first, timeout_s, rows)

    async def _fetch_on(
        self,
        streams: CallerStreams,
        keys: Sequence[bytes],
        first: Sequence[str],
        timeout_s: float | None,
        rows: RowsOptions,
    ) -> list[Outcome]:
        handling, deadline = RowsHandling(**rows), self._deadline(timeout_s)
        handling.check_items(len(keys))
        if not keys:
            return []
        await self._begin("Fetch", deadline)

        def open_attempt(member: Member, indices: Sequence[int]) -> AsyncGenerator[tuple[int, Outcome], None]:
            chosen = [keys[index] for index in indices]
            return member.client.fetch_for(streams, chosen, deadline, handling.only(indices))

        def fetch_at(
            places: Sequence[Sequence[Member]], opened: OpenByKey, once: bool
        ) -> AsyncGenerator[tuple[int, Outcome], None]:
            absent, hedged = [not once] * len(places), not once and may_hedge(handling)
            call = self._call(len(places), places.__getitem__, hedged=hedged, absent_moves=absent, once=once)
            return self._run(call, len(places), opened, deadline, timeout_s)

        steps = fetch_steps(self._directory, self.counts, keys, first, deadline, open_attempt, fetch_at)
        return await collect_on_loop(steps)

    # --------------------------------------------------------------------------------------------------------

    def _call(
        self,
        num_items: int,
        order: Callable[[int], Sequence[Member]],
        *,
        hedged: bool,
        absent_moves: Sequence[bool] = (),
        once: bool = False,
        timed: bool = True,
        again: bool = False,
    ) -> FleetCall:
        settings = replace(self.settings, max_attempts=1) if once else self.settings
        usual_s = self._latencies.percentile(settings.hedge_percentile)
        late_s = settings.hedge_max_s if usual_s is None else min(usual_s, settings.hedge_max_s)
        late_s = max(late_s, settings.hedge_min_s)
        return FleetCall(
            num_items,
            order,
            settings,
            self.retries,
            self.counts,
            self._latencies if timed else None,
            self._clock(),
            hedge_after_s=late_s if hedged else None,
            late_after_s=late_s,
            absent_moves=absent_moves,
            replicas=lambda: self._directory.members,
            again=again,
        )

    async def _run(
        self,
        call: FleetCall,
        num_items: int,
        open_attempt: Open[ResultT],
        deadline: Deadline,
        timeout_s: float | None,
        rescue: Rescue[ResultT] | None = None,
    ) -> AsyncGenerator[tuple[int, ResultT | ItemFailed], None]:
        given_s = self._timeout_s if timeout_s is None else timeout_s
        run = CallRun(call, num_items, self._directory, open_attempt, deadline, given_s, self._clock, rescue)
        async with aclosing(run.outcomes()) as outcomes:
            async for index, outcome in outcomes:
                self.counts.failures += isinstance(outcome, ItemFailed)
                yield index, outcome

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)

    async def _begin(self, method: str, deadline: Deadline) -> None:
        self._check_open(method)
        # What is known of the fleet after half of the time has the other half.
        await self._directory.start(deadline.left_s / 2)
        self._check_open(method)

    def _check_open(self, method: str) -> None:
        if self._directory.is_closed:
            raise CallCancelled(f"{method} was cancelled: the fleet's client is closed")
