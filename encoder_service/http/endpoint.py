"""``POST /v1/encode``: one call from its request to the last byte of its answer.

Owns the order: who calls, a permit, the body, the items, the answer. Each step is that of a gRPC call:
``rpc.gate`` checks and counts, ``rpc.item_stream`` runs the items, ``rpc.observed`` keeps the records. What
differs is that an answer needs all of its items before its first byte. Their rows stay in memory until they
are sent, and count with the call's body.

A call of one item whose item fails has the failure's status. A call of several items has 200, and its answer
names the failures.
"""

from __future__ import annotations

import asyncio
import math
import reprlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from encoder_service.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotReady,
    PermissionDenied,
    UnsupportedMediaType,
    VisionEncoderError,
)
from encoder_service.http.answers import Answer, AnsweredCall, FailedItem, Outcome
from encoder_service.http.requests import EncodeCall, RequestedItem, parse_call
from encoder_service.ingest.workers import MAX_HASHED_ON_LOOP_BYTES
from encoder_service.ops.http_requests import (
    KNOWN_HOSTS,
    error_response,
    failure_fields,
    is_foreign,
    is_known_host,
    until_hang_up,
)
from encoder_service.ops.http_server import read_body
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.shares import WaitingShares
from encoder_service.pipeline import EncodeResult
from encoder_service.protocols.base import Backend
from encoder_service.rpc.delivery import Delivery, RowsRequest
from encoder_service.rpc.gate import CallGate, Entry, on_worker
from encoder_service.rpc.item_reader import ItemReader
from encoder_service.rpc.item_stream import ItemStream
from encoder_service.rpc.observed import Call, open_call, recorded
from encoder_service.rpc.servicer import check_call
from encoder_service.rpc.status import as_service_error
from encoder_service.scheduler.admission import Permit
from encoder_service.store.embedding_store import Location
from encoder_service.types import Item

METHOD, ROUTE = "http/encode", "/v1/encode"
TIMEOUT_HEADER = "x-timeout-s"

# Makes the answer of a call from its outcomes. The text is the request's Accept header.
AnswerForm: TypeAlias = Callable[[AnsweredCall, str], Awaitable[Answer]]


@dataclass(frozen=True)
class Access:
    """Who may call. gate: checks tokens and counts calls and bytes. namespace: of every call, without a
    token; None: the one that the call names. is_prefetch: items are queued behind those of other calls.
    own_names: of this host, see ``is_known_host``; None where the host of requests is checked before."""

    gate: CallGate
    namespace: str | None = None
    is_prefetch: bool = False
    own_names: Collection[str] | None = None


