"""The asyncio client of a fleet. Its blocking face is ``client``.

Owns the calls and how they are split; one ordinary client per replica does the talking. Retries, hedges and
their budget are ``call``'s and ``budget``'s, which replica is whose home ``ring``'s, who is asked
``directory``'s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from lm_adapter.assembly import DEFAULT_MAX_ROWS_BYTES
from lm_adapter.client import DEFAULT_TIMEOUT_S
from lm_adapter.collect import collect_on_loop
from lm_adapter.errors import (
    CallCancelled,
    CallFailed,
    DeadlineExceeded,
    EncoderError,
    EncoderUnavailable,
    ItemFailed,
)
from lm_adapter.fleet.budget import RetryBudget
from lm_adapter.fleet.call import UNKNOWN_KEY, FleetCall, FleetCounts
from lm_adapter.fleet.directory import Directory, Member, ReplicaView
from lm_adapter.fleet.endpoints import Endpoints, resolver_of
from lm_adapter.fleet.fallback import Fallback, fall_back
from lm_adapter.fleet.holders import Holders, find_holders
from lm_adapter.fleet.homes import routing_keys
from lm_adapter.fleet.latency import Latencies
from lm_adapter.fleet.outcomes import moves_on
from lm_adapter.fleet.replica_client import ReplicaClient
from lm_adapter.fleet.run import CallRun, Open, Rescue
from lm_adapter.fleet.settings import FleetSettings
from lm_adapter.leases import LeaseRecord
from lm_adapter.session import Deadline, in_order, rows_or_raise
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
# On top of the channel's own: a replica that is back is found within a second, a host that vanished in
# fifteen.
_CHANNEL_OPTIONS: dict[str, int | str] = {
    "grpc.max_reconnect_backoff_ms": 1000,
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
}

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
        self._budget = RetryBudget(self.settings.retry_share, self.settings.retry_reserve_per_s)
        self._latencies = Latencies()

        def open_client(target: str) -> ReplicaClient:
            client = ReplicaClient(
                target,
                credentials=credentials,
                tls=tls,
                namespace=namespace,
                model=model,
                timeout_s=timeout_s,
                max_rows_bytes=max_rows_bytes,
                options={**_CHANNEL_OPTIONS, **(options or {})},
                **transport,
            )
            client.fingerprint = fingerprint
            return client

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
        if not self._directory.is_closed:
            await self._directory.close()

    async def wait_ready(self, timeout_s: float, *, num_replicas: int = 1) -> ServerInfo:
        """Waits until this many replicas are up; what one of them says of itself. Raises DeadlineExceeded
        with how the replicas were last."""
        deadline = Deadline(timeout_s)
        await self._begin("wait_ready", deadline)
        while (num_up := len(self._up())) < num_replicas:
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
            chosen = [items[index] for index in indices]
            return member.client.encode_for(streams, chosen, deadline, handling.only(indices))

        async def rescue(index: int, failure: ItemFailed) -> EncodedRows | ItemFailed:
            assert self._fallback is not None
            self.counts.fallbacks += 1
            return await fall_back(self._fallback, items[index], failure)

        call = self._call(
            len(items),
            lambda index: self._directory.order(keys[index]),
            hedged=_may_hedge(handling),
            absent_moves=[isinstance(item, DigestItem) for item in items],
        )
        run = self._run(
            call, len(items), open_attempt, deadline, timeout_s, rescue if self._fallback else None
        )
        async with aclosing(run) as stream:
            async for finished in stream:
                yield finished

    async def prefetch(
        self, items: Sequence[Item], *, timeout_s: float | None = None
    ) -> list[PrefetchStatus | ItemFailed]:
        """Starts encoding at each item's home and keeps the rows there; see ``VisionEncoderClient``."""
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
            for finished in enumerate(statuses):
                yield finished

        call = self._call(len(items), lambda index: self._directory.order(keys[index]), hedged=False)
        async with aclosing(self._run(call, len(items), open_attempt, deadline, timeout_s)) as stream:
            return in_order({index: status async for index, status in stream})

    async def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[KeyStatus]:
        """The best that any replica says of each key, in the order of ``keys``. Raises CallFailed when none
        answered."""
        if not keys:
            return []
        holders = await self._holders(keys, self._deadline(timeout_s))
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
        failure: EncoderError = EncoderUnavailable("no replica can be asked", reason="NO_ENDPOINTS")
        for member in self._directory.order(record.content_digest or None):
            try:
                return await member.client.read_shared(
                    record,
                    reader=reader,
                    out=out,
                    borrow=borrow,
                    confirm_later=confirm_later,
                    timeout_s=max(deadline.left_s, 1e-3),
                )
            except (ItemFailed, CallFailed) as error:
                if not moves_on(error) and error.reason != UNKNOWN_KEY:
                    raise
                failure = error
        raise failure

    async def fetch(
        self, keys: Sequence[bytes], *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> list[Outcome]:
        """Rows by key, in the order of ``keys``. A key says nothing of its home, so that every replica is
        asked for it first: to encode a DigestItem is cheaper where the digest is known. An absent key is an
        ItemFailed with reason UNKNOWN_KEY. Raises CallFailed when no replica answered."""
        return await self._fetch_on(CallerStreams(), keys, timeout_s, rows)

    async def _fetch_on(
        self, streams: CallerStreams, keys: Sequence[bytes], timeout_s: float | None, rows: RowsOptions
    ) -> list[Outcome]:
        handling, deadline = RowsHandling(**rows), self._deadline(timeout_s)
        handling.check_items(len(keys))
        if not keys:
            return []
        places = [[member for member, _ in found] for found in await self._holders(keys, deadline)]

        def open_attempt(member: Member, indices: Sequence[int]) -> AsyncGenerator[tuple[int, Outcome], None]:
            chosen = [keys[index] for index in indices]
            return member.client.fetch_for(streams, chosen, deadline, handling.only(indices))

        call = self._call(
            len(keys),
            lambda index: places[index],
            hedged=_may_hedge(handling),
            absent_moves=[True] * len(keys),
        )
        return await collect_on_loop(self._run(call, len(keys), open_attempt, deadline, timeout_s))

    # --------------------------------------------------------------------------------------------------------

    def _call(
        self,
        num_items: int,
        order: Callable[[int], Sequence[Member]],
        *,
        hedged: bool,
        absent_moves: Sequence[bool] = (),
    ) -> FleetCall:
        settings = self.settings
        usual_s = self._latencies.percentile(settings.hedge_percentile)
        late_s = settings.hedge_max_s if usual_s is None else usual_s
        return FleetCall(
            num_items,
            order,
            settings,
            self._budget,
            self.counts,
            self._latencies,
            self._clock(),
            hedge_after_s=min(max(late_s, settings.hedge_min_s), settings.hedge_max_s) if hedged else None,
            absent_moves=absent_moves,
            replicas=lambda: self._directory.members,
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

    async def _holders(self, keys: Sequence[bytes], deadline: Deadline) -> Holders:
        await self._begin("Lookup", deadline)
        return await find_holders(self._directory, keys, deadline)

    def _up(self) -> list[Member]:
        return [one for one in self._directory.members if one.is_up]

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)

    async def _begin(self, method: str, deadline: Deadline) -> None:
        self._check_open(method)
        try:
            async with asyncio.timeout(deadline.left_s):
                await self._directory.start()
        except TimeoutError as error:
            raise DeadlineExceeded("no replica was found in time") from error

    def _check_open(self, method: str) -> None:
        if self._directory.is_closed:
            raise CallCancelled(f"{method} was cancelled: the fleet's client is closed")


def _may_hedge(handling: RowsHandling) -> bool:
    """Not with a buffer of the caller's, which two answers would write to, nor with rows that stay leased."""
    return not (len(handling.out) or handling.borrow or handling.confirm_later or handling.num_readers > 1)
