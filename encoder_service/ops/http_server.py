"""The HTTP server of every port that speaks HTTP, and its limits.

Owns connections, requests and their bodies: how many there may be, what one peer address may have of them
(``shares``), and when they end. The applications own routes, access and errors. uvicorn runs on the service's
own event loop.

Connections: above the limit a new one displaces the one that has waited for its peer the longest. A
connection waits for its peer while it has no request in progress, or while the peer does not read the answer.
Fewer requests may be in progress than there are connections. So some connection can always be displaced, and
a health check is always answered.

Bodies: counted before they are held, until their request ends. What exceeds a limit is refused before it is
read, and the connection closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import io
import socket
import ssl
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import structlog
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from encoder_service.errors import BodyTooLarge, DeadlineExceeded, QueueFull
from encoder_service.ops.addresses import listen_tcp
from encoder_service.ops.logs import RepeatedLines
from encoder_service.ops.shares import Holder, Shares

log = structlog.get_logger(__name__)

STOP_S = 2
# For a request's line and headers, and for a peer that does not read its answer.
REQUEST_S = 30.0
# From a request's start to the end of its body.
RECEIVE_S = 30.0
# An answer that comes before the end of the body is not lost to a peer that is still sending: what it sends
# is dropped for this long before the connection closes.
LINGER_S = 1.0
RETRY_AFTER_MS = 1000
# Answered whatever else is in progress.
HEALTH_PATHS = frozenset(("/healthz", "/readyz", "/health", "/health_generate"))
# Requests in progress, of the connections.
REQUESTS_SHARE = 3 / 4
# Connections that wait to be accepted.
BACKLOG = 4096
# So many connections of a flood are taken in a millisecond: a new one has time to send its request before
# others displace it, and the event loop has time for other work.
MAX_DISPLACED_PER_MS = 8
# A pause in accepting when the process has no descriptors left.
NO_DESCRIPTORS_S = 1.0
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# SO_LINGER: on, for 0 s.
RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class HttpLimits:
    """Limits of one server. max_connections: also bounds the requests. max_body_bytes: of one request.
    max_bodies_bytes: of all requests in progress; at least max_body_bytes."""

    max_connections: int
    max_body_bytes: int
    max_bodies_bytes: int


class HttpServer:
    """Serves one application on one address. The socket listens at once. Signals are left to the service.

    connections, requests: what is in progress, and its limits."""

    def __init__(
        self, app: ASGIApp, address: str, limits: HttpLimits, tls: ssl.SSLContext | None = None
    ) -> None:
        """Raises ConfigurationError for an address that cannot be bound."""
        self._socket = listen_tcp(address, BACKLOG)
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        self.connections = Connections(limits.max_connections)
        self.requests = RequestLimits(app, limits)
        config = uvicorn.Config(
            self.requests,
            http=functools.partial(_HttpProtocol, self.connections, tls),  # type: ignore[arg-type]
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            # A caller's address is that of its connection, regardless of its headers.
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_S,
        )
        self._server = _Uvicorn(config, self.connections)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connections are accepted once this returns. Until then they wait."""
        self._socket.setblocking(False)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self.connections.end_all()
        self._socket.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn with an accept loop of its own: asyncio's accepts all waiting connections before other work."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.servers = []
        self._connections = connections
        self._accepting: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in sockets or ():
            self._accepting.append(asyncio.create_task(self._accept(listening)))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket) -> None:
        """Accepts one connection at a time, so that the loop runs other work in between."""
        loop, protocol = (
            asyncio.get_running_loop(),
            cast("type[H11Protocol]", self.config.http_protocol_class),
        )
        new = functools.partial(protocol, config=self.config, server_state=self.server_state, app_state={})
        num_displaced, has_descriptors = 0, True
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:  # with other codes: the peer has left already
                if error.errno in NO_DESCRIPTORS:
                    if has_descriptors:
                        log.warning("no connection can be accepted", error=error.strerror)
                    has_descriptors = False
                    await asyncio.sleep(NO_DESCRIPTORS_S)
                continue
            has_descriptors = True
            await loop.connect_accepted_socket(new, accepted)
            if self._connections.num_displaced >= num_displaced + MAX_DISPLACED_PER_MS:
                num_displaced = self._connections.num_displaced
                await asyncio.sleep(0.001)


