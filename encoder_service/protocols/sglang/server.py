"""SGLang's own encoder protocol: its language-only servers use the service as their encoder.

Owns the HTTP side of SGLang 0.5.23 (``disaggregation/encoder``, transfer backends zmq_to_tokenizer and
zmq_to_scheduler): requests as items of the pipeline, errors as HTTP statuses, registration at SGLang's
bootstrap. Frames are ``sglang_push``'s, sending is ``zmq_push``'s, the HTTP server is the composition root's.

The protocol has no tokens: any caller that reaches the address may encode, in one namespace, NAMESPACE.
Requests and bytes have bounds of the same size as gRPC's, counted apart. A content hash that a request states
is verified against the bytes before anything is stored under it, as SGLang's encoder does.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import reprlib
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

import httpcore
import structlog
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from encoder_service import errors
from encoder_service.config import Settings
from encoder_service.errors import InvalidDigest, InvalidRequest, UnsupportedContent
from encoder_service.ops.http_server import read_body
from encoder_service.ops.http_status import http_status
from encoder_service.ops.logs import REQUEST_ID_KEY, bind_request, request_id_of
from encoder_service.ops.metrics import Metrics
from encoder_service.ops.shares import Holder
from encoder_service.own_thread import on_own_thread
from encoder_service.pipeline import EncodeResult, Pipeline, holder_of
from encoder_service.protocols.base import Backend
from encoder_service.protocols.sglang.push import Part, head_frame, payload
from encoder_service.protocols.zmq_push import Receivers, Sender
from encoder_service.rpc.convert import MAX_ITEMS_PER_REQUEST
from encoder_service.rpc.gate import CallPermits
from encoder_service.rpc.item_reader import ItemReader
from encoder_service.rpc.observed import Call
from encoder_service.rpc.status import as_service_error, failure_of, status_of
from encoder_service.scheduler.admission import Admission, Permit
from encoder_service.types import EncodedFile, EncodedItem, Item, Modality
from vision_encoder.v1 import encoder_pb2 as pb

log = structlog.get_logger(__name__)
Answer = TypeVar("Answer")
Wanted = TypeVar("Wanted", bound="Body")

NAMESPACE = "sglang"
MODALITIES = {"IMAGE": (Modality.IMAGE, pb.MODALITY_IMAGE), "VIDEO": (Modality.VIDEO, pb.MODALITY_VIDEO)}
HASH_PREFIX = "sha256:"
# Work on fewer bytes is done on the event loop.
INLINE_BYTES = 256 * 1024
# Commas, lists and objects of a body, counted before it is parsed: each becomes objects many times its size.
# A data URI has one comma.
MAX_JSON_MARKS = 65_536
MAX_REQ_ID_CHARS = 1024
# Wrong fields that an answer names.
MAX_SHOWN = 4
MAX_PARTS = 65_536
# Requests of which receivers are known, or awaited; above it none are noted before their request.
MAX_AWAITED = 4096
AWAIT_S = 60.0
MAX_RECEIVERS = 1024
# For rows to leave, and before that for the scheduler's processes to say where to.
SEND_TIMEOUT_S = 10.0
# Interval at which a bootstrap server is looked at.
WATCH_EVERY_S = 10.0
# SGLang's default of SGLANG_ENCODER_BOOTSTRAP_EVICTED_TTL, after which it forgets an evicted encoder.
REGISTER_AGAIN_S = 600.0
# Also at the stop, while work is still taken.
BOOTSTRAP_TIMEOUT_S = 2.0
STOP_POLL_S = 0.05


class Body(BaseModel):
    """What is read of a request's object; other fields say nothing about rows."""

    model_config = ConfigDict(strict=True, frozen=True)

    req_id: str = Field(min_length=1, max_length=MAX_REQ_ID_CHARS)