class EncodeEndpoint:
    """An ASGI application. It answers from the start: 503 until ``attach``. num_calls: in progress."""

    def __init__(
        self,
        access: Access,
        form: AnswerForm,
        metrics: Metrics,
        instance_id: str,
        not_ready_because: Callable[[], str | None],
    ) -> None:
        """not_ready_because: why the service takes no work now, or None."""
        self.num_calls = 0
        self._access, self._form, self._metrics = access, form, metrics
        self._instance_id, self._not_ready_because = instance_id, not_ready_because
        self._backend: Backend | None = None
        self._delivery: Delivery | None = None
        self._large = WaitingShares(1)

    def attach(self, backend: Backend) -> None:
        """Takes work from now on."""
        self._backend, self._delivery = backend, Delivery(backend.pipeline, self._metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. If the answer cannot be completed, it is left incomplete, and the HTTP server
        ends the connection."""
        request = Request(scope, receive)
        metadata = tuple((name, value) for name, value in request.headers.items() if self._is_ours(name))
        host, port = request.client or ("", 0)
        call = open_call(METHOD, metadata, self._instance_id, f"{host}:{port}", host, ROUTE)
        sending = _Sending(send, call)
        response: Response | None = None
        self.num_calls += 1
        try:
            with recorded(call, self._metrics):
                response = await self._serve(request, call, sending)
        except Exception as exception:
            error = as_service_error(exception)
            response = error_response(failure_fields(error), dict(call.trailers()))
            del error
        finally:
            self.num_calls -= 1
        if sending.has_begun:
            await sending.end()
        elif response is not None:
            await response(scope, receive, send)

    def _is_ours(self, header: str) -> bool:
        """Without a namespace of the call's own, a token is somebody else's: the admin plane's."""
        return self._access.namespace is None or header != "authorization"

    async def _serve(self, request: Request, call: Call, sending: _Sending) -> Response | None:
        """Everything but the last chunk: a caller that hangs up once it has that one has not left early.
        Returns the answer if none was begun."""
        self._check_page(request)
        coding = request.headers.get("content-encoding", "identity")
        if coding.strip().lower() not in ("", "identity"):
            raise UnsupportedMediaType(
                f"Content-Encoding is {reprlib.repr(coding)}, bodies are taken as they are: send none"
            )
        deadline = Deadline(timeout_of(request))
        with self._access.gate.enter(call) as entry:
            backend, delivery = self._backend, self._delivery
            if backend is None or delivery is None:
                raise NotReady(f"the service is not ready: {self._not_ready_because()}")
            async with deadline.limits("the body had arrived"):
                parsed = await self._read(request, backend, call, entry)
            entry.pass_to(parsed.namespace if self._access.namespace is None else None)
            namespace = parsed.namespace if self._access.namespace is None else self._access.namespace
            check_call(backend.pipeline.model.name, namespace, parsed.model, len(parsed.items))
            collected = CollectedItems(len(parsed.items))
            stream = ItemStream(
                backend.pipeline,
                delivery,
                collected,
                call,
                requested=RowsRequest(namespace, None, after_lost_read=False),
                needs_all=True,
            )
            encode = self._encoder(backend, call, namespace, entry, deadline)
            running = asyncio.ensure_future(stream.run(encode, parsed.items))

            async def answer() -> Response | None:
                outcomes = await collected.outcomes(running)
                if len(outcomes) == 1 and isinstance(outcomes[0], FailedItem):
                    return error_response(outcomes[0].fields, dict(call.trailers()))
                answered = AnsweredCall(backend.pipeline, call.request_id, parsed.items, outcomes)
                await sending.begin(await self._form(answered, request.headers.get("accept", "")))
                collected.sent.set()
                await running
                return None

            try:
                return await until_hang_up(request, answer())
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    def _check_page(self, request: Request) -> None:
        """Raises PermissionDenied for what a browser sends for a page that is not of this server."""
        scheme, headers, own_names = request.url.scheme, request.headers, self._access.own_names
        if is_foreign(scheme, headers):
            raise PermissionDenied("sent by a page of another origin")
        if "origin" not in headers or own_names is None or scheme == "https":
            return  # over TLS the browser has compared the host's name with the certificate
        if not is_known_host(headers.get("host", ""), own_names):
            raise PermissionDenied(f"pages of this host name may not ask without TLS: {KNOWN_HOSTS}")

    async def _read(self, request: Request, backend: Backend, call: Call, entry: Entry) -> EncodeCall:
        """Parses large bodies on a worker thread, one at a time, since the work is the interpreter's. Never
        returns before the worker has ended, so that the body stays counted. Raises QueueFull, and as
        ``read_body`` and ``parse_call``."""
        data = await read_body(request)
        entry.permit.add_bytes(len(data))
        content_type, limits = request.headers.get("content-type", ""), backend.max_file_bytes
        if len(data) <= MAX_HASHED_ON_LOOP_BYTES:
            return parse_call(content_type, data, limits)
        async with self._large.hold(call.holder):
            return await on_worker(parse_call, content_type, data, limits)

    def _encoder(
        self, backend: Backend, call: Call, namespace: str, entry: Entry, deadline: Deadline
    ) -> Callable[[RequestedItem], Awaitable[EncodeResult]]:
        """The function that encodes an item of the call."""
        pipeline, holder = backend.pipeline, call.holder_of(namespace)
        reader = ItemReader(self._access.gate.admission, pipeline.workers.executor, None, backend.urls)

        async def encode(item: Item, permit: Permit | None) -> EncodeResult:
            return await pipeline.encode(
                item,
                namespace=namespace,
                holder=holder,
                permit=permit,
                deadline_s=deadline.on(pipeline.clock),
                is_prefetch=self._access.is_prefetch,
            )

        async def encode_item(requested: RequestedItem) -> EncodeResult:
            async with deadline.limits("the item was encoded"):
                if not requested.is_inline:
                    result = await reader.use(requested.message(), encode, holder)
                else:
                    result = await encode(requested.inline(), entry.permit)
            try:
                entry.permit.add_rows(result.encoded.spec.num_bytes)
            except VisionEncoderError:
                result.release()
                raise
            return result

        return encode_item


class CollectedItems:
    """An ``ItemWriter`` that keeps the outcomes of a call until all are there. sent: set it once the rows are
    sent; they are released then."""

    def __init__(self, num_items: int) -> None:
        self.sent = asyncio.Event()
        self._outcomes: list[Outcome | None] = [None] * num_items
        self._num_missing = num_items
        self._is_complete = asyncio.Event()

    async def failed(self, index: int, error: VisionEncoderError) -> None:
        self._set(index, FailedItem(failure_fields(error)))

    async def rows(self, index: int, delivered: EncodeResult, place: Location | None) -> None:
        assert place is None
        self._set(index, delivered)
        await self.sent.wait()

    def _set(self, index: int, outcome: Outcome) -> None:
        self._outcomes[index] = outcome
        self._num_missing -= 1
        if not self._num_missing:
            self._is_complete.set()

    async def outcomes(self, running: asyncio.Future[None]) -> list[Outcome]:
        """The outcomes of all items, in their order. running: the items' stream; raises what it raises."""
        completing = asyncio.ensure_future(self._is_complete.wait())
        try:
            await asyncio.wait((running, completing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            completing.cancel()
        if not self._is_complete.is_set():
            await running
        return [outcome for outcome in self._outcomes if outcome is not None]


class _Sending:
    """The answer on its way, except for its last chunk until ``end``. has_begun: its status was sent."""

    def __init__(self, send: Send, call: Call) -> None:
        self.has_begun = False
        self._send, self._call = send, call
        self._last: bytes | None = None

    async def begin(self, answer: Answer) -> None:
        self.has_begun = True
        headers = {
            **dict(self._call.trailers()),
            "content-type": answer.media_type,
            "content-length": str(answer.num_bytes),
        }
        start: Message = {
            "type": "http.response.start",
            "status": 200,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        await self._send(start)
        last: bytes | None = None
        for chunk in answer.chunks:
            if last is not None:
                await self._send({"type": "http.response.body", "body": last, "more_body": True})
            last = chunk
        self._last = last

    async def end(self) -> None:
        """Does nothing if ``begin`` has not ended."""
        if self._last is not None:
            await self._send({"type": "http.response.body", "body": self._last})


class Deadline:
    """The time that a call may take. timeout_s: None for any."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._ends_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def on(self, clock: Callable[[], float]) -> float | None:
        """The deadline in another clock's seconds."""
        if self._ends_s is None:
            return None
        return clock() + self._ends_s - asyncio.get_running_loop().time()

    @asynccontextmanager
    async def limits(self, what: str) -> AsyncIterator[None]:
        """Raises DeadlineExceeded if the block has not ended by then."""
        try:
            async with asyncio.timeout_at(self._ends_s) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(f"the call's {self._timeout_s} s passed before {what}") from None


def timeout_of(request: Request) -> float | None:
    """The seconds of the request's X-Timeout-S; None without one. Raises InvalidRequest."""
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InvalidRequest(f"X-Timeout-S is {reprlib.repr(text)}, needed are seconds above 0")
    return timeout_s
