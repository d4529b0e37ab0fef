"""The asyncio client, on ``grpc.aio``. Its twin is ``client``; what they share is ``session``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message

from lm_adapter.assembly import DEFAULT_MAX_ROWS_BYTES
from lm_adapter.calls import Metadata
from lm_adapter.client import CLOSE_FLUSH_S, DEFAULT_TIMEOUT_S, READY_POLL_S
from lm_adapter.collect import in_order
from lm_adapter.errors import DeadlineExceeded, EncoderOverloaded, EncoderUnavailable, ItemFailed
from lm_adapter.leases import LeaseRecord
from lm_adapter.loop_rows import LoopLine, LoopRows
from lm_adapter.resident_call import Ordinary, ResidentCall
from lm_adapter.session import RELEASE_TIMEOUT_S, Deadline, Session, portions, rows_or_raise
from lm_adapter.transport.buffers import RowsHandling, RowsOptions
from lm_adapter.transport.channel import (
    HEALTH_CHECK,
    ClientTls,
    FollowedTls,
    health_is_serving,
    method_path,
    open_aio_channel,
)
from lm_adapter.transport.off_loop import CallerStreams, LoopReleases
from lm_adapter.transport.settings import TransportChoice, TransportOptions, TransportSettings
from lm_adapter.types import EncodedRows, Item, KeyStatus, LeaseStatus, Outcome, PrefetchStatus, ServerInfo
from vision_encoder.v1 import encoder_pb2 as pb

__all__ = ["AsyncVisionEncoderClient"]

ResponseT = TypeVar("ResponseT", bound=Message)


class AsyncVisionEncoderClient:
    """``VisionEncoderClient`` for asyncio: the same arguments, answers, deadlines and errors.

    One per event loop, made inside it; an async context manager. Cancelling a task cancels its call. Large
    copies of rows in shared memory run on a thread, so that the loop goes on; on whichever thread, a copy on
    a GPU runs on the stream that was current for the caller when its call began.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        tls: ClientTls | FollowedTls | None = None,
        namespace: str = "",
        model: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_rows_bytes: int = DEFAULT_MAX_ROWS_BYTES,
        options: Mapping[str, int | str] | None = None,
        **transport: Unpack[TransportOptions],
    ) -> None:
        """See ``VisionEncoderClient``."""
        self._releases = LoopReleases(lambda: self._channel, RELEASE_TIMEOUT_S, lambda: self._session.bearer)
        self._session = Session(
            target,
            namespace=namespace,
            model=model,
            max_rows_bytes=max_rows_bytes,
            settings=TransportSettings(**transport),
            send_release=self._releases.send,
        )
        self._session.returns.soon = self._releases.soon
        self._timeout_s = timeout_s
        self._info_lock = asyncio.Lock()
        self._channel = open_aio_channel(target, credentials, tls, options)
        self._line = LoopLine(self._session, self._channel)

    @property
    def target(self) -> str:
        return self._session.target

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
    def transport(self) -> TransportChoice:
        """How rows come now, and why."""
        return self._session.transports.choice

    async def close(self) -> None:
        """Closes the channel; calls in progress end with CallCancelled, leases with their session. Harmless
        when done twice."""
        was_closed, self._line.is_closed = self._line.is_closed, True
        if not was_closed:
            await asyncio.to_thread(self._session.returns.flush, CLOSE_FLUSH_S)
        await asyncio.to_thread(self._session.close)
        self._releases.cancel()
        await self._channel.close()

    async def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """See ``VisionEncoderClient``."""
        return await self._ask_info(self._deadline(timeout_s))

    async def wait_transport(self, timeout_s: float | None = None) -> TransportChoice:
        """See ``VisionEncoderClient``."""
        deadline = self._deadline(timeout_s)
        await self._known_info(deadline)
        return await asyncio.to_thread(self._session.transports.wait, deadline.left_s)

    async def wait_ready(self, timeout_s: float) -> ServerInfo:
        """See ``VisionEncoderClient``."""
        deadline = Deadline(timeout_s)
        last = "nothing answered"
        while deadline.left_s > 0:
            try:
                info = await self._ask_info(deadline, wait_for_ready=True)
                if await self._is_serving(deadline):
                    return info
                last = "its health check says NOT_SERVING"
            except (EncoderUnavailable, EncoderOverloaded, DeadlineExceeded) as error:
                last = error.message
            await asyncio.sleep(min(READY_POLL_S, deadline.left_s))
        raise DeadlineExceeded(f"the server at {self.target} was not ready within {timeout_s} s: {last}")

    async def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[KeyStatus]:
        """Says of each key whether its rows are held, being encoded, or absent; in the order of ``keys``."""
        if not keys:
            return []
        deadline = self._deadline(timeout_s)
        statuses: list[KeyStatus] = []
        for request in self._session.lookup_requests(await self._known_info(deadline), keys):
            response = await self._unary("Lookup", request, pb.LookupResponse, deadline)
            statuses += self._session.read_lookup(request.keys, response)
        return statuses

    async def encode(
        self, items: Sequence[Item], *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> list[Outcome]:
        """See ``VisionEncoderClient``."""
        deadline, streams = self._deadline(timeout_s), CallerStreams()
        resident, ordinary = await self._encoding(items, deadline, streams, rows)
        return await resident.collect_on_loop(deadline, streams, ordinary)

    async def encode_iter(
        self, items: Sequence[Item], *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        """Each item's index and outcome as it finishes. Nothing is sent before the first step; closing the
        generator (``contextlib.aclosing``) cancels the call. Raises CallFailed after the outcomes that had
        arrived."""
        deadline, streams = self._deadline(timeout_s), CallerStreams()
        resident, ordinary = await self._encoding(items, deadline, streams, rows)
        async with aclosing(resident.run_on_loop(deadline, streams, ordinary)) as stream:
            async for finished in stream:
                yield finished

    async def _encoding(
        self, items: Sequence[Item], deadline: Deadline, streams: CallerStreams, rows: RowsOptions
    ) -> tuple[ResidentCall[Item], Ordinary[Item]]:
        """A caller's Encode, begun: what may be resident, and how the rest goes."""
        info = await self._known_info(deadline)
        await self._require_transport(deadline)
        resident = await self._session.resident.of_items_on_loop(info, items, RowsHandling(**rows), streams)
        return resident, partial(self._encode, info, deadline, streams)

    async def _encode(
        self,
        info: ServerInfo,
        deadline: Deadline,
        streams: CallerStreams,
        items: Sequence[Item],
        handling: RowsHandling,
    ) -> LoopRows:
        pixels = await self._session.pixels(info, items).publish_off_loop()
        try:
            plan = self._session.encode_plan(info, items, handling, pixels)
        except BaseException:
            pixels.close()
            raise
        return LoopRows(self._line, plan.calls, deadline, streams, plan.refused, pixels)

    async def encode_one(
        self, item: Item, *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> EncodedRows:
        """The rows of one item. Raises ItemFailed, CallFailed."""
        return rows_or_raise((await self.encode([item], timeout_s=timeout_s, **rows))[0])

    async def fetch(
        self, keys: Sequence[bytes], *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> list[Outcome]:
        """Rows by key, in the order of ``keys``; waits for those in flight. An absent key is an ItemFailed
        with reason UNKNOWN_KEY. Raises CallFailed as ``encode``."""
        deadline, streams = self._deadline(timeout_s), CallerStreams()
        if not keys:
            return []
        resident, ordinary = await self._fetching(keys, deadline, streams, rows)
        return await resident.collect_on_loop(deadline, streams, ordinary)

    async def fetch_iter(
        self, keys: Sequence[bytes], *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> AsyncGenerator[tuple[int, Outcome], None]:
        """As ``encode_iter``, by key."""
        deadline, streams = self._deadline(timeout_s), CallerStreams()
        if not keys:
            return
        resident, ordinary = await self._fetching(keys, deadline, streams, rows)
        async with aclosing(resident.run_on_loop(deadline, streams, ordinary)) as stream:
            async for finished in stream:
                yield finished

    async def _fetching(
        self, keys: Sequence[bytes], deadline: Deadline, streams: CallerStreams, rows: RowsOptions
    ) -> tuple[ResidentCall[bytes], Ordinary[bytes]]:
        """As ``_encoding``."""
        info = await self._known_info(deadline)
        await self._require_transport(deadline)
        resident = self._session.resident.of_keys(info, keys, RowsHandling(**rows))
        return resident, partial(self._fetch, info, deadline, streams)

    async def _fetch(
        self,
        info: ServerInfo,
        deadline: Deadline,
        streams: CallerStreams,
        keys: Sequence[bytes],
        handling: RowsHandling,
    ) -> LoopRows:
        calls = self._session.fetch_calls(info, keys, handling)
        return LoopRows(self._line, calls, deadline, streams)

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
        """Rows that another process asked for with ``num_readers``; see ``VisionEncoderClient``."""
        deadline, streams = self._deadline(timeout_s), CallerStreams()
        handling = RowsHandling.of_reader(record.num_readers, reader, out, borrow, confirm_later)
        info = await self._known_info(deadline)
        if record.transport != "inline":
            await asyncio.to_thread(self._session.transports.wait, deadline.left_s)
        rows = await streams.run(
            0 if borrow else record.rows_bytes,
            partial(self._session.read_shared, info, record, handling),
        )
        if rows is None:
            (outcome,) = await self.fetch(
                [record.key], timeout_s=max(deadline.left_s, 1e-3), **handling.alone
            )
            rows = rows_or_raise(outcome)
        return rows

    async def prefetch(
        self, items: Sequence[Item], *, timeout_s: float | None = None
    ) -> list[PrefetchStatus | ItemFailed]:
        """See ``VisionEncoderClient``."""
        deadline = self._deadline(timeout_s)
        info = await self._known_info(deadline)
        with await self._session.pixels(info, items).publish_off_loop() as pixels:
            plan = self._session.prefetch_plan(info, items, pixels)
            statuses: dict[int, PrefetchStatus | ItemFailed] = dict(plan.refused)
            for call in plan.calls:
                response = await self._unary(
                    "Prefetch", call.request, pb.PrefetchResponse, deadline, call.metadata
                )
                statuses.update(call.read(response))
                plan.calls.extend(call.follow_ups())
        return in_order(statuses)

    async def release(self, lease_ids: Sequence[bytes], *, timeout_s: float | None = None) -> list[bytes]:
        """Gives leases back; returns those that the server does not know."""
        deadline = self._deadline(timeout_s)
        unknown: list[bytes] = []
        for portion in portions(await self._known_info(deadline), lease_ids) if lease_ids else ():
            request = pb.ReleaseRequest(lease_ids=portion)
            response = await self._unary("Release", request, pb.ReleaseResponse, deadline)
            unknown += response.unknown_lease_ids
        return unknown

    async def renew(
        self, lease_ids: Sequence[bytes], extend_ms: int, *, timeout_s: float | None = None
    ) -> list[LeaseStatus | ItemFailed]:
        """Extends leases; a stale one is an ItemFailed with reason STALE_LEASE, in its place."""
        deadline = self._deadline(timeout_s)
        statuses: list[LeaseStatus | ItemFailed] = []
        for portion in portions(await self._known_info(deadline), lease_ids) if lease_ids else ():
            request = pb.RenewRequest(lease_ids=portion, extend_ms=extend_ms)
            response = await asyncio.to_thread(self._session.transports.renew, request)
            response = response or await self._unary("Renew", request, pb.RenewResponse, deadline)
            statuses += self._session.read_renew(portion, response)
        return statuses

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)

    async def _known_info(self, deadline: Deadline) -> ServerInfo:
        """What is known of the server; asks once when nothing is."""
        self._releases.loop = asyncio.get_running_loop()
        info = self._session.info
        if info is not None:
            return info
        try:
            async with asyncio.timeout(deadline.left_s), self._info_lock:
                return self._session.info or await self._ask_info(deadline)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the server at {self.target} did not say what it is in time") from error

    async def _ask_info(self, deadline: Deadline, *, wait_for_ready: bool = False) -> ServerInfo:
        response = await self._unary(
            "GetServerInfo",
            self._session.info_request(),
            pb.GetServerInfoResponse,
            deadline,
            wait_for_ready=wait_for_ready,
        )
        return self._session.accept_info(response)

    async def _is_serving(self, deadline: Deadline) -> bool:
        """What grpc.health.v1 says; a server without it serves when it answers at all."""
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(HEALTH_CHECK)
        try:
            return health_is_serving(await check(b"", timeout=deadline.left_s))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return True
            raise self._session.failed(error, "Health.Check", closed=self._line.is_closed) from error

    async def _unary(
        self,
        method: str,
        request: Message,
        response_type: type[ResponseT],
        deadline: Deadline,
        metadata: Metadata = (),
        *,
        wait_for_ready: bool = False,
    ) -> ResponseT:
        self._line.check_open(method)
        call = self._channel.unary_unary(
            method_path(method),
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_type.FromString,
        )
        try:
            started = call(
                request,
                timeout=deadline.left_s,
                metadata=self._session.bearer + metadata,
                wait_for_ready=wait_for_ready,
            )
            response = await started
            self._session.note_server(await started.trailing_metadata())
            return response
        except grpc.RpcError as error:
            raise self._session.failed(error, method, closed=self._line.is_closed) from error
        except asyncio.CancelledError as error:
            self._line.raise_if_closed_under(method, error)
            raise

    async def _require_transport(self, deadline: Deadline) -> None:
        if not self._session.transports.ready():
            await asyncio.to_thread(self._session.transports.require, deadline.left_s)
