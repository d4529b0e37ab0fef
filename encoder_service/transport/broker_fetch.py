"""Rows that are resident already, and what becomes of leases, over the broker's socket: one round trip, no
gRPC; and word of rows that were read without asking.

Owns the way of such a request from the broker's thread to the event loop, where store and leases are used,
and of its answer from there into the socket; and how much of it one connection may have under way. What a
request is answered with is its ``answer``'s. The broker's thread never waits for the loop: while that is
stuck, requests for rows wait, and every other one is answered.

Requests for rows and renewals are admitted, and refused beyond a bound: their callers ask elsewhere. Nobody
hears of a release that was refused, and its slot would be kept until the lease's end: releases and uses need
no admission. They gather for each connection, and the loop takes all of them in one turn; a connection that
has too many waiting is not read until then.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import structlog

from encoder_service.transport.broker_options import BrokerCounters
from encoder_service.transport.connection import Connection
from encoder_service.transport.framing import HEADER, MAX_PAYLOAD_BYTES
from vision_encoder.v1 import broker_pb2 as pb

log = structlog.get_logger(__name__)

MAX_FETCH_KEYS = 64
KEY_BYTES = 32
MAX_RELEASED = 256
"""Leases of one request."""
MAX_RENEWED = 64
MAX_USES = 128
"""Keys of one request that their reader found in a directory."""
MAX_REQUEST_BYTES = 8192
"""The loop's queue holds requests: so many bytes of each, at most."""
GATHERED_OVERHEAD_BYTES = 1024
"""That a request which waits counts beside its own bytes."""
FOUND_BYTES = 512
"""Of one image in a reply, at most: an ItemResult with a lease has about 400, a lease's failure as many. A
clip has timestamps beside, of any number: what it needs is looked at again when it is known."""

Answer: TypeAlias = Callable[[str, str, pb.BrokerRequest, pb.BrokerReply, int], bool]
"""(owner_id, namespace, request, reply, max_bytes): fills the reply in, on the event loop; whether it is to
be sent. A reply of more than max_bytes is not sent, and its leases are taken back. May fill in a failure;
what it raises is answered as INTERNAL."""


