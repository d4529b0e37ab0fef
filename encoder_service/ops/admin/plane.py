"""The admin port of one service: its socket, TLS and token, and the start of its parts.

The port answers before the model is loaded; figures and the playground follow with the pipeline. Liveness and
readiness need no token, because probes have none. If a token is set, everything else requires it, as
``Authorization: Bearer`` or as the password of Basic authentication, which browsers prompt for. A
state-changing request from a page of another origin is refused, with or without a token, because the browser
would add the user's credentials to it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import socket
import ssl
import urllib.parse
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from encoder_service.broker import Broker
from encoder_service.config import Settings
from encoder_service.engine.device import DeviceEngine
from encoder_service.errors import ConfigurationError
from encoder_service.ops.admin.app import Readiness, create_admin_app
from encoder_service.ops.admin.gauges import register_broker, register_gauges
from encoder_service.ops.admin.playground import Playground
from encoder_service.ops.admin.saturation import Saturation
from encoder_service.ops.descriptors import Listener
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.tls import certificate_files, server_context
from encoder_service.pipeline import Pipeline

SAMPLE_EVERY_S = 1.0
STOP_S = 2
REQUEST_S = 30.0
"""For a request's line and headers."""
OPEN_PATHS = frozenset(("/healthz", "/readyz"))
SAFE_METHODS = frozenset(("GET", "HEAD"))
CHALLENGE = {"WWW-Authenticate": 'Basic realm="vision-encoder admin", charset="UTF-8"'}


class AdminPlane:
    """The admin port. Call ``open``, ``attach``, ``stop`` in that order. address: host:port, or empty."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.address = ""
        self._settings, self._metrics = settings, metrics
        self._playground = Playground(settings.max_encoded_bytes) if settings.playground else None
        self._sampling: asyncio.Task[None] | None = None
        self._server: AdminServer | None = None

    def open(self, readiness: Readiness) -> None:
        """Binds the settings' admin address, if there is one, and starts to answer. Clients need no
        certificate, because probes have none. Raises ConfigurationError."""
        settings = self._settings
        if not settings.admin_listen:
            return
        app = create_admin_app(readiness, self._metrics, self._playground)
        token = "" if settings.admin_token is None else settings.admin_token.get_secret_value()
        tls = None
        if settings.admin_tls and settings.tls_cert is not None and settings.tls_key is not None:
            pair = settings.tls_cert, settings.tls_key
            tls = server_context(certificate_files(*pair), *pair)
        self._server = AdminServer(
            AdminGuard(app, token), settings.admin_listen, settings.max_connections, tls
        )
        self.address = self._server.address
        self._server.start()

    def attach(self, pipeline: Pipeline, engine: DeviceEngine, broker: Broker | None) -> None:
        """Registers the metrics of the complete service."""
        register_gauges(self._metrics, pipeline, engine)
        if broker is not None:
            register_broker(self._metrics, broker, pipeline.store)
        saturation = Saturation(self._metrics, pipeline, engine)
        self._sampling = asyncio.get_running_loop().create_task(self._sample(saturation))
        if self._playground is not None:
            self._playground.attach(pipeline)

    async def stop(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
        if self._server is not None:
            await self._server.stop()

    async def _sample(self, saturation: Saturation) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            saturation.sample()


class AdminServer:
    """uvicorn on the service's own event loop. The socket is bound at once. The service handles signals."""

    def __init__(
        self, app: ASGIApp, address: str, max_connections: int, tls: ssl.SSLContext | None = None
    ) -> None:
        """max_connections: further ones are closed on accept. Raises ConfigurationError for an address that
        cannot be bound."""
        self._socket = bind_tcp(address)
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        config = uvicorn.Config(
            app,
            http=_HttpProtocol,
            limit_concurrency=max_connections + 1,
            log_config=None,
            access_log=False,
            lifespan="off",
            # A caller's address is that of its connection, regardless of its headers.
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_S,
        )
        if tls is not None:
            config.load()
            config.ssl = tls
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


class _HttpProtocol(H11Protocol):
    """uvicorn's own limits are applied to requests only, so connections without one would be unlimited in
    number and in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            transport.abort()
        else:
            self._expect_request()

    def _expect_request(self) -> None:
        self.loop.call_later(REQUEST_S, self._end_without_request, self.cycle)

    def _end_without_request(self, last: Any) -> None:
        """last: the request before. Ends a connection on which no other has begun since it was answered."""
        if self.transport.is_closing():
            return
        if self.cycle is last and (last is None or last.response_complete):
            self.transport.abort()
        else:
            self._expect_request()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind_tcp(address: str) -> socket.socket:
    """A bound TCP socket. Raises ConfigurationError for an address that cannot be bound."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = Listener(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, int(port)))
    except OSError as error:
        bound.close()
        raise ConfigurationError(f"cannot listen on {address}: {error.strerror or error}") from None
    return bound


class AdminGuard:
    """ASGI middleware that checks the token and the origin. token: empty if none is required."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._digest = digest(token) if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._digest is not None and not hmac.compare_digest(digest(offered_token(headers)), self._digest):
            await PlainTextResponse("a token is needed\n", 401, CHALLENGE)(scope, receive, send)
            return
        is_safe = scope["type"] == "http" and scope["method"] in SAFE_METHODS
        if not is_safe and is_foreign(headers):
            await PlainTextResponse("sent by a page of another origin\n", 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def offered_token(headers: Headers) -> str:
    """The request's token; empty if it has none."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def is_foreign(headers: Headers) -> bool:
    """Whether a browser states that a page of another origin sends this. Other clients send no origin."""
    origin = headers.get("origin")
    return origin is not None and urllib.parse.urlsplit(origin).netloc != headers.get("host", "")


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