class Connections:
    """The connections of one server, and which of them wait for their peers. shares: all connections, counted
    by peer. num_displaced: connections that ended because there was no room: for a newer one, or at once."""

    def __init__(self, max_connections: int) -> None:
        self.num_displaced = 0
        self.shares = Shares(max_connections)
        self._all: set[_HttpProtocol] = set()
        self.waiting: dict[_HttpProtocol, None] = {}
        """Those that have waited the longest come first."""

    def admit(self, connection: _HttpProtocol) -> bool:
        """Counts a connection until ``remove``. If there is no room, ends one that waits for its peer. False
        if none does."""
        holder = connection.holder
        while not self.shares.take(holder):
            own = (other for other in self.waiting if other.holder == holder)
            is_full = self.shares.num_used >= self.shares.limit
            displaced = next(own, next(iter(self.waiting), None) if is_full else None)
            self.num_displaced += 1
            if displaced is None:
                return False
            self.remove(displaced)
            displaced.end()
        self._all.add(connection)
        return True

    def remove(self, connection: _HttpProtocol) -> None:
        """A second call does nothing."""
        self.note(connection, waits=False)
        if connection in self._all:
            self._all.remove(connection)
            self.shares.give_back(connection.holder)

    def note(self, connection: _HttpProtocol, *, waits: bool) -> None:
        """Notes whether the connection waits for its peer from now on."""
        if not waits:
            self.waiting.pop(connection, None)
        elif connection in self._all:
            self.waiting[connection] = None

    def end_all(self) -> None:
        for connection in list(self._all):
            self.remove(connection)
            connection.end()


