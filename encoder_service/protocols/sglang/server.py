"""SGLang's own encoder protocol: its language-only servers use the service as their encoder.

Owns the HTTP side of SGLang 0.5.23 (``disaggregation/encoder``, transfer backends zmq_to_tokenizer and
zmq_to_scheduler) and the order of a request: encode its items, send the rows, answer. ``requests`` parses
bodies, ``receivers`` knows receivers that name themselves, ``push`` writes the frames, ``zmq_push`` sends
them, ``registration`` lists the service at SGLang. The composition root owns the HTTP server.

The protocol has no tokens: any caller that reaches the address may encode, in one namespace, NAMESPACE.
Bytes count with the service's; requests have a limit of the same size as gRPC's calls, counted apart. A
content hash that a request states is verified against the bytes before anything is stored under it, as
SGLang's encoder does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from encoder_service import errors
from encoder_service.config import Settings
from encoder_service.ingest.workers import MAX_HASHED_ON_LOOP_BYTES
from encoder_service.ops.http_requests import json_object, peer_of, until_hang_up
from encoder_service.ops.http_server import read_body
from encoder_service.ops.http_status import http_status
from encoder_service.ops.logs import REQUEST_ID_KEY, bind_request, request_id_of
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.shares import Holder
from encoder_service.own_thread import on_own_thread
from encoder_service.pipeline import EncodeResult, holder_of
from encoder_service.protocols.base import Backend
from encoder_service.protocols.sglang.push import Part, clip_times_s, head_frame, payload
from encoder_service.protocols.sglang.receivers import AwaitedReceivers
from encoder_service.protocols.sglang.registration import Registration
from encoder_service.protocols.sglang.requests import (
    MAX_REQ_ID_CHARS,
    EncodeRequest,
    MediaItem,
    error_body,
    inline_content,
    parse_encode,
    parse_receiver,
    url_message,
    verify,
)
from encoder_service.protocols.zmq_push import AllowedReceivers, Sender
from encoder_service.rpc.gate import CallPermits
from encoder_service.rpc.item_reader import ItemReader
from encoder_service.rpc.observed import Call, recorded
from encoder_service.rpc.status import as_service_error
from encoder_service.scheduler.admission import Admission, Permit
from encoder_service.types import EncodedFile, EncodedItem, Item, Modality

Answer = TypeVar("Answer")
Work: TypeAlias = Callable[["Incoming"], Awaitable[None]]

NAMESPACE = "sglang"
# Time for a message to leave.
SEND_TIMEOUT_S = 10.0
STOP_POLL_S = 0.05


@dataclass(frozen=True)
class Incoming:
    """A request whose body has been read. peer: the caller's address. permit: counts the request's
    bytes until the request ends."""

    call: Call
    peer: str
    body: Mapping[str, object]
    permit: Permit


@dataclass(frozen=True)
class EncodedPart:
    """What one ``/encode`` sends. results: of its items, in order; their rows are released."""

    results: Sequence[EncodeResult]
    frames: Sequence[bytes | memoryview]


class SglangServer:
    """A ``ProtocolServer``. ``app`` answers from the start: 503 until ``attach``."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        not_ready_because: Callable[[], str | None],
        admission: Admission,
    ) -> None:
        """not_ready_because: why the service takes no work now, or None. admission: the service's limit
        on the content of calls in progress; bodies, fetched content and rows of requests count in it."""
        self._metrics, self._not_ready_because = metrics, not_ready_because
        self._sender = Sender(SEND_TIMEOUT_S)
        self._allowed = AllowedReceivers("sglang_receivers", settings.sglang_receivers)
        self._registration = Registration(settings.sglang_register, settings.sglang_url)
        self._backend: Backend | None = None
        self.permits = CallPermits(settings.max_calls)
        """Of ``/encode`` requests in progress."""
        self._admission = admission
        self.awaited = AwaitedReceivers()
        encode = self._handler("sglang/encode", self._encode, self.permits.call)
        # Takes no permit: encodes holding all permits may be waiting for this call.
        add_receiver = self._handler(
            "sglang/scheduler_receive_url", self._add_receiver, lambda _: contextlib.nullcontext()
        )
        self.app = Starlette(
            routes=[
                Route("/encode", encode, methods=["POST"]),
                Route("/scheduler_receive_url", add_receiver, methods=["POST"]),
                Route("/health", self._health),
                Route("/health_generate", self._health),
            ]
        )

    @property
    def num_calls(self) -> int:
        return self.permits.num_calls

    async def open(self) -> None:
        """Nothing: the protocol needs no port besides that of ``app``."""

    async def attach(self, backend: Backend) -> None:
        """Takes work from now on, and registers at SGLang."""
        self._backend = backend
        self._registration.start()

    async def leave(self) -> None:
        """Takes the service off SGLang's lists of encoders."""
        await self._registration.leave()

    async def drain(self, ends_s: float) -> None:
        """Returns once no ``/encode`` is in progress, or at that time of the monotonic clock."""
        while self.permits.num_calls and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(STOP_POLL_S)

    async def stop(self) -> None:
        """Closes the sockets. Called once the HTTP server has stopped."""
        await on_own_thread(self._sender.close)  # may take LINGER_MS

    # -- HTTP ------------------------------------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        """By the service's readiness: never waits for the device."""
        is_ready = self._backend is not None and self._not_ready_because() is None
        return Response(status_code=200 if is_ready else 503)

    def _handler(
        self, method: str, work: Work, permit: Callable[[Holder], contextlib.AbstractContextManager[None]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A handler that answers ``null`` once ``work`` is done, or the error that it raises as a status and
        the object that SGLang reads. Cancels the work when the caller hangs up. method: in metrics and logs.
        permit: held until the end, in the share of the caller's address; raises TooManyCalls."""

        async def answer(request: Request) -> Response:
            host, port = request.client or ("", 0)
            call = Call(method, "", peer=f"{host}:{port}", host=host, namespace=NAMESPACE)
            try:
                with recorded(call, self._metrics):
                    await self._answer(request, call, work, permit)
                return JSONResponse(None)
            except Exception as exception:
                error = as_service_error(exception)
                content = error_body(error, call.request_id)
                return Response(content, http_status(error), media_type="application/json")

        return answer

    async def _answer(
        self,
        request: Request,
        call: Call,
        work: Work,
        permit: Callable[[Holder], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Returns once ``work`` is done. Raises its error, and as ``until_hang_up``."""
        peer = peer_of(request)
        holder = (f"peer {peer}",)
        with permit(holder):
            bytes_permit = self._admission.acquire(0, holder)
            try:
                body = await self._read(request, bytes_permit)
                call.request_id = str(body.get("req_id", ""))[:MAX_REQ_ID_CHARS]
                bind_request(request_id_of([(REQUEST_ID_KEY, call.request_id)]))
                await until_hang_up(request, work(Incoming(call, peer, body, bytes_permit)))
            finally:
                bytes_permit.release()

    async def _read(self, request: Request, permit: Permit) -> Mapping[str, object]:
        """The object of the request's body. Raises InvalidRequest, PermissionDenied, QueueFull, and as
        ``read_body``."""
        if "origin" in request.headers:
            raise errors.PermissionDenied("pages of browsers may not ask")
        data = await read_body(request)
        permit.add_bytes(len(data))
        return await self._on_worker(len(data), json_object, data)

    async def _add_receiver(self, incoming: Incoming) -> None:
        """``POST /scheduler_receive_url``, before or after the ``/encode`` of its ``req_id``."""
        request = parse_receiver(incoming.body)
        self._allowed.endpoint_of(request.receive_url, incoming.peer)
        self.awaited.add(request.req_id, request.receive_url, request.receive_count)

    # -- rows ------------------------------------------------------------------------------------------

    async def _encode(self, incoming: Incoming) -> None:
        """``POST /encode``: rows are sent before it is answered."""
        request, peer = parse_encode(incoming.body), incoming.peer
        incoming.call.num_items = len(request.mm_items)
        if request.embedding_port is not None:
            endpoint = self._allowed.endpoint(request.prefill_host or "", request.embedding_port, peer)
            await self._send(incoming.call, await self._encode_part(incoming, request), [endpoint])
            return
        with self.awaited.encoding(request.req_id) as group:
            part = await self._encode_part(incoming, request)
            # The peer that called ``/encode`` owns the rows: its allow-list applies to every receiver.
            endpoints = [self._allowed.endpoint_of(url, peer) for url in await group.complete()]
            await self._send(incoming.call, part, endpoints)

    async def _encode_part(self, incoming: Incoming, request: EncodeRequest) -> EncodedPart:
        """Encodes all items at once. Raises the error of the first item that fails."""
        if self._backend is None:
            raise errors.NotReady(f"the service is not ready: {self._not_ready_because()}")
        backend, part, num_items = self._backend, request.part, len(request.mm_items)
        results: dict[int, EncodeResult] = {}

        async def encode_item(index: int, item: MediaItem) -> None:
            result = await self._encode_item(backend, part.modality, item, incoming.permit)
            results[index] = await backend.pipeline.ensure_tier(result, NAMESPACE, "host")
            incoming.permit.add_rows(results[index].encoded.spec.num_bytes)

        try:
            await all_of(*(encode_item(index, item) for index, item in enumerate(request.mm_items)))
            if len(results) < num_items:  # tasks that the stop has cancelled
                raise errors.Draining("the service stopped before the item was encoded")
            in_order = [results[index] for index in range(num_items)]
            frames = await self._frames(part, [result.encoded for result in in_order])
            return EncodedPart(in_order, frames)
        finally:
            for result in results.values():
                result.release()

    async def _encode_item(
        self, backend: Backend, modality: Modality, item: MediaItem, permit: Permit
    ) -> EncodeResult:
        pipeline = backend.pipeline
        if not item.is_url:
            max_bytes = backend.max_file_bytes[modality]
            data = await self._on_worker(len(item.url), inline_content, item, modality, max_bytes)
            inline = Item(modality, EncodedFile(data), item.digest)
            return await pipeline.encode(inline, namespace=NAMESPACE, permit=permit)

        async def encode_fetched(fetched: Item, permit: Permit | None) -> EncodeResult:
            if isinstance(fetched.content, EncodedFile):
                await self._on_worker(len(fetched.content.data), verify, fetched.content.data, item.digest)
            return await pipeline.encode(fetched, namespace=NAMESPACE, permit=permit)

        reader = ItemReader(self._admission, pipeline.workers.executor, None, backend.urls)
        return await reader.use(url_message(item, modality), encode_fetched, (NAMESPACE,))

    async def _frames(self, part: Part, items: Sequence[EncodedItem]) -> Sequence[bytes | memoryview]:
        """The message, with copies of the rows."""
        assert self._backend is not None
        is_clip, family = part.modality is Modality.VIDEO, self._backend.pipeline.model.family
        times_s = [clip_times_s(item, family) for item in items] if is_clip else []
        num_bytes = sum(item.spec.num_bytes for item in items)
        rows = await self._on_worker(num_bytes, torch.cat, [item.rows for item in items])
        return head_frame(part, [item.grid for item in items], times_s, rows), payload(rows)

    async def _send(self, call: Call, part: EncodedPart, endpoints: Sequence[str]) -> None:
        await all_of(*(self._sender.push(endpoint, part.frames) for endpoint in endpoints))
        assert self._backend is not None
        for index, result in enumerate(part.results):
            call.delivered(self._metrics, result, index, "zmq", self._backend.pipeline.clock())

    async def _on_worker(self, num_bytes: int, function: Callable[..., Answer], *arguments: object) -> Answer:
        """The function's result. Computed on a worker above MAX_HASHED_ON_LOOP_BYTES."""
        if num_bytes <= MAX_HASHED_ON_LOOP_BYTES or self._backend is None:
            return function(*arguments)
        return await self._backend.pipeline.workers.run(holder_of(NAMESPACE), function, *arguments)


async def all_of(*work: Coroutine[object, object, None]) -> None:
    """Runs all at once. Raises what the first raises that fails; the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