class MediaItem(BaseModel):
    """One of ``mm_items``: a URL, data URI or base64, or an object with one as ``url``. Options beside them
    are dropped, as SGLang's encoder drops them for these models. content_hash: of the item's bytes."""

    model_config = Body.model_config

    url: str
    content_hash: str | None = Field(None, pattern=rf"^{HASH_PREFIX}[0-9a-fA-F]{{64}}$")

    @model_validator(mode="before")
    @classmethod
    def of_text(cls, found: object) -> object:
        return {"url": found} if isinstance(found, str) else found

    @property
    def digest(self) -> bytes | None:
        stated = self.content_hash
        return None if stated is None else bytes.fromhex(stated.removeprefix(HASH_PREFIX))


class EncodeRequest(Body):
    """The body of ``/encode``. embedding_port: of the tokenizer's socket on ``prefill_host``; None: the
    scheduler's processes name theirs by ``/scheduler_receive_url``."""

    modality: Annotated[Literal["IMAGE", "VIDEO"], BeforeValidator(lambda found: str(found).upper())]
    mm_items: list[MediaItem] = Field(min_length=1)
    num_parts: int = Field(ge=1, le=MAX_PARTS)
    part_idx: int = Field(ge=0, lt=MAX_PARTS)
    prefill_host: str | None = None
    embedding_port: int | None = Field(None, ge=1, le=65535)

    @property
    def part(self) -> Part:
        return Part(self.req_id, self.num_parts, self.part_idx, MODALITIES[self.modality][0])


class ReceiverRequest(Body):
    """The body of ``/scheduler_receive_url``."""

    receive_count: int = Field(ge=1, le=MAX_RECEIVERS)
    receive_url: str


def checked(kind: type[Wanted], body: Mapping[str, object]) -> Wanted:
    """Raises InvalidRequest, which names each wrong field with its value."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, entry['loc']))} is {reprlib.repr(entry['input'])}: {entry['msg']}"
            for entry in error.errors()[:MAX_SHOWN]
        ]
        raise InvalidRequest("; ".join(wrong)) from None


def inline_content(item: MediaItem) -> bytes:
    """The bytes of a data URI, or of base64 alone, verified. As in SGLang's encoder, what precedes a data
    URI's comma says nothing: its content is base64, padded, without white space. It may be percent-encoded
    (RFC 2397). Raises InvalidRequest, InvalidDigest."""
    is_uri = item.url[:5].lower() == "data:"
    text: str | bytes = item.url.partition(",")[2] if is_uri and "," in item.url else item.url
    try:
        if is_uri and "%" in item.url:
            text = urllib.parse.unquote_to_bytes(text)
        data = base64.b64decode(text, validate=True)
    except ValueError:
        what = "the item is neither a URL nor a data URI, and as base64 it cannot be decoded"
        if is_uri:
            what = "the data URI cannot be decoded: use a data URI in base64, padded, without white space"
        raise InvalidRequest(what) from None
    verify(data, item.digest)
    return data


def verify(data: bytes, digest: bytes | None) -> None:
    """Raises InvalidDigest with both where the stated digest is not the data's."""
    if digest is not None and (found := hashlib.sha256(data).digest()) != digest:
        raise InvalidDigest(
            f"content_hash is {HASH_PREFIX}{digest.hex()}, the content's is {HASH_PREFIX}{found.hex()}"
        )


