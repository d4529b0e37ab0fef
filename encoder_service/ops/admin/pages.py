"""The admin page: three files that come with the package, and the routes behind them.

Owns their paths, types and security headers, the reading of an uploaded file, and errors as HTTP tells them.
The page asks no other host for anything, and the policy that is sent with it would not let it.
"""

from __future__ import annotations

import math
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from encoder_service.errors import (
    DeadlineExceeded,
    ImageTooLarge,
    InternalError,
    InvalidInput,
    Overloaded,
    Unavailable,
    VisionEncoderError,
)
from encoder_service.ops.admin.live import LiveView
from encoder_service.ops.admin.playground import Playground

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
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
# A page elsewhere cannot send this type here without asking first, which is not answered.
UPLOAD_TYPE = "application/octet-stream"


def pages(live: LiveView, playground: Playground | None) -> APIRouter:
    """Routes of the page. Without a playground its route is not there."""
    router = APIRouter()
    folder = resources.files("encoder_service.ops.admin") / "static"
    contents = {name: (folder / name).read_bytes() for name in FILES}

    @router.get("/")
    async def index() -> Response:
        return Response(contents["index.html"], media_type=FILES["index.html"], headers=HEADERS)

    @router.get("/static/{name}")
    async def static(name: str) -> Response:
        if name not in contents:
            return Response(status_code=404, headers=HEADERS)
        return Response(contents[name], media_type=FILES[name], headers=HEADERS)

    @router.get("/v1/live")
    async def figures() -> JSONResponse:
        answer = live.answer()
        answer["playground_max_bytes"] = 0 if playground is None else playground.max_bytes
        return JSONResponse(answer, headers=HEADERS)

    if playground is None:
        return router

    @router.post("/v1/playground")
    async def encode(request: Request) -> JSONResponse:
        try:
            if request.headers.get("content-type", "") != UPLOAD_TYPE:
                raise InvalidInput(f"send the file's bytes as {UPLOAD_TYPE}")
            return JSONResponse(await playground.explain(await body_of(request, playground)), headers=HEADERS)
        except VisionEncoderError as error:
            return failure(error)

    return router


async def body_of(request: Request, playground: Playground) -> bytes:
    """The body, which is never held beyond the limit. Raises ImageTooLarge."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal():
        playground.check_size(int(announced))
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        playground.check_size(len(body))
    return bytes(body)


def http_status(error: VisionEncoderError) -> int:
    """The status of an error's class or of its nearest ancestor here."""
    table: dict[type[VisionEncoderError], int] = {
        ImageTooLarge: 413,
        InvalidInput: 400,
        Overloaded: 429,
        Unavailable: 503,
        DeadlineExceeded: 504,
        InternalError: 500,
    }
    return next((table[cls] for cls in type(error).__mro__ if cls in table), 500)


def failure(error: VisionEncoderError) -> JSONResponse:
    headers = dict(HEADERS)
    if error.retry_after_ms:
        headers["Retry-After"] = str(math.ceil(error.retry_after_ms / 1e3))
    body: dict[str, Any] = {"reason": error.reason, "message": error.message}
    return JSONResponse(body, status_code=http_status(error), headers=headers)
