"""The admin plane's HTTP application: liveness, readiness, metrics, times, server info, the page.

Owns the routes and the page's security headers. Answers come from counters and flags in memory and never wait
for the device; the playground is a call of the service's own HTTP endpoint. The page loads nothing from
another host, which its content security policy forbids.
"""

from __future__ import annotations

import asyncio
import math
from importlib import resources
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from encoder_service.ops.metrics import CONTENT_TYPE, MAX_RECENT, Metrics
from encoder_service.rpc.server_info import info_dict
from vision_encoder.v1 import encoder_pb2 as pb

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
FILES = {
    "index.html": "text/html; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "playground.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
}
# Rendering takes milliseconds on the event loop.
EXPOSE_EVERY_S = 0.1
# Times of stages are those of the last minute.
STAGES_S = 60.0


class Readiness(Protocol):
    """The state of the service that the admin plane reports."""

    def is_alive(self) -> bool:
        """False once the process should be restarted."""

    @property
    def not_ready(self) -> str | None:
        """The reason why the service accepts no work now; None when it does."""

    @property
    def info(self) -> pb.GetServerInfoResponse | None:
        """The answer of GetServerInfo, or None before the model is loaded."""


def create_admin_app(
    readiness: Readiness,
    metrics: Metrics,
    playground: ASGIApp | None = None,
    playground_max_bytes: int = 0,
) -> FastAPI:
    """playground: answers POST /v1/playground; None leaves that route out. playground_max_bytes: largest
    file that it takes; 0 without it. JSON answers hold bytes as hexadecimal."""
    app = FastAPI(title="vision-encoder admin", docs_url=None, redoc_url=None)
    app.include_router(probes(readiness, metrics, playground_max_bytes))
    app.include_router(page())
    if playground is not None:
        app.router.routes.append(Route("/v1/playground", playground, methods=["POST"]))
    return app


def probes(readiness: Readiness, metrics: Metrics, playground_max_bytes: int) -> APIRouter:
    router, exposition = APIRouter(), Exposition(metrics)

    @router.get("/healthz")
    async def healthz(response: Response) -> dict[str, str]:
        alive = readiness.is_alive()
        response.status_code = 200 if alive else 503
        return {"status": "alive" if alive else "failed"}

    @router.get("/readyz")
    async def readyz(response: Response) -> dict[str, str]:
        reason = readiness.not_ready
        response.status_code = 200 if reason is None else 503
        return {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}

    @router.get("/metrics")
    async def scrape() -> Response:
        return Response(await exposition.text(), media_type=CONTENT_TYPE)

    @router.get("/v1/times")
    async def times(after: int | None = None) -> dict[str, Any]:
        """Observed milliseconds by stage in the last minute. new: those of ``total`` after the first
        ``after``, which is the ``num_total`` of an earlier answer."""
        recent = metrics.recent
        return {
            "stages": recent.within(STAGES_S),
            "max_passed": MAX_RECENT,
            "num_total": recent.num_total,
            "new": None if after is None else recent.total_after(after),
        }

    @router.get("/v1/info")
    async def info(response: Response) -> dict[str, Any]:
        message = readiness.info
        if message is None:
            response.status_code = 503
            return {"status": "not ready", "reason": readiness.not_ready}
        return info_dict(message) | {"playground_max_bytes": playground_max_bytes}

    return router


class Exposition:
    """The metrics as text, rendered at most once in EXPOSE_EVERY_S: what is asked for meanwhile waits for the
    next text, which all that wait share. Readers in a loop thus cost no more than one."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._rendered_s = -math.inf
        self._next: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        if self._next is None or self._next.done():
            self._next = asyncio.create_task(self._render())
        return await asyncio.shield(self._next)

    async def _render(self) -> bytes:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._rendered_s + EXPOSE_EVERY_S - clock())
        try:
            return self._metrics.exposition()
        finally:
            self._rendered_s = clock()


def page() -> APIRouter:
    router = APIRouter()
    folder = resources.files("encoder_service.admin") / "static"
    contents = {name: (folder / name).read_bytes() for name in FILES}

    @router.get("/")
    async def index() -> Response:
        return Response(contents["index.html"], media_type=FILES["index.html"], headers=HEADERS)

    @router.get("/static/{name}")
    async def static(name: str) -> Response:
        if name not in contents:
            return Response(status_code=404, headers=HEADERS)
        return Response(contents[name], media_type=FILES[name], headers=HEADERS)

    return router