class _HttpProtocol(H11Protocol):
    """One connection. It is counted before its TLS handshake."""

    def __init__(self, connections: Connections, tls: ssl.SSLContext | None, **uvicorn_options: Any) -> None:
        super().__init__(**uvicorn_options)
        self.holder: Holder = ("",)
        self._connections, self._tls = connections, tls
        self._socket_transport: asyncio.Transport | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._received_early = b""
        self._ends: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket_transport = transport
        self.holder = (peer_address(transport.get_extra_info("peername")),)
        if not self._connections.admit(self):
            transport.abort()
            return
        if self._tls is not None:
            transport.pause_reading()
            self._note(waits=True)
            self._handshake = self.loop.create_task(self._start_tls(transport, self._tls))
            return
        super().connection_made(transport)
        self._note(waits=True)

    async def _start_tls(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        try:
            encrypted = await self.loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=REQUEST_S
            )
        except OSError:  # ssl.SSLError is one
            encrypted = None
        if encrypted is None or encrypted.is_closing():
            self._leave()
            transport.abort()
            return
        super().connection_made(encrypted)
        if self._received_early:  # with the end of the handshake
            self.data_received(self._received_early)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        if self.transport is not None:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport is None:
            self._received_early += data
            return
        super().data_received(data)
        self._note_state()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_state()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note_state()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_state()

    def end(self) -> None:
        """Closes the connection at once."""
        assert self._socket_transport is not None
        if self.flow is not None and self.flow.write_paused:
            # By a reset: otherwise the kernel would keep what the peer does not read.
            connection = self._socket_transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._socket_transport.abort()

    def _leave(self) -> None:
        self._note(waits=False)
        self._connections.remove(self)

    def _note_state(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        self._note(waits=is_idle or self.flow.write_paused)

    def _note(self, *, waits: bool) -> None:
        """The connection ends after REQUEST_S of waiting for its peer."""
        if waits and self._ends is None:
            self._ends = self.loop.call_later(REQUEST_S, self.end)
        elif not waits and self._ends is not None:
            self._ends.cancel()
            self._ends = None
        self._connections.note(self, waits=waits)


class RequestLimits:
    """ASGI middleware: bounds requests in progress and their bodies, in number, bytes and time.

    Receiving a body raises BodyTooLarge, QueueFull or DeadlineExceeded in the application, which answers in
    its own form. bodies: bytes held, by peer.
    """

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self._app = app
        self._max_body_bytes = limits.max_body_bytes
        self._requests = Shares(max(1, int(limits.max_connections * REQUESTS_SHARE)))
        self._lines = RepeatedLines()
        self.bodies = Shares(limits.max_bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in HEALTH_PATHS:
            await self._app(scope, receive, send)
            return
        holder = (peer_address(scope["client"]),)
        if not self._requests.take(holder):
            left_out = self._lines.due("refused")
            if left_out is not None:
                log.warning("HTTP requests are refused", peer=holder[0], path=scope["path"], **left_out)
            await self._refusal(holder)(scope, receive, send)
            return
        exchange = _Exchange(Headers(scope=scope), receive, send, self.bodies, holder, self._max_body_bytes)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            exchange.release()
            self._requests.give_back(holder)

    def _refusal(self, holder: Holder) -> PlainTextResponse:
        requests = self._requests
        text = (
            f"{requests.num_used} requests are in progress, {requests.held_by(holder)} of them from this "
            f"address; at most {requests.limit} may be, three quarters of them from one address; send it "
            "again later\n"
        )
        headers = {"Retry-After": str(RETRY_AFTER_MS // 1000), "Connection": "close"}
        return PlainTextResponse(text, 503, headers)


class _Exchange:
    """One request's body as it arrives, and the answer to it."""

    def __init__(
        self,
        headers: Headers,
        receive: Receive,
        send: Send,
        bodies: Shares,
        holder: Holder,
        max_body_bytes: int,
    ) -> None:
        self._receive, self._send = receive, send
        self._bodies, self._holder, self._max_bytes = bodies, holder, max_body_bytes
        self._stated_bytes = int(headers.get("content-length", 0))
        self._is_whole = not self._stated_bytes and "transfer-encoding" not in headers
        self._ends_s = asyncio.get_running_loop().time() + RECEIVE_S
        self._num_bytes = self._num_held = 0
        self._closes = False

    async def receive(self) -> Message:
        """Raises BodyTooLarge, QueueFull, DeadlineExceeded until the body is whole."""
        if self._is_whole:
            return await self._receive()
        self._hold(self._stated_bytes)
        try:
            async with asyncio.timeout_at(self._ends_s):
                message = await self._receive()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the body did not arrive within {RECEIVE_S} s: {self._num_bytes} bytes of "
                f"{self._stated_bytes or 'an unstated number'} did"
            ) from None
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._hold(self._num_bytes)
            self._is_whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """An answer before the end of the body ends the connection."""
        if message["type"] == "http.response.start" and not self._is_whole:
            self._closes = True
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not is_last or not self._closes:
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._drop_rest()
        await self._send({"type": "http.response.body"})

    def release(self) -> None:
        """The request has ended."""
        self._bodies.give_back(self._holder, self._num_held)
        self._num_held = 0

    def _hold(self, num_bytes: int) -> None:
        """Holds at least this many bytes of the body."""
        if num_bytes <= self._num_held:
            return
        if num_bytes > self._max_bytes:
            raise BodyTooLarge(
                f"the body has {num_bytes} bytes or more, at most {self._max_bytes} are taken",
                found_bytes=num_bytes,
                max_bytes=self._max_bytes,
            )
        bodies, holder = self._bodies, self._holder
        self.release()  # taken again as a whole, because one body alone may have the whole limit
        if not bodies.take(holder, num_bytes):
            raise QueueFull(
                f"bodies of other requests have {bodies.num_used} bytes of {bodies.limit}, those of this "
                f"address {bodies.held_by(holder)}; there is room for {max(0, bodies.room(holder))}, the "
                f"body needs {num_bytes}",
                retry_after_ms=RETRY_AFTER_MS,
                held_bytes=bodies.num_used,
                needed_bytes=num_bytes,
                max_bytes=bodies.limit,
            )
        self._num_held = num_bytes

    async def _drop_rest(self) -> None:
        while not self._is_whole:
            message = await self._receive()
            self._is_whole = message["type"] != "http.request" or not message.get("more_body", False)


async def read_body(request: Request) -> bytes:
    """The whole body, not copied. Raises what ``RequestLimits`` raises, and ClientDisconnect."""
    data = io.BytesIO()
    async for chunk in request.stream():
        data.write(chunk)
    return data.getvalue()


def peer_address(address: tuple[Any, ...] | None) -> str:
    """The IP address of a connection's peer; empty if it has none."""
    return str(address[0]) if address else ""
