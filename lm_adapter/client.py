"""The synchronous client. Its twin on asyncio is ``async_client``; what they share is ``session``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, Unpack, cast

import grpc
from google.protobuf.message import Message

from lm_adapter.assembly import DEFAULT_MAX_ROWS_BYTES
from lm_adapter.calls import Metadata, RowsCall
from lm_adapter.collect import collect, in_order
from lm_adapter.errors import DeadlineExceeded, EncoderOverloaded, EncoderUnavailable, ItemFailed
from lm_adapter.events import parsed
from lm_adapter.leases import LeaseRecord
from lm_adapter.session import RELEASE_TIMEOUT_S, Deadline, Session, portions, rows_or_raise
from lm_adapter.transport.buffers import RowsHandling, RowsOptions
from lm_adapter.transport.channel import (
    HEALTH_CHECK,
    ClientTls,
    health_is_serving,
    method_path,
    open_channel,
    stream_call,
)
from lm_adapter.transport.settings import TransportChoice, TransportOptions, TransportSettings
from lm_adapter.types import EncodedRows, Item, KeyStatus, LeaseStatus, Outcome, PrefetchStatus, ServerInfo
from vision_encoder.v1 import encoder_pb2 as pb

__all__ = ["VisionEncoderClient"]

DEFAULT_TIMEOUT_S = 60.0
READY_POLL_S = 0.05
CLOSE_FLUSH_S = 0.5
"""For leases on their way back when the client closes; those that do not make it end with its session."""

ResponseT = TypeVar("ResponseT", bound=Message)


class VisionEncoderClient:
    """A client of one service address. Thread-safe; a context manager.

    Every call has a deadline (``timeout_s``, of the call or else of the client). Nothing is retried: a
    failed item or call is the caller's to send again where ``retryable`` says that this can help, after
    ``retry_after_ms``. Two things are done again unasked: the protocol check, once per channel, after a
    server went away, and after rows that did not fit the geometry announced; and asking for an item whose
    rows could not be read out of shared memory, which comes inline in the end.

    Rows come in the best of ``transports`` that works between this process and the encoder, found out in
    the background; ``transport`` says which, and why. Options of a call about its rows (``out``, ``borrow``,
    ``confirm_later``, ``num_readers``) are ``transport.buffers.RowsOptions``.

    Calls raise the errors of ``lm_adapter.errors`` only. An item that fails is returned as ItemFailed, in
    its place; the call itself raises CallFailed.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        tls: ClientTls | None = None,
        namespace: str = "",
        model: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_rows_bytes: int = DEFAULT_MAX_ROWS_BYTES,
        options: Mapping[str, int | str] | None = None,
        **transport: Unpack[TransportOptions],
    ) -> None:
        """target: ``host:port``, ``unix:/path`` or any gRPC target. namespace: whose cache to use; model:
        empty for the server's only one. max_rows_bytes: bound of one item's rows. tls: how the channel is
        secured (or ``credentials``, in gRPC's own form). options: gRPC channel arguments on top of ours.
        transport: ``transport.settings.TransportOptions``; a way of delivery that is forced and not possible
        makes calls raise TransportUnavailable.
        """
        self._session = Session(
            target,
            namespace=namespace,
            model=model,
            max_rows_bytes=max_rows_bytes,
            settings=TransportSettings(**transport),
            send_release=self._send_release,
        )
        self._timeout_s = timeout_s
        self._closed = False
        self._info_lock = threading.Lock()
        self._channel = open_channel(target, credentials, tls, options)

    @property
    def target(self) -> str:
        return self._session.target

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def transport(self) -> TransportChoice:
        """How rows come now, and why."""
        return self._session.transports.choice

    def close(self) -> None:
        """Closes the channel; calls in progress end with CallCancelled, leases with their session. Borrowed
        rows stay readable until they are confirmed. Harmless when done twice."""
        was_closed, self._closed = self._closed, True
        if not was_closed:
            self._session.returns.flush(CLOSE_FLUSH_S)
        self._session.close()
        self._channel.close()

    def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Asks the server for its models, limits and transports. Raises ProtocolMismatch."""
        return self._ask_info(self._deadline(timeout_s))

    def wait_transport(self, timeout_s: float | None = None) -> TransportChoice:
        """Asks the server when nothing is known of it, and waits until it has been found out how rows come:
        for callers who would rather wait than have their first rows inline."""
        deadline = self._deadline(timeout_s)
        self._known_info(deadline)
        return self._session.transports.wait(deadline.left_s)

    def wait_ready(self, timeout_s: float) -> ServerInfo:
        """Waits until the server answers and its health check says SERVING; connects on the way.

        Raises DeadlineExceeded after ``timeout_s``, with what was wrong last, and ProtocolMismatch at once.
        """
        deadline = Deadline(timeout_s)
        last = "nothing answered"
        while deadline.left_s > 0:
            try:
                info = self._ask_info(deadline, wait_for_ready=True)
                if self._is_serving(deadline):
                    return info
                last = "its health check says NOT_SERVING"
            except (EncoderUnavailable, EncoderOverloaded, DeadlineExceeded) as error:
                last = error.message
            time.sleep(min(READY_POLL_S, deadline.left_s))
        raise DeadlineExceeded(f"the server at {self.target} was not ready within {timeout_s} s: {last}")

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[KeyStatus]:
        """Says of each key whether its rows are held, being encoded, or absent; in the order of ``keys``."""
        if not keys:
            return []
        deadline = self._deadline(timeout_s)
        statuses: list[KeyStatus] = []
        for request in self._session.lookup_requests(self._known_info(deadline), keys):
            response = self._unary("Lookup", request, pb.LookupResponse, deadline)
            statuses += self._session.read_lookup(request.keys, response)
        return statuses

    def encode(
        self, items: Sequence[Item], *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> list[Outcome]:
        """Rows or failure of each item, in input order. What is over the server's limits of one call goes
        in several, one after another.

        Raises CallFailed when the call failed before every item had its outcome; ``completed`` of the error
        maps the indices of those that had one.
        """
        items = self._session.resident.hashed(items)
        found = self._session.resident.items_at_once(items, timeout_s, rows)
        return found or collect(self.encode_iter(items, timeout_s=timeout_s, **rows))

    def encode_iter(
        self, items: Sequence[Item], *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> Generator[tuple[int, Outcome], None, None]:
        """Each item's index and outcome as it finishes. Nothing is sent before the first step; closing the
        generator cancels the call. Raises CallFailed after the outcomes that had arrived."""
        deadline = self._deadline(timeout_s)
        info = self._known_info(deadline)
        self._session.transports.require(deadline.left_s)
        resident = self._session.resident.of_items(info, items, RowsHandling(**rows))
        yield from resident.run(deadline, partial(self._encode, info, deadline))

    def _encode(
        self, info: ServerInfo, deadline: Deadline, items: Sequence[Item], handling: RowsHandling
    ) -> Generator[tuple[int, Outcome], None, None]:
        with self._session.pixels(info, items).publish() as pixels:
            plan = self._session.encode_plan(info, items, handling, pixels)
            yield from plan.refused.items()
            yield from self._rows(plan.calls, deadline)

    def encode_one(
        self, item: Item, *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> EncodedRows:
        """The rows of one item. Raises ItemFailed, CallFailed."""
        return rows_or_raise(self.encode([item], timeout_s=timeout_s, **rows)[0])

    def fetch(
        self, keys: Sequence[bytes], *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> list[Outcome]:
        """Rows by key, in the order of ``keys``; waits for those in flight. An absent key is an ItemFailed
        with reason UNKNOWN_KEY. Raises CallFailed as ``encode``."""
        found = self._session.resident.keys_at_once(keys, timeout_s, rows)
        return found or collect(self.fetch_iter(keys, timeout_s=timeout_s, **rows))

    def fetch_iter(
        self, keys: Sequence[bytes], *, timeout_s: float | None = None, **rows: Unpack[RowsOptions]
    ) -> Generator[tuple[int, Outcome], None, None]:
        """As ``encode_iter``, by key."""
        deadline = self._deadline(timeout_s)
        if not keys:
            return
        info = self._known_info(deadline)
        self._session.transports.require(deadline.left_s)
        resident = self._session.resident.of_keys(info, keys, RowsHandling(**rows))
        calls = partial(self._session.fetch_calls, info)
        yield from resident.run(deadline, lambda *rest: self._rows(calls(*rest), deadline))

    def read_shared(
        self,
        record: LeaseRecord,
        *,
        reader: int,
        out: object = None,
        borrow: bool = False,
        confirm_later: bool = False,
        timeout_s: float | None = None,
    ) -> EncodedRows:
        """Rows that another process asked for with ``num_readers``, by its ``rows.shared``: read out of the
        shared memory as one of the readers, the asking one being 0; fetched by key where that is not
        possible. Raises ItemFailed, CallFailed."""
        deadline = self._deadline(timeout_s)
        handling = RowsHandling.of_reader(record.num_readers, reader, out, borrow, confirm_later)
        info = self._known_info(deadline)
        if record.transport != "inline":
            self._session.transports.wait(deadline.left_s)
        rows = self._session.read_shared(info, record, handling)
        if rows is None:
            (outcome,) = self.fetch([record.key], timeout_s=max(deadline.left_s, 1e-3), **handling.alone)
            rows = rows_or_raise(outcome)
        return rows

    def prefetch(
        self, items: Sequence[Item], *, timeout_s: float | None = None
    ) -> list[PrefetchStatus | ItemFailed]:
        """Starts encoding and keeps the rows in the service. Answers once every item is admitted: its key,
        and its grid where the file's header tells it. The encode goes on without this client."""
        deadline = self._deadline(timeout_s)
        info = self._known_info(deadline)
        with self._session.pixels(info, items).publish() as pixels:
            plan = self._session.prefetch_plan(info, items, pixels)
            statuses: dict[int, PrefetchStatus | ItemFailed] = dict(plan.refused)
            for call in plan.calls:
                response = self._unary("Prefetch", call.request, pb.PrefetchResponse, deadline, call.metadata)
                statuses.update(call.read(response))
                plan.calls.extend(call.follow_ups())
        return in_order(statuses)

    def release(self, lease_ids: Sequence[bytes], *, timeout_s: float | None = None) -> list[bytes]:
        """Gives leases back; returns those that the server does not know."""
        deadline = self._deadline(timeout_s)
        unknown: list[bytes] = []
        for portion in portions(self._known_info(deadline), lease_ids) if lease_ids else ():
            request = pb.ReleaseRequest(lease_ids=portion)
            unknown += self._unary("Release", request, pb.ReleaseResponse, deadline).unknown_lease_ids
        return unknown

    def renew(
        self, lease_ids: Sequence[bytes], extend_ms: int, *, timeout_s: float | None = None
    ) -> list[LeaseStatus | ItemFailed]:
        """Extends leases; a stale one is an ItemFailed with reason STALE_LEASE, in its place."""
        deadline = self._deadline(timeout_s)
        statuses: list[LeaseStatus | ItemFailed] = []
        for portion in portions(self._known_info(deadline), lease_ids) if lease_ids else ():
            request = pb.RenewRequest(lease_ids=portion, extend_ms=extend_ms)
            response = self._session.transports.renew(request) or self._unary(
                "Renew", request, pb.RenewResponse, deadline
            )
            statuses += self._session.read_renew(portion, response)
        return statuses

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)

    def _known_info(self, deadline: Deadline) -> ServerInfo:
        """What is known of the server; asks once when nothing is."""
        info = self._session.info
        if info is not None:
            return info
        if not self._info_lock.acquire(timeout=deadline.left_s):
            raise DeadlineExceeded(f"the server at {self.target} did not say what it is in time")
        try:
            return self._session.info or self._ask_info(deadline)
        finally:
            self._info_lock.release()

    def _ask_info(self, deadline: Deadline, *, wait_for_ready: bool = False) -> ServerInfo:
        response = self._unary(
            "GetServerInfo",
            self._session.info_request(),
            pb.GetServerInfoResponse,
            deadline,
            wait_for_ready=wait_for_ready,
        )
        return self._session.accept_info(response)

    def _is_serving(self, deadline: Deadline) -> bool:
        """What grpc.health.v1 says; a server without it serves when it answers at all."""
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(HEALTH_CHECK)
        try:
            return health_is_serving(check(b"", timeout=deadline.left_s))
        except grpc.RpcError as error:
            if cast("grpc.Call", error).code() is grpc.StatusCode.UNIMPLEMENTED:
                return True
            raise self._session.failed(error, "Health.Check", closed=self._closed) from error

    def _unary(
        self,
        method: str,
        request: Message,
        response_type: type[ResponseT],
        deadline: Deadline,
        metadata: Metadata = (),
        *,
        wait_for_ready: bool = False,
    ) -> ResponseT:
        self._check_open(method)
        metadata = self._session.bearer + metadata
        call = self._channel.unary_unary(
            method_path(method),
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_type.FromString,
        )
        try:
            response, ended = call.with_call(
                request, timeout=deadline.left_s, metadata=metadata, wait_for_ready=wait_for_ready
            )
            self._session.note_server(ended.trailing_metadata())
            return response
        except grpc.RpcError as error:
            raise self._session.failed(error, method, closed=self._closed) from error
        except ValueError as error:
            self._raise_if_closed_meanwhile(method, error)
            raise

    def _send_release(self, request: pb.ReleaseRequest, done: Callable[[], None]) -> None:
        start = self._channel.unary_unary(
            method_path("Release"),
            request_serializer=pb.ReleaseRequest.SerializeToString,
            response_deserializer=pb.ReleaseResponse.FromString,
        )
        call = start.future(request, timeout=RELEASE_TIMEOUT_S, metadata=self._session.bearer)
        call.add_done_callback(lambda _: done())

    def _rows(
        self, calls: Sequence[RowsCall], deadline: Deadline
    ) -> Generator[tuple[int, Outcome], None, None]:
        """The calls one after another, each with those for what could not be read out of shared memory."""
        for call in calls:
            following: RowsCall | None = call
            while following is not None:
                yield from self._stream(following, deadline)
                following = following.follow_up()

    def _stream(self, call: RowsCall, deadline: Deadline) -> Generator[tuple[int, Outcome], None, None]:
        self._check_open(call.method)
        request = call.request.SerializeToString()
        metadata, stream = self._session.bearer + call.metadata, None
        by_grpc = stream_call(self._channel, call.method, request, metadata)
        sent = (call.calls_path, call.method, request, deadline.left_s, metadata)
        try:
            stream = self._session.local.begin(*sent, by_grpc)
            for message in stream:
                finished = call.feed(parsed(message))
                if finished is not None:
                    yield finished
            call.finish(stream.trailing_metadata())
        except grpc.RpcError as error:
            failure = call.failed(error, closed=self._closed)
            if not call.absorbs(failure):
                raise failure from error
        except ValueError as error:
            self._raise_if_closed_meanwhile(call.method, error)
            raise
        finally:
            if stream is not None:
                stream.cancel()

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise self._session.closed_under(method)

    def _raise_if_closed_meanwhile(self, method: str, error: ValueError) -> None:
        """gRPC says ValueError when another thread closed the channel since ``_check_open``."""
        if self._closed:
            raise self._session.closed_under(method) from error
