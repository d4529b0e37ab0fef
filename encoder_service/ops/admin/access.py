"""Who may use the admin plane: TLS and one token.

Owns the check in front of the HTTP application. Liveness and readiness stay open, for probes that carry no
token. Where a token is set, all else needs it: as ``Authorization: Bearer``, or as the password of Basic,
which is what browsers ask their user for. What changes something is refused when a page of another origin
sends it, with or without a token: a browser would lend its access to any page.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import urllib.parse

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from encoder_service.config import Settings
from encoder_service.ops.admin.app import AdminServer
from encoder_service.ops.tls import CertificateFiles

OPEN_PATHS = frozenset(("/healthz", "/readyz"))
HARMLESS = frozenset(("GET", "HEAD"))
CHALLENGE = {"WWW-Authenticate": 'Basic realm="vision-encoder admin", charset="UTF-8"'}


def open_admin(app: ASGIApp, settings: Settings) -> AdminServer:
    """The application behind its check, bound. Clients need no certificate: probes have none. Raises
    ConfigurationError."""
    token = settings.admin_token
    guarded = AdminGuard(app, "" if token is None else token.get_secret_value())
    context = None
    if settings.admin_tls and settings.tls_cert is not None and settings.tls_key is not None:
        context = CertificateFiles(settings.tls_cert, settings.tls_key).server_context()
    return AdminServer(guarded, settings.admin_listen, context)


class AdminGuard:
    """ASGI middleware. token: empty for none."""

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
        harmless = scope["type"] == "http" and scope["method"] in HARMLESS
        if not harmless and is_foreign(headers):
            await PlainTextResponse("sent by a page of another origin\n", 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def offered_token(headers: Headers) -> str:
    """What the request means as its token; empty for none."""
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
    """Whether a browser says that a page from elsewhere sends this. Other clients say nothing."""
    origin = headers.get("origin")
    return origin is not None and urllib.parse.urlsplit(origin).netloc != headers.get("host", "")


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