def clip_times_s(item: EncodedItem) -> list[float]:
    """One time for each step of a clip's grid: the middle of its first and last frame (SGLang's
    ``_calculate_timestamps``). Raises UnsupportedContent for a family whose clips SGLang does not take."""
    clip = item.clip
    if clip is None or clip.chunk_grids:
        raise UnsupportedContent("SGLang takes no clips of this model from an encoder")
    frames_s, num_steps = list(clip.timestamps_s), item.grid.t
    num_frames = -(-len(frames_s) // num_steps)
    frames_s += frames_s[-1:] * (num_frames * num_steps - len(frames_s))
    return [
        (frames_s[first] + frames_s[first + num_frames - 1]) / 2
        for first in range(0, len(frames_s), num_frames)
    ]


@dataclass
class AwaitedReceivers:
    """The scheduler's processes that want one part's rows. urls: their host:port. num_needed: 0 until one has
    stated how many. is_encoding: an ``/encode`` waits for them."""

    urls: list[str] = field(default_factory=list)
    num_needed: int = 0
    is_encoding: bool = False
    are_known: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, url: str, num_needed: int) -> None:
        """Raises InvalidRequest if another process stated another number."""
        if self.num_needed not in (0, num_needed):
            raise InvalidRequest(f"receive_count is {num_needed}, another process stated {self.num_needed}")
        self.num_needed = num_needed
        if url not in self.urls and not self.are_known.is_set():
            self.urls.append(url)
        if len(self.urls) >= num_needed:
            self.are_known.set()


