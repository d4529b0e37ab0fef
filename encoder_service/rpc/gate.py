"""What every call passes before its handler: permits, token, its message.

Owns the order, which is that of what it costs: whether there is room for the call and whether its caller has
any business here is decided before the message is received, let alone parsed. For that, every method is
registered as one that streams requests, which is the same on the wire, and the gate takes the one message.
Health and reflection do not come through here: both answer without a token.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import urllib.parse
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from encoder_service.errors import DeadlineExceeded, InvalidRequest, VisionEncoderError
from encoder_service.metrics import Metrics
from encoder_service.rpc import observed
from encoder_service.rpc.auth import Access, bearer_token
from encoder_service.rpc.status import abort, failure_of, status_of
from encoder_service.scheduler.admission import CallPermits
from encoder_service.tokens import NamespaceTokens

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]


class Receiving:
    """Calls whose message is on its way, each for ``receive_s`` at most: one timer for all, since all have
    the same time and nearly none takes it."""

    def __init__(self, receive_s: float) -> None:
        self._receive_s = receive_s
        self._ends_s: dict[asyncio.Task[Any], float] = {}  # in order of their ends
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def of(self, context: Context) -> object:
        """What the context reads. Raises DeadlineExceeded when its time is up."""
        task = asyncio.current_task()
        assert task is not None
        loop = task.get_loop()
        self._ends_s[task] = loop.time() + self._receive_s
        if self._timer is None:
            self._timer = loop.call_later(self._receive_s, self._end_late, loop)
        try:
            return await context.read()
        except asyncio.CancelledError:
            if task in self._late and not task.uncancel():
                text = f"the request did not arrive within {self._receive_s} s"
                raise DeadlineExceeded(text) from None
            raise
        finally:
            del self._ends_s[task]
            self._late.discard(task)

    def _end_late(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now_s = loop.time()
        for task, ends_s in self._ends_s.items():
            if task in self._late:
                continue
            if ends_s > now_s:
                self._timer = loop.call_at(ends_s, self._end_late, loop)
                return
            self._late.add(task)
            task.cancel()


class CallGate:
    """One for the server. receive_s: a call's message has to be there within that time."""

    def __init__(
        self,
        *,
        access: Access | None = None,
        permits: CallPermits | None = None,
        receive_s: float = 30.0,
        metrics: Metrics | None = None,
    ) -> None:
        self._access = Access(NamespaceTokens()) if access is None else access
        self.permits = CallPermits(1 << 20) if permits is None else permits
        self._receiving = Receiving(receive_s)
        self._metrics = metrics
        self.refused: Counter[str] = Counter()

    def passed(
        self,
        method: str,
        behaviour: Callable[[Request, Context], Awaitable[Response]],
        request_type: type[Request],
    ) -> Callable[[object, Context], Awaitable[Response]]:
        """The handler of a call, reached once everything about it is in order; the call is counted until it
        ends."""
        has_namespace = "namespace" in request_type.DESCRIPTOR.fields_by_name

        async def handle(_: object, context: Context) -> Response:
            call, host, permits = observed.this_call(method), None, self.permits
            try:
                try:
                    host = permits.enter(peer_host(context.peer()))
                    token = bearer_token(call.metadata or context.invocation_metadata() or ())
                    self._access.check_caller(token)
                    data = await self._receive(context)
                    call.message_bytes = len(data)
                    request = parsed(data, request_type)
                    if has_namespace:
                        self._access.check_namespace(token, request.namespace)  # type: ignore[attr-defined]
                except VisionEncoderError as error:
                    await self._refuse(method, context, error)
                return await behaviour(request, context)
            finally:
                if host is not None:
                    permits.leave(host)

        return handle

    async def _receive(self, context: Context) -> bytes:
        """The call's one message. Raises InvalidRequest, DeadlineExceeded."""
        data = await self._receiving.of(context)
        if not isinstance(data, bytes):
            raise InvalidRequest("the call ended before its request")
        return data

    async def _refuse(self, method: str, context: Context, error: VisionEncoderError) -> NoReturn:
        call = observed.this_call(method)
        self.refused[error.reason] += 1
        if self._metrics is not None:
            self._metrics.count(self._metrics.requests, method, status_of(error).name)
            call.refused(self._metrics, failure_of(error), status_of(error).name)
        await abort(context, error, call.trailers())


def parsed(data: bytes, request_type: type[Request]) -> Request:
    """Raises InvalidRequest."""
    try:
        return request_type.FromString(data)
    except DecodeError:
        raise InvalidRequest(
            f"{len(data)} bytes are no {request_type.DESCRIPTOR.full_name}", found_bytes=len(data)
        ) from None


@functools.lru_cache(maxsize=1024)
def peer_host(peer: str) -> str:
    """Which host a peer as gRPC names it (``ipv4:1.2.3.4:5``, ``ipv6:%5B::1%5D:5``) counts as: its IPv4
    address, or its IPv6 network of 64 bits, all of which one host may use. Empty for unix sockets, whose
    callers are the files' business, and for what cannot be read."""
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    try:
        address = ipaddress.ip_address(rest.rpartition(":")[0].strip("[]").partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        if mapped is not None:
            return str(mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
