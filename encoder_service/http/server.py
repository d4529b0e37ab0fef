"""The HTTP address: ``POST /v1/encode``, ``GET /v1/info``, ``GET /health``, and the pages of their reference.

Owns the routes and their description in OpenAPI. ``endpoint`` owns a call. Whoever may call by gRPC may call
here, with the same tokens and limits. ``/docs`` and ``/redoc`` load nothing from other hosts.
"""

from __future__ import annotations

import asyncio
import reprlib
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from encoder_service import __version__
from encoder_service.errors import NotReady, VisionEncoderError
from encoder_service.http.answers import (
    JSON_TYPE,
    SAFETENSORS_TYPE,
    ErrorAnswer,
    JsonAnswer,
    rows_answer,
)
from encoder_service.http.endpoint import ROUTE, Access, EncodeEndpoint
from encoder_service.http.requests import MULTIPART_SCHEMA, EncodeBody
from encoder_service.ops.http_requests import error_response, failure_fields, own_names
from encoder_service.ops.metrics import Metrics
from encoder_service.protocols.base import Backend
from encoder_service.rpc.auth import bearer_token, check_caller
from encoder_service.rpc.gate import CallGate
from encoder_service.rpc.server_info import info_dict
from vision_encoder.v1 import encoder_pb2 as pb

STOP_POLL_S = 0.05
ENCODE_TEXT = """\
Encodes images and clips and answers with their rows (visual tokens).

The answer is one **safetensors** body: a tensor `rows.INDEX` for each item that has rows, and in the header's
metadata `items`, a JSON list with the fields of `AnsweredItem` for every item, failures included. With
`Accept: application/json` it is `JsonAnswer`, with rows in base64.

An item that fails fails alone: a call of several items has status 200, and `failure` at those that failed. A
call of one item has its failure's status and body, as has a call that fails as a whole.
"""
STATUSES = {
    400: "The request or its only item is invalid.",
    401: "No token, or an unknown one.",
    403: "The token does not open the namespace.",
    404: "The model or the digest is unknown.",
    413: "The body is too large.",
    415: "The body's type or its coding is not taken.",
    503: "Overloaded or not ready; `Retry-After` says when to ask again.",
    504: "The time of `X-Timeout-S` has passed, or the body came too slowly.",
}
HEADERS = {
    "X-Timeout-S": ("number", "Seconds for the whole call; what is not encoded by then fails."),
    "X-Request-Id": ("string", "Appears in the service's log and in the answer; left out: a new one."),
}


class HttpEncodeServer:
    """A ``ProtocolServer``. ``app`` answers from the start: 503 until ``attach``."""

    def __init__(
        self,
        gate: CallGate,
        metrics: Metrics,
        instance_id: str,
        not_ready_because: Callable[[], str | None],
        info: Callable[[], pb.GetServerInfoResponse | None],
        listen_host: str,
    ) -> None:
        """gate: of all calls, also of gRPC's. info: the answer of GetServerInfo; None before the model is
        loaded. listen_host: that of the address."""
        self._gate, self._not_ready_because, self._info = gate, not_ready_because, info
        access = Access(gate, own_names=own_names(listen_host))
        self._encode = EncodeEndpoint(access, rows_answer, metrics, instance_id, not_ready_because)
        app = FastAPIOffline(title="vision-encoder", version=__version__)
        add_routes(app, self._encode, self._health, self._server_info)
        app.add_api_route("/", to_reference, include_in_schema=False)
        app.add_exception_handler(HTTPException, no_route)
        self.app: Starlette = app

    @property
    def num_calls(self) -> int:
        """None: the gate counts them."""
        return 0

    async def open(self) -> None:
        """Nothing: there is no port besides that of ``app``."""

    async def attach(self, backend: Backend) -> None:
        self._encode.attach(backend)

    async def leave(self) -> None:
        """Nothing: ``/health`` follows the service's readiness."""

    async def drain(self, ends_s: float) -> None:
        """Returns once no call is in progress, or at that time of the monotonic clock."""
        while self._encode.num_calls and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(STOP_POLL_S)

    async def stop(self) -> None:
        """Nothing is held."""

    async def _health(self) -> Response:
        """By the service's readiness: never waits for the device."""
        reason = self._not_ready_because()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, 503)

    async def _server_info(self, request: Request) -> Response:
        try:
            check_caller(self._gate.tokens, bearer_token(request.headers.items()))
            info = self._info()
            if info is None:
                raise NotReady(f"the service is not ready: {self._not_ready_because()}")
        except VisionEncoderError as error:
            return error_response(failure_fields(error))
        return JSONResponse(info_dict(info))


async def to_reference() -> Response:
    """Relative, so that a proxy may serve it below a path of its own."""
    return RedirectResponse("docs")


async def no_route(request: Request, error: Exception) -> Response:
    """The answer to a path or a method that is not served."""
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "")
    problem = f", only {allowed}" if allowed else "; /docs lists the paths that are"
    shown = reprlib.repr(f"{request.method} {request.url.path}")
    failure = {
        "status": error.status_code,
        "reason": HTTPStatus(error.status_code).name,
        "message": f"{shown} is not served{problem}",
        "retryable": False,
        "retry_after_ms": 0,
        "details": {},
    }
    return error_response(failure, error.headers)


class Delegated(Response):
    """A route's answer that an ASGI application gives."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def add_routes(
    app: FastAPI, encode: ASGIApp, health: Callable[..., Any], server_info: Callable[..., Any]
) -> None:
    """The routes, with what ``/docs`` says of them. ``encode`` reads the bodies of ``/v1/encode``, which it
    bounds, and not FastAPI, so OpenAPI is told of them here."""
    body = EncodeBody.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas = body.pop("$defs")
    rows = {"schema": {"type": "string", "format": "binary", "description": "safetensors"}}
    documented: dict[int | str, dict[str, Any]] = {
        200: {"model": JsonAnswer, "description": "Rows.", "content": {SAFETENSORS_TYPE: rows}}
    }
    documented |= {status: {"model": ErrorAnswer, "description": text} for status, text in STATUSES.items()}
    token = Depends(HTTPBearer(auto_error=False, description="A token of the namespace."))

    async def encode_route() -> Response:
        return Delegated(encode)

    app.add_api_route(
        ROUTE,
        encode_route,
        methods=["POST"],
        summary="Encode images and clips",
        description=ENCODE_TEXT,
        response_class=Response,
        responses=documented,
        dependencies=[token],
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"multipart/form-data": {"schema": MULTIPART_SCHEMA}, JSON_TYPE: {"schema": body}},
            },
            "parameters": [
                {"name": name, "in": "header", "schema": {"type": kind}, "description": text}
                for name, (kind, text) in HEADERS.items()
            ],
        },
    )
    app.add_api_route(
        "/v1/info",
        server_info,
        summary="Model, limits, transports",
        description="The answer of GetServerInfo; bytes are hexadecimal.",
        dependencies=[token],
    )
    app.add_api_route("/health", health, summary="200 while the service takes work, else 503")
    openapi = app.openapi

    def with_bodies() -> dict[str, Any]:
        description = openapi()
        description["components"]["schemas"].update(schemas)
        return description

    app.openapi = with_bodies  # type: ignore[method-assign]
