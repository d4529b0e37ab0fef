"""The admin plane: liveness, readiness, metrics, server info, a page; HTTP on a port of its own.

Owns the HTTP surface for operators. Never waits for the device: every answer comes from counters and
flags that are already in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, Response
from google.protobuf.json_format import MessageToDict
from starlette.types import ASGIApp

from encoder_service.errors import ConfigurationError
from encoder_service.ops.admin.live import LiveView
from encoder_service.ops.admin.pages import pages
from encoder_service.ops.admin.playground import Playground
from encoder_service.ops.metrics import CONTENT_TYPE, Metrics
from vision_encoder.v1 import encoder_pb2 as pb


class Readiness(Protocol):
    """What the admin plane asks about the service."""

    def is_alive(self) -> bool:
        """False once the process should be restarted."""

    def not_ready_because(self) -> str | None:
        """Why no work is taken now, or None when it is."""

    def info(self) -> pb.GetServerInfoResponse | None:
        """What GetServerInfo answers, or None before the model is loaded."""


def create_admin_app(
    readiness: Readiness,
    metrics: Metrics,
    live: LiveView | None = None,
    playground: Playground | None = None,
) -> FastAPI:
    """The HTTP application, with a page for ``live``. Bytes are hexadecimal in JSON."""
    app = FastAPI(title="vision-encoder admin", docs_url=None, redoc_url=None)

    @app.get("/healthz")
    async def healthz(response: Response) -> dict[str, str]:
        alive = readiness.is_alive()
        response.status_code = 200 if alive else 503
        return {"status": "alive" if alive else "failed"}

    @app.get("/readyz")
    async def readyz(response: Response) -> dict[str, str]:
        reason = readiness.not_ready_because()
        response.status_code = 200 if reason is None else 503
        return {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE)

    @app.get("/v1/info")
    async def info(response: Response) -> dict[str, Any]:
        message = readiness.info()
        if message is None:
            response.status_code = 503
            return {"status": "not ready", "reason": readiness.not_ready_because()}
        return info_dict(message)

    if live is not None:
        app.include_router(pages(live, playground))
    return app


def info_dict(message: pb.GetServerInfoResponse) -> dict[str, Any]:
    """GetServerInfo as JSON-ready data, numbers as numbers, bytes as hexadecimal."""
    answer: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for entry, model in zip(answer["models"], message.models, strict=True):
        entry["model_fingerprint"] = model.model_fingerprint.hex()
        entry["preprocess_fingerprint"] = model.preprocess_fingerprint.hex()
    answer["limits"] = {field.name: value for field, value in message.limits.ListFields()}
    return answer


class AdminServer:
    """uvicorn on the service's own event loop, its socket bound at once, signals left to the service."""

    def __init__(self, app: ASGIApp, address: str, tls: ssl.SSLContext | None = None) -> None:
        self._socket = bind_tcp(address)
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2
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


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind_tcp(address: str) -> socket.socket:
    """A bound TCP socket. Raises ConfigurationError for an address that cannot be bound."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, int(port)))
    except OSError as error:
        bound.close()
        raise ConfigurationError(f"cannot listen on {address}: {error.strerror or error}") from None
    return bound
