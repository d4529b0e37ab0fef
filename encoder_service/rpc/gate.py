"""What every call passes before its handler: permits, token, its message.

Owns the order, which is that of what it costs: whether there is room for the call and whether its caller has
any business here is decided before the message is received, let alone parsed. For that, every method is
registered as one that streams requests, which is the same on the wire, and the gate takes the one message.
Health and reflection do not come through here: both answer without a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
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
Event = TypeVar("Event")
Context = grpc.aio.ServicerContext[Any, Any]


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
        self._receive_s = receive_s
        self._metrics = metrics

    def unary(
        self,
        method: str,
        behaviour: Callable[[Request, Context], Awaitable[Response]],
        request_type: type[Request],
    ) -> Callable[[object, Context], Awaitable[Response]]:
        """The handler of a call with one answer."""

        async def handle(_: object, context: Context) -> Response:
            async with self._passed(method, context, request_type) as request:
                return await behaviour(request, context)

        return handle

    def stream(
        self,
        method: str,
        behaviour: Callable[[Request, Context], AsyncIterator[Event]],
        request_type: type[Request],
    ) -> Callable[[object, Context], AsyncIterator[Event]]:
        """The handler of a call with a stream of answers."""

        async def handle(_: object, context: Context) -> AsyncIterator[Event]:
            async with (
                self._passed(method, context, request_type) as request,
                contextlib.aclosing(behaviour(request, context)) as events,  # type: ignore[type-var]
            ):
                async for event in events:
                    yield event

        return handle

    @contextlib.asynccontextmanager
    async def _passed(
        self, method: str, context: Context, request_type: type[Request]
    ) -> AsyncIterator[Request]:
        """The call's request, once everything about the call is in order; counted until the block ends."""
        with contextlib.ExitStack() as counted:
            try:
                counted.enter_context(self.permits.call(peer_host(context.peer())))
                token = bearer_token(context)
                self._access.check_caller(token)
                request = await self._receive(context, request_type)
                if "namespace" in request.DESCRIPTOR.fields_by_name:
                    self._access.check_namespace(token, request.namespace)  # type: ignore[attr-defined]
            except VisionEncoderError as error:
                await self._refuse(method, context, error)
            yield request

    async def _receive(self, context: Context, request_type: type[Request]) -> Request:
        """Raises InvalidRequest, DeadlineExceeded."""
        try:
            async with asyncio.timeout(self._receive_s):
                data = await context.read()
        except TimeoutError:
            raise DeadlineExceeded(f"the request did not arrive within {self._receive_s} s") from None
        if not isinstance(data, bytes):
            raise InvalidRequest("the call ended before its request")
        try:
            return request_type.FromString(data)
        except DecodeError:
            raise InvalidRequest(
                f"{len(data)} bytes are no {request_type.DESCRIPTOR.full_name}", found_bytes=len(data)
            ) from None

    async def _refuse(self, method: str, context: Context, error: VisionEncoderError) -> NoReturn:
        call = observed.this_call(method)
        if self._metrics is not None:
            self._metrics.requests.labels(method, status_of(error).name).inc()
            call.refused(self._metrics, failure_of(error), status_of(error).name)
        await abort(context, error, call.trailers())


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
