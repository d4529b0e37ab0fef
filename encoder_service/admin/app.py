"""The admin plane's HTTP application: liveness, readiness, metrics, server info, the page and its playground.

Owns the routes and the page's security headers. Answers come from counters and flags in memory and never wait
for the device; only the playground encodes. The page loads nothing from another host, which its content
security policy forbids.
"""

from __future__ import annotations

import asyncio
import math
from importlib import resources
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from google.protobuf.json_format import MessageToDict
from starlette.requests import ClientDisconnect

from encoder_service.admin.playground import Playground
from encoder_service.errors import InvalidInput, VisionEncoderError
from encoder_service.ops.http_server import read_body
from encoder_service.ops.http_status import http_status
from encoder_service.ops.metrics import CONTENT_TYPE, Metrics
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
# A page of another origin cannot send this type without a preflight request, which gets no answer.
UPLOAD_TYPE = "application/octet-stream"
# Rendering takes milliseconds on the event loop.
EXPOSE_EVERY_S = 0.1


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
    playground: Playground | None = None,
) -> FastAPI:
    """playground: None leaves its route out. JSON answers hold bytes as hexadecimal."""
    app = FastAPI(title="vision-encoder admin", docs_url=None, redoc_url=None)
    app.include_router(probes(readiness, metrics, 0 if playground is None else playground.max_bytes))
    app.include_router(page(playground))
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


def page(playground: Playground | None) -> APIRouter:
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

    if playground is None:
        return router

    @router.post("/v1/playground")
    async def encode(request: Request) -> Response:
        try:
            if request.headers.get("content-type", "") != UPLOAD_TYPE:
                raise InvalidInput(f"send the file's bytes as {UPLOAD_TYPE}")
            return JSONResponse(await playground.explain(await read_body(request)), headers=HEADERS)
        except VisionEncoderError as error:
            return failure(error)
        except ClientDisconnect:
            return Response(status_code=499)

    return router


def failure(error: VisionEncoderError) -> JSONResponse:
    """An error as an HTTP response, with the delay of a retry if there is one."""
    headers = dict(HEADERS)
    if error.retry_after_ms:
        headers["Retry-After"] = str(math.ceil(error.retry_after_ms / 1e3))
    body: dict[str, Any] = {"reason": error.reason, "message": error.message}
    return JSONResponse(body, status_code=http_status(error), headers=headers)
