"""The admin port of one service: its access rules, and the start of its parts.

The port answers before the model is loaded; figures and the playground follow with the pipeline. Liveness and
readiness are open to everybody. Everything else answers to known hosts only (``is_known_host``). It requires
the token if one is set, as ``Authorization: Bearer`` or as the password of Basic authentication, which
browsers prompt for. A state-changing request from a page of another origin is refused, with or without a
token, because the browser would add the user's credentials to it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from encoder_service.admin.app import Readiness, create_admin_app
from encoder_service.admin.gauges import register_broker, register_gauges
from encoder_service.admin.saturation import Saturation
from encoder_service.broker import Broker
from encoder_service.config import Settings
from encoder_service.engine.device import DeviceEngine
from encoder_service.errors import PermissionDenied, Unauthenticated, VisionEncoderError
from encoder_service.ops.http_requests import KNOWN_HOSTS, is_foreign, is_known_host, own_names
from encoder_service.ops.http_server import HttpLimits, HttpServer
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.tls import server_context
from encoder_service.pipeline import Pipeline
from encoder_service.rpc.event_loop import ServiceLoop
from encoder_service.rpc.observed import Call
from encoder_service.rpc.status import failure_of, status_of

SAMPLE_EVERY_S = 1.0
# Around a file in the form of the playground.
FORM_BYTES = 1 << 12
# Bodies of the largest size that are held at a time.
NUM_BODIES = 4
OPEN_PATHS = frozenset(("/healthz", "/readyz"))
SAFE_METHODS = frozenset(("GET", "HEAD"))
UNKNOWN_HOST = f"the admin plane does not answer to this host name: {KNOWN_HOSTS}"
CHALLENGE = {"WWW-Authenticate": 'Basic realm="vision-encoder admin", charset="UTF-8"'}


class AdminPlane:
    """The admin port. Call ``open``, ``attach``, ``stop`` in that order. address: host:port, or empty."""

    def __init__(self, settings: Settings, metrics: Metrics, playground: ASGIApp | None = None) -> None:
        """playground: the page's, see ``create_admin_app``."""
        self.address = ""
        self._settings, self._metrics, self._playground = settings, metrics, playground
        self._sampling: asyncio.Task[None] | None = None
        self._server: HttpServer | None = None

    def open(self, readiness: Readiness) -> None:
        """Binds the settings' admin address, if there is one, and starts to answer. Clients need no
        certificate, because probes have none. Raises ConfigurationError."""
        settings = self._settings
        if not settings.admin_listen:
            return
        max_file_bytes = 0 if self._playground is None else settings.max_encoded_bytes
        app = create_admin_app(readiness, self._metrics, self._playground, max_file_bytes)
        token = "" if settings.admin_token is None else settings.admin_token.get_secret_value()
        tls = None
        if settings.admin_tls and settings.tls_cert is not None and settings.tls_key is not None:
            tls = server_context(settings.tls_cert, settings.tls_key)
        guard = AdminGuard(app, token, settings.admin_listen.rpartition(":")[0], self._metrics)
        max_bytes = settings.max_encoded_bytes + FORM_BYTES
        limits = HttpLimits(settings.max_connections, max_bytes, NUM_BODIES * max_bytes)
        self._server = HttpServer(guard, settings.admin_listen, limits, tls)
        self.address = self._server.address
        self._server.start()

    def attach(self, pipeline: Pipeline, engine: DeviceEngine, broker: Broker | None) -> None:
        """Registers the metrics of the complete service."""
        register_gauges(self._metrics, pipeline, engine)
        if broker is not None:
            register_broker(self._metrics, broker, pipeline.store)
        loop = asyncio.get_running_loop()
        loop_idle_s = (lambda: loop.idle_s) if isinstance(loop, ServiceLoop) else None
        saturation = Saturation(self._metrics, pipeline, engine, loop_idle_s)
        self._sampling = loop.create_task(self._sample(saturation))

    async def stop(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
        if self._server is not None:
            await self._server.stop()

    async def _sample(self, saturation: Saturation) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            saturation.sample()


class AdminGuard:
    """ASGI middleware that checks the host, the token and the origin. token: empty if none is required.
    listen_host: known besides the hosts of ``is_known_host``. metrics: count what it refuses."""

    def __init__(self, app: ASGIApp, token: str, listen_host: str, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._digest = digest(token) if token else None
        self._own_names = own_names(listen_host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            refused = self._refusal(scope)
            if refused is not None:
                error, status = refused
                host, port = scope["client"] or ("", 0)
                call = Call("admin", "", peer=f"{host}:{port}", host=host)
                call.failed(self._metrics, failure_of(error), status_of(error).name)
                headers = CHALLENGE if status == 401 else {}
                await PlainTextResponse(f"{error.message}\n", status, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[VisionEncoderError, int] | None:
        """The error and its HTTP status for a request that is refused."""
        headers = Headers(scope=scope)
        # Over TLS the browser has compared the host's name with the certificate.
        if scope["scheme"] != "https" and not is_known_host(headers.get("host", ""), self._own_names):
            return PermissionDenied(UNKNOWN_HOST), 421
        if self._digest is not None and not hmac.compare_digest(digest(offered_token(headers)), self._digest):
            return Unauthenticated("a token is needed"), 401
        if scope["method"] not in SAFE_METHODS and is_foreign(scope["scheme"], headers):
            return PermissionDenied("sent by a page of another origin"), 403
        return None


def offered_token(headers: Headers) -> str:
    """The request's token; empty if it has none."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:  # no base64, no UTF-8, no ASCII
            return ""
    return ""


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