class FetchRefused(Exception):
    """This request is not taken. reason is stable."""

    def __init__(self, reason: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.retryable = retryable


@dataclass
class _Gathered:
    """Releases and uses of one connection that the loop has not taken yet, in order. Written under the desk's
    lock."""

    requests: list[pb.BrokerRequest] = field(default_factory=list)
    num_bytes: int = 0


class FetchDesk:
    """``take`` on the broker's thread; everything else on the loop's."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        counters: BrokerCounters,
        *,
        clock: Callable[[], float] = time.monotonic,
        take_back: Callable[[bytes], object] = lambda _: None,
    ) -> None:
        """clock: the broker's. take_back: called on the loop with each lease of a reply that its client does
        not get."""
        self.answer: Answer | None = None
        """None: not yet."""
        self.on_rest: Callable[[Connection], None] = lambda _: None
        """Called on the loop's thread when ``Connection.see_to`` is due."""
        self.take_back = take_back
        self._loop = loop
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: dict[Connection, tuple[int, int]] = {}
        self._gathered: dict[Connection, _Gathered] = {}

    def take(self, connection: Connection, request: pb.BrokerRequest) -> None:
        """Has the request answered on the loop. Raises FetchRefused."""
        answer = self.answer
        if answer is None:
            raise FetchRefused("NOT_READY", "the service is starting", retryable=True)
        _check(request)
        if request.WhichOneof("request") in ("release", "used"):
            self._gather(answer, connection, request)
        else:
            self._hand_over(answer, connection, request)
        connection.refund()

    def _gather(self, answer: Answer, connection: Connection, request: pb.BrokerRequest) -> None:
        """The loop's turn was asked for by the first: whatever comes after these comes later there too."""
        with self._lock:
            gathered = self._gathered.get(connection)
            is_first = gathered is None
            if gathered is None:
                gathered = self._gathered[connection] = _Gathered()
            gathered.requests.append(request)
            gathered.num_bytes += request.ByteSize() + GATHERED_OVERHEAD_BYTES
            if gathered.num_bytes > connection.limits.gathered_bytes:
                connection.is_held_back = True
        if is_first:
            try:
                self._loop.call_soon_threadsafe(self._take_gathered, answer, connection)
            except RuntimeError as error:  # the loop has ended
                self._ungather(connection)
                raise _stopping() from error

    def _ungather(self, connection: Connection) -> tuple[list[pb.BrokerRequest], bool]:
        """What waited, and whether the connection was held back for it."""
        with self._lock:
            requests = self._gathered.pop(connection).requests
            was_held_back, connection.is_held_back = connection.is_held_back, False
        return requests, was_held_back

    def _take_gathered(self, answer: Answer, connection: Connection) -> None:
        requests, was_held_back = self._ungather(connection)
        for request in requests:
            self._answer(answer, connection, request)
        if was_held_back:
            self.on_rest(connection)

    def _hand_over(self, answer: Answer, connection: Connection, request: pb.BrokerRequest) -> None:
        num_bytes = FOUND_BYTES * (len(request.fetch.keys) + len(request.renew.lease_ids))
        self._begin(connection, num_bytes)
        try:
            self._loop.call_soon_threadsafe(self._answer_admitted, answer, connection, request, num_bytes)
        except RuntimeError as error:  # the loop has ended
            self._end(connection, num_bytes)
            raise _stopping() from error

    def _begin(self, connection: Connection, num_bytes: int) -> None:
        allowed = connection.limits.requests_under_way
        with self._lock:
            num_requests, waiting_bytes = self._under_way.get(connection, (0, 0))
            # Replies that nobody reads end a connection: those under way have to find room.
            if num_requests >= allowed or waiting_bytes + num_bytes > connection.room_bytes:
                raise FetchRefused(
                    "TOO_MANY_UNDER_WAY",
                    f"{num_requests} requests with up to {waiting_bytes} bytes of replies are under way, "
                    f"{allowed} and {connection.room_bytes} are allowed",
                    retryable=True,
                )
            self._under_way[connection] = num_requests + 1, waiting_bytes + num_bytes

    def _end(self, connection: Connection, num_bytes: int) -> None:
        with self._lock:
            num_requests, waiting_bytes = self._under_way.pop(connection)
            if num_requests > 1:
                self._under_way[connection] = num_requests - 1, waiting_bytes - num_bytes

    def _answer_admitted(
        self, answer: Answer, connection: Connection, request: pb.BrokerRequest, num_bytes: int
    ) -> None:
        try:
            self._answer(answer, connection, request, num_bytes)
        finally:
            self._end(connection, num_bytes)

    def _answer(
        self, answer: Answer, connection: Connection, request: pb.BrokerRequest, num_bytes: int = 0
    ) -> None:
        """num_bytes: of room that the reply has been promised."""
        reply = pb.BrokerReply(request_id=request.request_id)
        has_rest = False
        try:
            with self._lock:
                max_bytes = self._left_bytes(connection, num_bytes)
            if answer(connection.owner_id, connection.namespace, request, reply, max_bytes):
                has_rest = self._post(connection, reply, num_bytes)
        except Exception as error:
            for item in reply.fetched.items:
                if item.HasField("result"):
                    self.take_back(item.result.host.lease_id or item.result.lease.lease_id)
            failed = pb.BrokerReply(request_id=request.request_id, failure=_failure_of(error, connection))
            has_rest = connection.post(failed, self._clock())
        if has_rest:
            self.on_rest(connection)

    def _post(self, connection: Connection, reply: pb.BrokerReply, num_bytes: int) -> bool:
        """See ``Connection.post``. A connection that ended meanwhile has its leases released in a later turn
        of the loop. Raises FetchRefused for a reply that there is no room for."""
        # With the lock held until it is posted, no request is promised the same room meanwhile.
        with self._lock:
            found, allowed = reply.ByteSize(), self._left_bytes(connection, num_bytes)
            if found > allowed and not reply.HasField("failure"):
                raise FetchRefused(
                    "TOO_MANY_UNDER_WAY",
                    f"the reply has {found} bytes, there is room for {allowed} of them",
                    retryable=True,
                )
            self._count(reply, 1)
            try:
                return connection.post(reply, self._clock())
            except BaseException:
                self._count(reply, -1)
                raise

    def _count(self, reply: pb.BrokerReply, sign: int) -> None:
        num_found = sum(item.HasField("result") for item in reply.fetched.items)
        self._counters.fetched += sign * num_found
        self._counters.fetch_misses += sign * (len(reply.fetched.items) - num_found)

    def _left_bytes(self, connection: Connection, num_bytes: int) -> int:
        """That a reply may have: of a frame, and of what the connection may have waiting beside those that
        others were promised. With the lock held."""
        _, waiting_bytes = self._under_way.get(connection, (0, num_bytes))
        left = connection.room_bytes - (waiting_bytes - num_bytes) - HEADER.size
        return max(0, min(left, MAX_PAYLOAD_BYTES))


def _failure_of(error: Exception, connection: Connection) -> pb.BrokerFailure:
    if isinstance(error, FetchRefused):
        return pb.BrokerFailure(reason=error.reason, message=str(error), retryable=error.retryable)
    log.error("a request for rows broke", client=connection.name, exc_info=error)
    return pb.BrokerFailure(reason="INTERNAL", message=f"{type(error).__name__}: {error}")


def _stopping() -> FetchRefused:
    return FetchRefused("NOT_READY", "the service is stopping", retryable=True)


def _check(request: pb.BrokerRequest) -> None:
    """Raises FetchRefused."""
    if request.ByteSize() > MAX_REQUEST_BYTES:
        raise FetchRefused(
            "INVALID_REQUEST", f"the request has {request.ByteSize()} bytes, {MAX_REQUEST_BYTES} are taken"
        )
    least, keys = 1, list(request.fetch.keys)
    match request.WhichOneof("request"):
        case "release":
            found, allowed, what = len(request.release.lease_ids), MAX_RELEASED, "leases"
        case "renew":
            found, allowed, what = len(request.renew.lease_ids), MAX_RENEWED, "leases"
        case "used":
            least, keys = 0, [use.key for use in request.used.uses]
            found, allowed, what = len(keys), MAX_USES, "uses"
        case _:
            found, allowed, what = len(keys), MAX_FETCH_KEYS, "keys"
    for key in keys:
        if len(key) != KEY_BYTES:
            raise FetchRefused("INVALID_REQUEST", f"a key has {len(key)} bytes, needs {KEY_BYTES}")
    if not least <= found <= allowed:
        raise FetchRefused(
            "INVALID_REQUEST", f"the request has {found} {what}, {least} to {allowed} are taken"
        )