class SglangServer:
    """``app`` answers from the start; ``attach`` once the pipeline is there, ``leave``, ``drain`` and
    ``stop`` at the end. not_ready_because: why no work is taken now, or None."""

    def __init__(
        self, settings: Settings, metrics: Metrics, not_ready_because: Callable[[], str | None]
    ) -> None:
        """Raises ConfigurationError where pyzmq is not installed."""
        self._settings, self._metrics = settings, metrics
        self._not_ready_because = not_ready_because
        self._sender = Sender("sglang", SEND_TIMEOUT_S)
        self._receivers = Receivers("sglang_receivers", settings.sglang_receivers)
        self._permits = CallPermits(settings.max_calls)
        self._admission = Admission(0, settings.max_queued_bytes)
        self._awaited: dict[str, AwaitedReceivers] = {}
        self._pipeline: Pipeline | None = None
        self._reader: ItemReader | None = None
        self._registering: list[asyncio.Task[None]] = []
        self.app = Starlette(
            routes=[
                Route(
                    "/encode",
                    self._answering("sglang/encode", self._encode, self._permits.call),
                    methods=["POST"],
                ),
                Route(
                    "/scheduler_receive_url",
                    # Without a place: the encodes that have them all may wait for this.
                    self._answering(
                        "sglang/scheduler_receive_url",
                        self._add_receiver,
                        lambda _: contextlib.nullcontext(),
                    ),
                    methods=["POST"],
                ),
                Route("/health", self._health),
                Route("/health_generate", self._health),
            ]
        )

    async def open(self) -> None:
        """Nothing: the protocol needs no port besides that of ``app``."""

    async def attach(self, backend: Backend) -> None:
        """Takes work from now on."""
        self._pipeline = backend.pipeline
        self._reader = ItemReader(self._admission, backend.pipeline.workers.executor, None, backend.urls)
        self._registering = [
            asyncio.get_running_loop().create_task(self._keep_registered(url))
            for url in self._settings.sglang_register
        ]

    async def leave(self) -> None:
        """Takes the service off SGLang's lists of encoders."""
        for task in self._registering:
            task.cancel()
        if self._registering:
            await asyncio.gather(*self._registering, return_exceptions=True)
            lists = [f"{url}/unregister_encoder_url" for url in self._settings.sglang_register]
            await asyncio.gather(*(self._call_bootstrap("DELETE", url) for url in lists))
        self._registering = []

    async def drain(self, ends_s: float) -> None:
        """Returns once no request is in progress, or at that time."""
        while self._permits.num_calls and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(STOP_POLL_S)

    async def stop(self) -> None:
        """Once the HTTP server has stopped."""
        await on_own_thread(self._sender.close)  # may take LINGER_MS

    # -- requests --------------------------------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        """By the service's readiness: never waits for the device."""
        is_ready = self._pipeline is not None and self._not_ready_because() is None
        return Response(status_code=200 if is_ready else 503)

    def _answering(
        self,
        method: str,
        work: Callable[[Call, Request, Mapping[str, object], Permit], Awaitable[None]],
        place: Callable[[Holder], contextlib.AbstractContextManager[None]],
    ) -> Callable[[Request], Awaitable[Response]]:
        """The handler of a request whose answer is ``null``, or what ``work`` raises as a status and the
        object that SGLang reads. Work ends when the caller hangs up. place: held until the end, in
        the share of the caller's address; raises TooManyCalls."""

        async def answer(request: Request) -> Response:
            call, status = Call(method, ""), "CANCELLED"
            try:
                holder = (f"peer {'' if request.client is None else request.client.host}",)
                with place(holder):
                    permit = self._admission.acquire(0, holder)
                    try:
                        body = await self._read(request, permit)
                        call.request_id = str(body.get("req_id", ""))[:MAX_REQ_ID_CHARS]
                        bind_request(request_id_of([(REQUEST_ID_KEY, call.request_id)]))
                        await until_left(request, work(call, request, body, permit))
                    finally:
                        permit.release()
                status = "OK"
                return JSONResponse(None)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as found:
                error = as_service_error(found)
                status = status_of(error).name
                call.failed(self._metrics, failure_of(error), status)
                content = {"status": "error", "message": error.message, "req_id": call.request_id or None}
                # ASCII: a request's id may hold lone surrogates.
                return Response(json.dumps(content), http_status(error), media_type="application/json")
            finally:
                self._metrics.count(self._metrics.requests, method, status)

        return answer

    async def _read(self, request: Request, permit: Permit) -> Mapping[str, object]:
        """The request's object. Raises InvalidRequest, PermissionDenied, QueueFull, and as ``read_body``."""
        if "origin" in request.headers:
            raise errors.PermissionDenied("pages of browsers may not ask")
        data = await read_body(request)
        permit.add_bytes(len(data))
        return await self._on_worker(len(data), parse_object, data)

    async def _encode(self, call: Call, request: Request, body: Mapping[str, object], permit: Permit) -> None:
        """``POST /encode``: rows are sent before it is answered."""
        wanted, max_items = checked(EncodeRequest, body), MAX_ITEMS_PER_REQUEST
        if len(wanted.mm_items) > max_items:
            raise InvalidRequest(f"mm_items has {len(wanted.mm_items)} items, at most {max_items} are taken")
        if wanted.part_idx >= wanted.num_parts:
            raise InvalidRequest(f"part_idx is {wanted.part_idx}, num_parts is {wanted.num_parts}")
        peer = peer_of(request)
        if wanted.embedding_port is not None:
            endpoint = self._receivers.endpoint(wanted.prefill_host or "", wanted.embedding_port, peer)
            await self._encode_part(call, wanted, permit, peer, endpoint)
            return
        awaited = self._awaited_of(wanted.req_id, is_encoding=True)
        if awaited.is_encoding:
            raise InvalidRequest(f"req_id {reprlib.repr(wanted.req_id)} is being encoded")
        awaited.is_encoding = True
        try:
            await self._encode_part(call, wanted, permit, peer, awaited)
        finally:
            self._forget(wanted.req_id, awaited)

    async def _encode_part(
        self,
        call: Call,
        wanted: EncodeRequest,
        permit: Permit,
        peer: str,
        receiver: str | AwaitedReceivers,
    ) -> None:
        """receiver: an endpoint, or the processes that state theirs."""
        pipeline, part = self._pipeline, wanted.part
        if pipeline is None:
            raise errors.NotReady(f"the service is not ready: {self._not_ready_because()}")
        delivered: dict[int, EncodeResult] = {}

        async def encode_item(index: int, item: MediaItem) -> None:
            result = await self._rows_of(pipeline, part.modality, item)
            delivered[index] = await pipeline.ensure_tier(result, NAMESPACE, "host")
            self._hold(permit, delivered[index].encoded.spec.num_bytes)

        try:
            await all_of(*(encode_item(index, item) for index, item in enumerate(wanted.mm_items)))
            if len(delivered) < len(wanted.mm_items):  # tasks that the stop has cancelled
                raise errors.Draining("the service stopped before the item was encoded")
            items = [delivered[index].encoded for index in range(len(wanted.mm_items))]
            times_s = [clip_times_s(item) for item in items] if part.modality is Modality.VIDEO else []
            num_bytes = sum(item.spec.num_bytes for item in items)
            rows = await self._on_worker(num_bytes, torch.cat, [item.rows for item in items])
        finally:
            for result in delivered.values():
                result.release()
        frames: list[bytes | memoryview] = [
            head_frame(part, [item.grid for item in items], times_s, rows),
            payload(rows),
        ]
        endpoints = [receiver] if isinstance(receiver, str) else await self._named(receiver, peer)
        await all_of(*(self._sender.push(endpoint, frames) for endpoint in endpoints))
        for index, result in delivered.items():
            call.delivered(self._metrics, result, index, "zmq", pipeline.clock())

    def _hold(self, permit: Permit, num_bytes: int) -> None:
        """Counts rows of the request until its end. Raises InvalidRequest where the request alone exceeds the
        limit, QueueFull where other requests leave too little of it."""
        needed, limit = permit.num_bytes + num_bytes, self._admission.max_bytes
        if needed > limit:
            raise InvalidRequest(
                f"the request has at least {needed} bytes with its rows, at most {limit} are taken"
            )
        permit.add_bytes(num_bytes)

    async def _rows_of(self, pipeline: Pipeline, modality: Modality, item: MediaItem) -> EncodeResult:
        if not item.url[:8].lower().startswith(("http://", "https://")):
            data = await self._on_worker(len(item.url), inline_content, item)
            return await pipeline.encode(Item(modality, EncodedFile(data), item.digest), namespace=NAMESPACE)

        if not item.url.isascii():
            raise InvalidRequest("the URL has characters outside of ASCII")

        async def encode_fetched(fetched: Item) -> EncodeResult:
            if isinstance(fetched.content, EncodedFile):
                await self._on_worker(len(fetched.content.data), verify, fetched.content.data, item.digest)
            return await pipeline.encode(fetched, namespace=NAMESPACE)

        assert self._reader is not None
        message = pb.Item(
            modality=MODALITIES[modality.name][1], url=item.url, content_digest=item.digest or b""
        )
        return await self._reader.ask(message, encode_fetched, (NAMESPACE,))

    # -- receivers that name themselves ----------------------------------------------------------------

    async def _add_receiver(
        self, _call: Call, request: Request, body: Mapping[str, object], _: Permit
    ) -> None:
        """``POST /scheduler_receive_url``, before or after the ``/encode`` of its ``req_id``."""
        wanted = checked(ReceiverRequest, body)
        self._receivers.endpoint_of(wanted.receive_url, peer_of(request))
        self._awaited_of(wanted.req_id).add(wanted.receive_url, wanted.receive_count)

    def _awaited_of(self, req_id: str, *, is_encoding: bool = False) -> AwaitedReceivers:
        """The request's receivers, forgotten after AWAIT_S without its ``/encode``. is_encoding: this is it;
        others' receivers do not keep it out. Raises TooManyCalls."""
        awaited = self._awaited.get(req_id)
        if awaited is None:
            if len(self._awaited) >= MAX_AWAITED and not is_encoding:
                raise errors.TooManyCalls(
                    f"receivers of {len(self._awaited)} requests are awaited, at most {MAX_AWAITED} may be"
                )
            awaited = self._awaited[req_id] = AwaitedReceivers()
            asyncio.get_running_loop().call_later(AWAIT_S, self._forget_unused, req_id, awaited)
        return awaited

    def _forget_unused(self, req_id: str, awaited: AwaitedReceivers) -> None:
        if not awaited.is_encoding:
            self._forget(req_id, awaited)

    def _forget(self, req_id: str, awaited: AwaitedReceivers) -> None:
        if self._awaited.get(req_id) is awaited:
            del self._awaited[req_id]

    async def _named(self, awaited: AwaitedReceivers, peer: str) -> list[str]:
        """The endpoints. peer: of the ``/encode``. Raises DeadlineExceeded, PermissionDenied."""
        try:
            async with asyncio.timeout(AWAIT_S):
                await awaited.are_known.wait()
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"{len(awaited.urls)} of {awaited.num_needed or 'an unknown number of'} receivers were "
                f"named within {AWAIT_S} s"
            ) from None
        # The rows are the peer's of ``/encode``: its rules hold for every caller that asked to receive them.
        return [self._receivers.endpoint_of(url, peer) for url in awaited.urls]

    # -- SGLang's list of encoders ---------------------------------------------------------------------

    async def _keep_registered(self, bootstrap_url: str) -> None:
        """Registers when the server has become reachable, because one that starts anew has an empty list, and
        again after REGISTER_AGAIN_S, because SGLang drops an encoder for good whose probes have failed that
        long. Not more often: a registration resets SGLang's count of failed probes and lists an evicted
        encoder again, and SGLang must be able to evict an encoder that it cannot reach."""
        was_registered, registered_s = None, 0.0
        while True:
            if was_registered and time.monotonic() < registered_s + REGISTER_AGAIN_S:
                is_registered = await self._call_bootstrap("GET", f"{bootstrap_url}/health")
            else:
                is_registered = await self._call_bootstrap("POST", f"{bootstrap_url}/register_encoder_url")
                registered_s = time.monotonic()
            if is_registered is not was_registered:
                report = log.info if is_registered else log.warning
                report("registered at SGLang" if is_registered else "not registered", bootstrap=bootstrap_url)
            was_registered = is_registered
            await asyncio.sleep(WATCH_EVERY_S)

    async def _call_bootstrap(self, method: str, url: str) -> bool:
        content = json.dumps({"url": self._settings.sglang_url}).encode()
        unreachable = (TimeoutError, OSError, ValueError, httpcore.NetworkError, httpcore.ProtocolError)
        with contextlib.suppress(*unreachable):
            async with asyncio.timeout(BOOTSTRAP_TIMEOUT_S), httpcore.AsyncConnectionPool() as client:
                answer = await client.request(
                    method, url, headers={"Content-Type": "application/json"}, content=content
                )
                return answer.status == 200
        return False

    async def _on_worker(self, num_bytes: int, function: Callable[..., Answer], *arguments: object) -> Answer:
        """The function's result, on a worker where it has many bytes to work on."""
        if num_bytes <= INLINE_BYTES or self._pipeline is None:
            return function(*arguments)
        return await self._pipeline.workers.run(holder_of(NAMESPACE), function, *arguments)


def parse_object(data: bytes) -> Mapping[str, object]:
    """Raises InvalidRequest."""
    num_marks = sum(map(data.count, (b",", b"[", b"{")))
    if num_marks > MAX_JSON_MARKS:
        raise InvalidRequest(
            f"the body has {num_marks} commas and brackets, at most {MAX_JSON_MARKS} are taken"
        )
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{len(data)} bytes are no JSON") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body is a {type(body).__name__}, needed is an object")
    return body


async def all_of(*work: Coroutine[object, object, None]) -> None:
    """Runs all at once. Raises what the first raises that fails; the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


def peer_of(request: Request) -> str:
    """The caller's address. Raises InvalidRequest where the connection has none."""
    if request.client is None:
        raise InvalidRequest("the connection has no address")
    return request.client.host


async def until_left(request: Request, work: Awaitable[None]) -> None:
    """Runs ``work``, which is cancelled when the caller hangs up. Raises what it raises, and
    ClientDisconnect. The body has been read: what is received next is the end of the connection."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
